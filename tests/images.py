"""Images of containers made by hand, and registries that serve them: real ones, on this host, filled by this file.

An `Image` is written into a `Layout` (the directory form of OCI), from which skopeo copies it into a `Registry`.
"""

import base64
import contextlib
import datetime as dt
import gzip
import hashlib
import http.server
import io
import ipaddress
import json
import os
import secrets
import shutil
import socket
import subprocess
import tarfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import zstandard
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from tests.installation import free_ports

OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
APPLETS = (
    *("sh", "cat", "chmod", "chown", "cp", "date", "echo", "env", "false", "find", "grep", "head", "id", "kill", "ln"),
    *("ls", "mkdir", "mv", "printf", "pwd", "rm", "sed", "sha256sum", "sleep", "sort", "stat", "tail", "tar", "test"),
    *("touch", "tr", "true", "uniq", "wc", "dd", "seq", "yes", "xargs", "md5sum", "mknod", "du"),
)
ACCOUNTS = b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
GROUPS = b"root:x:0:\nstaff:x:50:\nuser:x:1000:\n"


@dataclass
class File:
    """One member of a tar. ``kind`` is a tarfile type."""

    data: bytes = b""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    pax: dict[str, str] = field(default_factory=dict)
    mtime: int = 1_600_000_000


def directory(mode: int = 0o755, **fields: Any) -> File:
    return File(mode=mode, kind=tarfile.DIRTYPE, **fields)


def symlink(target: str) -> File:
    return File(mode=0o777, kind=tarfile.SYMTYPE, link=target)


def hard_link(target: str) -> File:
    return File(kind=tarfile.LNKTYPE, link=target)


def program(text: str) -> File:
    return File(text.encode(), 0o755)


Members = dict[str, File | bytes | str]


def tar_of(members: Members) -> bytes:
    """A plain tar with exactly these members, in this order."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, given in members.items():
            file = given if isinstance(given, File) else File(given.encode() if isinstance(given, str) else given)
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid, member.gid = file.kind, file.mode, file.uid, file.gid
            member.linkname, member.mtime, member.size = file.link, file.mtime, len(file.data)
            member.pax_headers = dict(file.pax)
            archive.addfile(member, io.BytesIO(file.data))
    return target.getvalue()


def busybox() -> bytes:
    """The layer of an image with a shell and not much more."""
    path = shutil.which("busybox")
    if path is None:
        pytest.skip("needs busybox: run scripts/packages test")
    members: Members = {"bin": directory(), "etc": directory(), "root": directory(0o700), "tmp": directory(0o1777)}
    members["bin/busybox"] = File(Path(path).read_bytes(), 0o755)
    members |= {f"bin/{name}": symlink("busybox") for name in APPLETS}
    members |= {"etc/passwd": ACCOUNTS, "etc/group": GROUPS, "home": directory()}
    members["home/user"] = directory(uid=1000, gid=1000)
    return tar_of(members)


@dataclass
class Image:
    """``layers`` are plain tars; ``compression`` is gzip, zstd or none; ``manifests`` is oci or docker."""

    layers: list[bytes]
    config: dict[str, Any] = field(default_factory=dict)
    compression: str = "gzip"
    manifests: str = "oci"
    architecture: str = "amd64"


class Layout:
    """A directory in OCI's form. What is added is there at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "blobs/sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')

    def add_blob(self, data: bytes) -> tuple[str, int]:
        digest = hashlib.sha256(data).hexdigest()
        (self.path / "blobs/sha256" / digest).write_bytes(data)
        return f"sha256:{digest}", len(data)

    def add(self, image: Image, **changes: Any) -> dict[str, Any]:
        """Write an image; return its descriptor. ``changes`` replace fields of the manifest."""
        oci = image.manifests == "oci"
        suffix = {"gzip": "+gzip" if oci else ".gzip", "zstd": "+zstd" if oci else ".zstd", "none": ""}
        layers = []
        for tar in image.layers:
            digest, size = self.add_blob(compressed(tar, image.compression))
            kind = f"{OCI}.layer.v1.tar" if oci else f"{DOCKER}.image.rootfs.diff.tar"
            layers.append({"mediaType": kind + suffix[image.compression], "digest": digest, "size": size})
        config = {
            "architecture": image.architecture,
            "os": "linux",
            "config": image.config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(t).hexdigest()}" for t in image.layers]},
        }
        digest, size = self.add_blob(json.dumps(config).encode())
        kind = f"{OCI}.config.v1+json" if oci else f"{DOCKER}.container.image.v1+json"
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json" if oci else f"{DOCKER}.distribution.manifest.v2+json",
            "config": {"mediaType": kind, "digest": digest, "size": size},
            "layers": layers,
            **changes,
        }
        return self._described(manifest, {"os": "linux", "architecture": image.architecture})

    def add_list(self, images: list[Image]) -> dict[str, Any]:
        """Write images for several kinds of machine, and the list of them."""
        listed = {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": [self.add(i) for i in images]}
        return self._described(listed, None)

    def close(self, descriptor: dict[str, Any]) -> Path:
        """Let this be what the layout holds."""
        index = {"schemaVersion": 2, "manifests": [{k: v for k, v in descriptor.items() if k != "platform"}]}
        (self.path / "index.json").write_text(json.dumps(index))
        return self.path

    def _described(self, manifest: dict[str, Any], platform: dict[str, str] | None) -> dict[str, Any]:
        digest, size = self.add_blob(json.dumps(manifest).encode())
        described = {"mediaType": manifest["mediaType"], "digest": digest, "size": size}
        return described if platform is None else {**described, "platform": platform}


def compressed(data: bytes, how: str) -> bytes:
    match how:
        case "gzip":
            return gzip.compress(data, 1, mtime=0)
        case "zstd":
            return zstandard.ZstdCompressor(level=1).compress(data)
        case _:
            return data


def archive_of(image: Image, directory: Path, transport: str = "oci-archive") -> bytes:
    """An image as one file, as skopeo writes it."""
    layout = Layout(directory / f"layout-{secrets.token_hex(4)}")
    path = layout.close(layout.add(image))
    target = directory / f"archive-{secrets.token_hex(4)}.tar"
    _skopeo("copy", f"oci:{path}", f"{transport}:{target}" + (":x/y:latest" if transport == "docker-archive" else ""))
    return target.read_bytes()


# --- registries


def _skopeo(*words: str) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("needs skopeo: run scripts/packages host")
    done = subprocess.run(
        ["skopeo", "--insecure-policy", *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


@dataclass
class Certificates:
    """An authority of one's own and a certificate of it: for this host, or for other names."""

    directory: Path
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        key, name = ec.generate_private_key(ec.SECP256R1()), _name("authority")
        now = dt.datetime.now(dt.UTC)

        def certificate(subject: x509.Name, public: Any) -> x509.CertificateBuilder:
            builder = x509.CertificateBuilder().subject_name(subject).issuer_name(name).public_key(public)
            builder = builder.serial_number(x509.random_serial_number())
            return builder.not_valid_before(now - dt.timedelta(1)).not_valid_after(now + dt.timedelta(2))

        authority = certificate(name, key.public_key())
        authority = authority.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        own = ec.generate_private_key(ec.SECP256R1())
        here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        names = [x509.DNSName(name) for name in self.names] or here
        server = certificate(_name("registry"), own.public_key())
        server = server.add_extension(x509.SubjectAlternativeName(names), critical=False)
        self.ca_pem = _pem(authority.sign(key, hashes.SHA256()))
        self.certificate, self.key = self.directory / "server.pem", self.directory / "server.key"
        self.certificate.write_text(_pem(server.sign(key, hashes.SHA256())))
        self.key.write_bytes(_private(own))
        self.authorities = self.directory / "authorities"
        self.authorities.mkdir()
        (self.authorities / "ca.crt").write_text(self.ca_pem)


class Registry:
    """A real registry on a port of this host. With ``users`` it wants credentials, with ``tls`` it speaks TLS."""

    def __init__(
        self, directory: Path, *, users: dict[str, str] | None = None, tls: bool = False, tokens: bool = False
    ) -> None:
        self._directory = directory
        self._users = users
        directory.mkdir(parents=True)
        self.certificates = Certificates(directory) if tls else None
        self._tokens = _Tokens(directory, users or {}) if tokens else None
        (self.port,) = free_ports(1)
        self.host = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.log = directory / "registry.log"

    def start(self) -> None:
        program = shutil.which("docker-registry")
        if program is None:
            pytest.skip("needs docker-registry: run scripts/packages test")
        config = self._directory / "config.yml"
        config.write_text(json.dumps(self._config()))  # JSON is YAML
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([program, "serve", config], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while not _accepts(self.port):
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._tokens is not None:
            self._tokens.close()

    def push(self, name: str, layout: Path, *, every: bool = False) -> str:
        """Copy what a layout holds (``every``: all images of a list); return the reference."""
        options = ["--dest-tls-verify=false"]
        if self.certificates is not None:
            options = [f"--dest-cert-dir={self.certificates.authorities}"]
        if self._users:
            user, password = next(iter(self._users.items()))
            options.append(f"--dest-creds={user}:{password}")
        _skopeo("copy", *(["--all"] if every else []), *options, f"oci:{layout}", f"docker://{self.host}/{name}")
        return f"{self.host}/{name}"

    def push_image(self, name: str, image: Image) -> str:
        layout = Layout(self._directory / f"layout-{secrets.token_hex(4)}")
        return self.push(name, layout.close(layout.add(image)))

    def digest(self, name: str) -> str:
        """The digest that the registry has for a tag."""
        path, _, tag = name.partition(":")
        accept = f"{OCI}.manifest.v1+json, {OCI}.index.v1+json"
        url = f"http://{self.host}/v2/{path}/manifests/{tag}"
        return httpx.head(url, headers={"accept": accept}).headers["docker-content-digest"]

    def requests(self) -> list[str]:
        """Lines of its log that tell of requests."""
        return [line for line in self.log.read_text().splitlines() if "http.request.uri" in line]

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "version": 0.1,
            "log": {"accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(self._directory / "storage")}},
            "http": {"addr": self.host, "secret": "x"},
        }
        if self.certificates is not None:
            config["http"]["tls"] = {
                "certificate": str(self.certificates.certificate),
                "key": str(self.certificates.key),
            }
        if self._tokens is not None:
            config["auth"] = {"token": self._tokens.config()}
        elif self._users is not None:
            path = self._directory / "htpasswd"
            path.write_text("".join(f"{user}:{_bcrypt(password)}\n" for user, password in self._users.items()))
            config["auth"] = {"htpasswd": {"realm": "test", "path": str(path)}}
        return config


class _Tokens:
    """Gives tokens to those who know a password, as registries of today have it."""

    def __init__(self, directory: Path, users: dict[str, str]) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        now = dt.datetime.now(dt.UTC)
        builder = x509.CertificateBuilder().subject_name(_name("tokens")).issuer_name(_name("tokens"))
        builder = builder.public_key(self._key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - dt.timedelta(1)).not_valid_after(now + dt.timedelta(2))
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self._bundle = directory / "tokens.pem"
        self._bundle.write_text(_pem(self._certificate))
        tokens = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                given = base64.b64decode(self.headers.get("authorization", "Basic ").partition(" ")[2]).decode()
                user, _, password = given.partition(":")
                known = users.get(user) == password and user != ""
                body = json.dumps({"token": tokens.token(self.path)} if known else {"errors": []}).encode()
                self.send_response(200 if known else 401)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def config(self) -> dict[str, str]:
        realm = f"http://127.0.0.1:{self._server.server_port}/token"
        return {"realm": realm, "service": "test", "issuer": "tests", "rootcertbundle": str(self._bundle)}

    def token(self, path: str) -> str:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)
        access = []
        for scope in query.get("scope", []):
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        now = int(time.time())
        claims = {"iss": "tests", "sub": "x", "aud": "test", "exp": now + 300, "nbf": now - 10, "iat": now}
        der = self._certificate.public_bytes(serialization.Encoding.DER)
        headers = {"x5c": [base64.b64encode(der).decode()]}
        return jwt.encode({**claims, "jti": secrets.token_hex(8), "access": access}, self._key, "RS256", headers)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def registry(directory: Path, **options: Any) -> Iterator[Registry]:
    one = Registry(directory, **options)
    try:
        one.start()
        yield one
    finally:
        one.close()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _private(key: Any) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _bcrypt(password: str) -> str:
    """What htpasswd would write; Python has no bcrypt of its own, and perl asks the system's."""
    words = ["perl", "-e", "print crypt($ENV{PASSWORD}, '$2b$05$' . 'abcdefghijklmnopqrstuu')"]
    environment = {"PASSWORD": password, "PATH": os.environ["PATH"]}
    return subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

"""Whom a guest trusts: put into each distribution's stores and taken out again without a trace, and never led astray."""

import base64
import os
import re
import shutil
import ssl
import stat
import subprocess
import time
from pathlib import Path

import pytest
from cryptography import x509

from space import authority
from space.broker.trees import look
from space.guest import keystores
from space.guest.trust import NAME, Stores
from space.node.trust import Trust

# Made by keytool of OpenJDK 17: a store of each format with one certificate, called "one".
JKS = base64.b64decode(
    "/u3+7QAAAAIAAAABAAAAAgADb25lAAABoioOrQ4ABVguNTA5AAABdjCCAXIwggEZoAMCAQICFHVYvuZQLjoRi9hBSsC5qe1lZFhT"
    "MAoGCCqGSM49BAMCMA4xDDAKBgNVBAMMA29uZTAgFw0yNjExMzAwMTI1MzRaGA8yMTI2MTEwNjAxMjUzNFowDjEMMAoGA1UEAwwD"
    "b25lMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEVpppFtOjBeVIDFzfCDYAwZADJ4TC5mt2mVzbUHukE+n02YrznhNOFrm1jMh7"
    "fyL3m/q17KGzDB1A1sprULtruKNTMFEwHQYDVR0OBBYEFNdYz5zmRJ3L9AJmS7nOMTD0F+9nMB8GA1UdIwQYMBaAFNdYz5zmRJ3L"
    "9AJmS7nOMTD0F+9nMA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDRwAwRAIgLoH/q5DM0FuNbrRACmAAaNhLu1ugfQE/g6WB"
    "MjNdNncCIGL4gNJAJmeUwmMvAelxnIhJaG24eyPdDxKvMzzr07pLvz9M1bsWRKf2/QHEA8CrlKAnSxA="
)
PKCS12 = base64.b64decode(
    "MIICDQIBAzCCAgYGCSqGSIb3DQEHAaCCAfcEggHzMIIB7zCCAesGCSqGSIb3DQEHAaCCAdwEggHYMIIB1DCCAdAGCyqGSIb3DQEM"
    "CgEDoIIBjjCCAYoGCiqGSIb3DQEJFgGgggF6BIIBdjCCAXIwggEZoAMCAQICFHVYvuZQLjoRi9hBSsC5qe1lZFhTMAoGCCqGSM49"
    "BAMCMA4xDDAKBgNVBAMMA29uZTAgFw0yNjExMzAwMTI1MzRaGA8yMTI2MTEwNjAxMjUzNFowDjEMMAoGA1UEAwwDb25lMFkwEwYH"
    "KoZIzj0CAQYIKoZIzj0DAQcDQgAEVpppFtOjBeVIDFzfCDYAwZADJ4TC5mt2mVzbUHukE+n02YrznhNOFrm1jMh7fyL3m/q17KGz"
    "DB1A1sprULtruKNTMFEwHQYDVR0OBBYEFNdYz5zmRJ3L9AJmS7nOMTD0F+9nMB8GA1UdIwQYMBaAFNdYz5zmRJ3L9AJmS7nOMTD0"
    "F+9nMA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDRwAwRAIgLoH/q5DM0FuNbrRACmAAaNhLu1ugfQE/g6WBMjNdNncCIGL4"
    "gNJAJmeUwmMvAelxnIhJaG24eyPdDxKvMzzr07pLMS8wFQYJKoZIhvcNAQkUMQgeBgBvAG4AZTAWBgxghkgBhvlmrcp7AQExBgYE"
    "VR0lAA=="
)
DEBIAN = {
    "etc/ssl/certs/ca-certificates.crt": "roots",
    "etc/ssl/certs/java/cacerts": JKS,
    "usr/local/share/ca-certificates/": None,
    "usr/lib/jvm/java-21/lib/security/cacerts": PKCS12,
}
FEDORA = {
    "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem": "roots",
    "etc/pki/ca-trust/source/anchors/": None,
    "etc/pki/tls/certs/ca-bundle.crt": Path("/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"),
    "etc/pki/ca-trust/extracted/pem/directory-hash/": None,
    "etc/ssl/certs": Path("../pki/tls/certs"),
}
ALPINE = {
    "etc/ssl/certs/ca-certificates.crt": "roots",
    "usr/local/share/ca-certificates/": None,
    "etc/ssl/cert.pem": Path("certs/ca-certificates.crt"),
}
SUSE = {
    "var/lib/ca-certificates/ca-bundle.pem": "roots",
    "etc/pki/trust/anchors/": None,
    "etc/ssl/ca-bundle.pem": Path("/var/lib/ca-certificates/ca-bundle.pem"),
}
NOTHING: dict[str, object] = {"etc/passwd": "root:x:0:0::/:/bin/sh\n"}
LAYOUTS = {"debian": DEBIAN, "fedora": FEDORA, "alpine": ALPINE, "suse": SUSE, "nothing": NOTHING}
BUNDLES = {
    "debian": "etc/ssl/certs/ca-certificates.crt",
    "fedora": "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "alpine": "etc/ssl/certs/ca-certificates.crt",
    "suse": "var/lib/ca-certificates/ca-bundle.pem",
    "nothing": "run/space/ca-bundle.pem",
}


def certificate(directory: Path) -> tuple[str, str]:
    """A fresh authority's certificate and its hash."""
    directory.mkdir()
    authority.ensure(directory, "space", os.geteuid(), os.getegid())
    found = Trust.load(directory / authority.CERTIFICATE)
    assert found.certificate
    assert found.subject_hash
    return found.certificate, found.subject_hash


@pytest.fixture
def ours(tmp_path: Path) -> tuple[str, str]:
    return certificate(tmp_path / "ours")


@pytest.fixture
def roots(tmp_path: Path) -> str:
    return certificate(tmp_path / "roots")[0]


def laid_out(top: Path, layout: dict[str, object], roots: str) -> Path:
    (top / "run").mkdir(parents=True)
    for name, content in layout.items():
        path = top / name
        if name.endswith("/"):
            path.mkdir(parents=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(roots if content == "roots" else str(content))
            path.chmod(0o444)
    return top


def digest(root: Path) -> str:
    """What a template of this tree would be called; what is in memory does not count."""
    shutil.rmtree(root / "run/space", ignore_errors=True)
    return look(os.fsencode(root), b"").digest


def trusted(bundle: Path) -> set[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=str(bundle))
    return {dict(pair for part in one["subject"] for pair in part)["commonName"] for one in context.get_ca_certs()}


def name_of(pem: str) -> str:
    subject = x509.load_pem_x509_certificate(pem.encode()).subject
    return str(subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bundle_that_programs_are_told_of_has_ours_beside_what_was_there(
    tmp_path: Path, ours: tuple[str, str], roots: str, layout: str
) -> None:
    root = laid_out(tmp_path / "root", LAYOUTS[layout], roots)
    told = Stores(str(root)).add(*ours)
    assert told["SSL_CERT_FILE"] == f"/{BUNDLES[layout]}"
    expected = {name_of(ours[0])} | (set() if layout == "nothing" else {name_of(roots)})
    assert trusted(root / BUNDLES[layout]) == expected
    assert (root / told["NODE_EXTRA_CA_CERTS"].lstrip("/")).read_text() == ours[0]
    assert {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO", "DENO_CERT"} <= set(told)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_taken_back_the_disk_is_as_it_was(tmp_path: Path, ours: tuple[str, str], roots: str, layout: str) -> None:
    root = laid_out(tmp_path / "root", LAYOUTS[layout], roots)
    before = digest(root)
    Stores(str(root)).add(*ours)
    assert layout == "nothing" or digest(root) != before
    Stores(str(root)).remove()
    assert digest(root) == before
    Stores(str(root)).remove()
    assert digest(root) == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_told_again_nothing_changes(tmp_path: Path, ours: tuple[str, str], roots: str, layout: str) -> None:
    root = laid_out(tmp_path / "root", LAYOUTS[layout], roots)
    first = Stores(str(root)).add(*ours)
    before = look(os.fsencode(root), b"").digest
    inodes = {path: path.lstat().st_ino for path in root.rglob("*")}
    assert Stores(str(root)).add(*ours) == first
    assert look(os.fsencode(root), b"").digest == before
    assert {path: path.lstat().st_ino for path in root.rglob("*")} == inodes


@pytest.mark.parametrize("layout", ["debian", "fedora", "alpine", "suse"])
def test_a_new_authority_takes_the_place_of_the_old_one(
    tmp_path: Path, ours: tuple[str, str], roots: str, layout: str
) -> None:
    root = laid_out(tmp_path / "root", LAYOUTS[layout], roots)
    before = digest(root)
    Stores(str(root)).add(*ours)
    shutil.rmtree(root / "run/space")  # the machine was stopped meanwhile
    newer = certificate(tmp_path / "newer")
    Stores(str(root)).add(*newer)
    assert trusted(root / BUNDLES[layout]) == {name_of(newer[0]), name_of(roots)}
    assert name_of(ours[0]).encode() not in b"".join(p.read_bytes() for p in root.rglob("*") if p.is_file())
    Stores(str(root)).remove()
    assert digest(root) == before


def test_openssl_finds_it_by_its_hash(tmp_path: Path, ours: tuple[str, str], roots: str) -> None:
    root = laid_out(tmp_path / "root", DEBIAN, roots)
    Stores(str(root)).add(*ours)
    certs = root / "etc/ssl/certs"
    assert str((certs / f"{ours[1]}.0").readlink()) == f"{NAME}.pem"
    assert str((certs / f"{NAME}.pem").readlink()) == f"/usr/local/share/ca-certificates/{NAME}.crt"
    shown = subprocess.run(
        ["openssl", "x509", "-noout", "-subject_hash"], input=ours[0], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == ours[1]


def test_another_certificate_of_the_same_hash_stays(tmp_path: Path, ours: tuple[str, str], roots: str) -> None:
    root = laid_out(tmp_path / "root", DEBIAN, roots)
    certs = root / "etc/ssl/certs"
    (certs / f"{ours[1]}.0").symlink_to("other.pem")
    (certs / f"{ours[1]}.1").write_text("a file")
    before = digest(root)
    Stores(str(root)).add(*ours)
    assert str((certs / f"{ours[1]}.0").readlink()) == "other.pem"
    assert str((certs / f"{ours[1]}.2").readlink()) == f"{NAME}.pem"
    Stores(str(root)).remove()
    assert digest(root) == before


def test_what_update_ca_certificates_has_made_of_it_is_taken_out_too(
    tmp_path: Path, ours: tuple[str, str], roots: str
) -> None:
    """A step of a build may install certificates while ours is among them."""
    root = laid_out(tmp_path / "root", DEBIAN, roots)
    before = digest(root)
    Stores(str(root)).add(*ours)
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    mode = stat.S_IMODE(bundle.stat().st_mode)
    bundle.unlink()
    bundle.write_text(ours[0] + roots)  # sorted, without our mark
    bundle.chmod(mode)
    Stores(str(root)).remove()
    assert bundle.read_text() == roots
    assert digest(root) == before


def test_a_bundle_keeps_owner_and_mode(tmp_path: Path, ours: tuple[str, str], roots: str) -> None:
    root = laid_out(tmp_path / "root", DEBIAN, roots)
    bundle = root / BUNDLES["debian"]
    bundle.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(bundle, 12, 34)
    before = bundle.stat()
    for change in (lambda: Stores(str(root)).add(*ours), Stores(str(root)).remove):
        change()
        after = bundle.stat()
        assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


HOSTILE = ["etc/ssl/certs/ca-certificates.crt", f"etc/ssl/certs/{NAME}.pem", "etc/ssl/certs/java/cacerts"]


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "dangling", "huge"])
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_plain_file_is_neither_followed_nor_waited_for(
    tmp_path: Path, ours: tuple[str, str], roots: str, name: str, kind: str
) -> None:
    root = laid_out(tmp_path / "root", DEBIAN, roots)
    outside = tmp_path / "outside"
    outside.write_text(roots)
    path = root / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
        (path / "file").write_text("")
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to(outside if kind == "link" else "nowhere")
    told = Stores(str(root)).add(*ours)
    assert told
    Stores(str(root)).remove()
    assert outside.read_text() == roots
    assert name.endswith(".pem") or stat.S_IFMT(path.lstat().st_mode) != stat.S_IFREG or kind == "huge"


@pytest.mark.parametrize(
    "directory", ["etc", "etc/ssl", "etc/ssl/certs", "usr/local/share/ca-certificates", "run/space"]
)
def test_no_directory_that_is_a_link_leads_anywhere(
    tmp_path: Path, ours: tuple[str, str], roots: str, directory: str
) -> None:
    root = laid_out(tmp_path / "root", DEBIAN, roots)
    outside = laid_out(tmp_path / "outside", {**DEBIAN, "ca-certificates.crt": "roots", "certs/": None}, roots)
    before = look(os.fsencode(outside), b"").digest
    path = root / directory
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(outside / directory if (outside / directory).exists() else outside)
    Stores(str(root)).add(*ours)
    Stores(str(root)).remove()
    assert look(os.fsencode(outside), b"").digest == before


def test_circles_of_links_are_nothing_to_wait_for(tmp_path: Path, ours: tuple[str, str]) -> None:
    root = tmp_path / "root"
    (root / "etc/ssl").mkdir(parents=True)
    (root / "run").mkdir()
    (root / "etc/ssl/certs").symlink_to("certs")
    assert Stores(str(root)).add(*ours)["SSL_CERT_FILE"] == "/run/space/ca-bundle.pem"


def test_without_any_place_to_put_it_programs_are_told_nothing(tmp_path: Path, ours: tuple[str, str]) -> None:
    (tmp_path / "root").mkdir()
    assert Stores(str(tmp_path / "root")).add(*ours) == {}


@pytest.mark.parametrize("store", [JKS, PKCS12], ids=["jks", "pkcs12"])
def test_a_java_store_gets_ours_once_and_loses_it_again(ours: tuple[str, str], store: bytes) -> None:
    mine = keystores.der(ours[0])
    added = keystores.add(store, mine)
    assert added is not None
    assert mine in added
    assert keystores.add(added, mine) == added
    assert keystores.remove(added, mine) == store
    assert keystores.remove(store, mine) == store


@pytest.mark.parametrize("store", [JKS, PKCS12], ids=["jks", "pkcs12"])
def test_a_java_store_that_is_not_as_it_should_be_is_left_alone(ours: tuple[str, str], store: bytes) -> None:
    mine = keystores.der(ours[0])
    for size in range(len(store)):
        assert keystores.add(store[:size], mine) is None
    for place in range(24):
        spoiled = store[:place] + bytes((store[place] ^ 0xFF,)) + store[place + 1 :]
        changed = keystores.add(spoiled, mine)
        assert changed is None or changed != spoiled
    assert keystores.add(b"", mine) is None
    assert keystores.add(os.urandom(1000), mine) is None


def test_a_java_store_in_small_pieces_costs_no_time(ours: tuple[str, str]) -> None:
    pieces = b"\x30\x00" * (1 << 20)
    listed = b"\x30\x83" + len(pieces).to_bytes(3, "big") + pieces
    octets = b"\x04\x83" + len(listed).to_bytes(3, "big") + listed
    explicit = b"\xa0\x83" + len(octets).to_bytes(3, "big") + octets
    content = bytes.fromhex("06092a864886f70d010701") + explicit
    inside = b"\x30\x83" + len(content).to_bytes(3, "big") + content
    whole = b"\x02\x01\x03" + inside
    store = b"\x30\x83" + len(whole).to_bytes(3, "big") + whole
    began = time.thread_time()
    assert keystores.add(store, keystores.der(ours[0])) is None
    assert time.thread_time() - began < 2


def test_a_certificate_of_no_installation_is_not_told_of(tmp_path: Path) -> None:
    assert Trust.load(tmp_path / "ca.crt") == Trust()
    (tmp_path / "ca.crt").write_text("rubbish")
    assert Trust.load(tmp_path / "ca.crt") == Trust()


def test_the_hash_is_of_eight_digits(ours: tuple[str, str]) -> None:
    assert re.fullmatch(r"[0-9a-f]{8}", ours[1])

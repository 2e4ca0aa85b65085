"""The authority that signs what the gateway shows: put where this guest's programs look for whom to trust, and taken
away again.

Each distribution keeps its stores elsewhere, and some programs have stores of their own; what is here of them is
changed, and nothing is made that was not. No symbolic link is followed, nothing but regular files of the guest's own
disk is opened, and what cannot be done is left: programs are told by variables, too.
"""

from __future__ import annotations

import os
import re
import stat

from space.guest import keystores

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NAME = "space-egress"
RUN = "run/space"
_CERTIFICATE, _BUNDLE = "ca.pem", "ca-bundle.pem"
_MARK = b"\n# SPACE: what the gateway shows is signed by\n"
_STORE_BYTES_MAX = 16 * 1024 * 1024
_JAVAS_MAX = 16
# All certificates in one file. Where one of these names is a link, the file that it leads to is here, too.
_BUNDLES = (
    "etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine
    "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora and its kin
    "etc/pki/tls/certs/ca-bundle.crt",
    "var/lib/ca-certificates/ca-bundle.pem",  # SUSE
    "etc/ca-certificates/extracted/tls-ca-bundle.pem",  # Arch
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
)
# From here the distribution's own program makes the bundle anew.
_ANCHORS = (
    "usr/local/share/ca-certificates",
    "etc/pki/ca-trust/source/anchors",
    "etc/pki/trust/anchors",
    "etc/ca-certificates/trust-source/anchors",
)
# A file for each certificate, found by a hash of its subject.
_HASHED = ("etc/ssl/certs", "etc/pki/tls/certs", "etc/pki/ca-trust/extracted/pem/directory-hash")
_JAVA = "etc/ssl/certs/java/cacerts"
_JAVAS, _IN_JAVA = ("usr/lib/jvm", "opt/java", "opt"), ("lib/security/cacerts", "jre/lib/security/cacerts")
_HASH_LINK = re.compile(r"[0-9a-f]{8}\.[0-9]{1,2}")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_AFRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Elsewhere(OSError):
    """What has that name is not a plain file or directory on the guest's own disk."""


class Stores:
    """The stores below ``root``, of which each is changed as far as that can be done."""

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._device = os.lstat(root).st_dev

    def add(self, pem: str, subject_hash: str) -> dict[str, str]:
        """Trust a certificate, and no longer one that was added before; return the variables that say where it is.

        Repeatable. ``subject_hash`` is what OpenSSL calls that.
        """
        data = pem.encode()
        for old in self._added() - {data}:
            self._forget(old)
        anchored = [self._attempt(lambda d=d: self._put(d, f"{NAME}.crt", data)) for d in _ANCHORS]
        for directory in _HASHED:
            self._attempt(lambda d=directory: self._link(d, data, subject_hash, anchored=anchored[0] is True))
        bundled = [self._attempt(lambda path=path: self._append(path, data)) for path in _BUNDLES]
        self._keystores(lambda store: keystores.add(store, keystores.der(pem)))
        return self._tell(data, next((path for path, done in zip(_BUNDLES, bundled, strict=True) if done), None))

    def remove(self) -> None:
        """Take away what ``add`` has put anywhere, also where a program has copied it from store to store since."""
        for pem in self._added():
            self._forget(pem)
        for name in (_CERTIFICATE, _BUNDLE):
            self._attempt(lambda name=name: self._unlink(RUN, name))

    def _added(self) -> set[bytes]:
        """Return the certificates that were added: now, or by an agent before this one."""
        places = [(d, f"{NAME}.crt") for d in _ANCHORS] + [(d, f"{NAME}.pem") for d in _HASHED] + [(RUN, _CERTIFICATE)]
        found = [self._attempt(lambda d=d, name=name: self._read(d, name)[0]) for d, name in places]
        return {pem for pem in found if pem}

    def _forget(self, pem: bytes) -> None:
        for directory in _ANCHORS:
            self._attempt(lambda d=directory: self._unlink(d, f"{NAME}.crt"))
        for directory in _HASHED:
            self._attempt(lambda d=directory: self._unlink_hashed(d))
        for path in _BUNDLES:
            self._attempt(lambda path=path: self._cut(path, pem))
        self._keystores(lambda store: keystores.remove(store, keystores.der(pem.decode("ascii", "replace"))))

    def _tell(self, pem: bytes, bundle: str | None) -> dict[str, str]:
        """Return what programs are told, and see to it that it is there."""
        directory = self._run_directory()
        if directory is None:
            return {}
        try:
            _write(directory, _CERTIFICATE, pem)
            if bundle is None:
                _write(directory, _BUNDLE, self._roots() + pem)
        finally:
            os.close(directory)
        return variables(f"/{bundle}" if bundle else f"/{RUN}/{_BUNDLE}", f"/{RUN}/{_CERTIFICATE}")

    def _roots(self) -> bytes:
        """Return a bundle that is there and could not be changed."""
        for path in _BUNDLES:
            found = self._attempt(lambda path=path: self._read(*_split(path))[0])
            if found:
                return found if found.endswith(b"\n") else found + b"\n"
        return b""

    def _run_directory(self) -> int | None:
        """Open the directory in memory, made if need be."""
        parent, name = _split(RUN)
        try:
            above = self._directory(parent, own_disk=False)
            try:
                try:
                    os.mkdir(name, 0o755, dir_fd=above)
                except FileExistsError:
                    pass
                return os.open(name, _DIRECTORY, dir_fd=above)
            finally:
                os.close(above)
        except OSError:
            return None

    # --- one store each; ``OSError`` where it is not there or not as it should be

    def _put(self, directory: str, name: str, data: bytes) -> bool:
        fd = self._directory(directory)
        try:
            _write(fd, name, data)
        finally:
            os.close(fd)
        return True

    def _link(self, directory: str, pem: bytes, subject_hash: str, *, anchored: bool) -> None:
        """Let a certificate be found by its hash, as ``update-ca-certificates`` does it."""
        fd = self._directory(directory)
        try:
            if directory == _HASHED[0] and anchored:
                _point(fd, f"{NAME}.pem", f"/{_ANCHORS[0]}/{NAME}.crt")
            else:
                _write(fd, f"{NAME}.pem", pem)
            for number in range(10):
                try:
                    target = os.readlink(f"{subject_hash}.{number}", dir_fd=fd)
                except FileNotFoundError:
                    os.symlink(f"{NAME}.pem", f"{subject_hash}.{number}", dir_fd=fd)
                    return
                except OSError:
                    continue  # A file: somebody else's.
                if target == f"{NAME}.pem":
                    return
        finally:
            os.close(fd)

    def _unlink_hashed(self, directory: str) -> None:
        fd = self._directory(directory)
        try:
            for name in [one for one in os.listdir(fd) if _HASH_LINK.fullmatch(one)]:
                try:
                    if os.path.basename(os.readlink(name, dir_fd=fd)) in {f"{NAME}.pem", f"{NAME}.crt"}:
                        os.unlink(name, dir_fd=fd)
                except OSError:
                    continue
            os.unlink(f"{NAME}.pem", dir_fd=fd)
        finally:
            os.close(fd)

    def _append(self, path: str, pem: bytes) -> bool:
        directory, name = _split(path)
        data, _ = self._read(directory, name)
        if pem in data:
            return True
        fd = self._directory(directory)
        try:
            file = os.open(name, _APPEND, dir_fd=fd)
            try:
                info = self._plain(file)
                try:
                    if os.write(file, _MARK + pem) != len(_MARK + pem):
                        raise OSError("no room")
                except OSError:
                    os.ftruncate(file, info.st_size)
                    raise
            finally:
                os.close(file)
        finally:
            os.close(fd)
        return True

    def _cut(self, path: str, pem: bytes) -> None:
        directory, name = _split(path)
        data, info = self._read(directory, name)
        without = data.replace(_MARK + pem, b"").replace(pem, b"")
        if without != data:
            self._replace(directory, name, without, info)

    def _keystores(self, change: Callable[[bytes], bytes | None]) -> None:
        for path in (_JAVA, *self._javas()):
            self._attempt(lambda path=path: self._change_keystore(path, change))

    def _change_keystore(self, path: str, change: Callable[[bytes], bytes | None]) -> None:
        directory, name = _split(path)
        data, info = self._read(directory, name)
        changed = change(data)
        if changed is not None and changed != data:
            self._replace(directory, name, changed, info)

    def _javas(self) -> list[str]:
        found: list[str] = []
        for above in _JAVAS:
            names = self._attempt(lambda above=above: self._names(above)) or []
            found += [f"{above}/{name}/{below}" for name in sorted(names)[:_JAVAS_MAX] for below in _IN_JAVA]
        return found

    def _names(self, directory: str) -> list[str]:
        fd = self._directory(directory)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def _unlink(self, directory: str, name: str) -> None:
        fd = self._directory(directory, own_disk=directory != RUN)
        try:
            os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)

    # --- files

    def _directory(self, path: str, *, own_disk: bool = True) -> int:
        """Open a directory, reached through no link and on the guest's own disk."""
        fd = os.open(self._root, _DIRECTORY)
        for name in path.split("/"):
            try:
                below = os.open(name, _DIRECTORY, dir_fd=fd)
            finally:
                os.close(fd)
            fd = below
            if own_disk and os.fstat(fd).st_dev != self._device:
                os.close(fd)
                raise Elsewhere
        return fd

    def _read(self, directory: str, name: str) -> tuple[bytes, os.stat_result]:
        fd = self._directory(directory, own_disk=directory != RUN)
        try:
            file = os.open(name, _READ, dir_fd=fd)
        finally:
            os.close(fd)
        try:
            info = self._plain(file, own_disk=directory != RUN)
            parts: list[bytes] = []
            while part := os.read(file, _STORE_BYTES_MAX):
                parts.append(part)
                if sum(map(len, parts)) > _STORE_BYTES_MAX:
                    raise Elsewhere
            return b"".join(parts), info
        finally:
            os.close(file)

    def _plain(self, file: int, *, own_disk: bool = True) -> os.stat_result:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or (own_disk and info.st_dev != self._device):
            raise Elsewhere
        return info

    def _replace(self, directory: str, name: str, data: bytes, info: os.stat_result) -> None:
        fd = self._directory(directory)
        try:
            _write(fd, name, data, info)
        finally:
            os.close(fd)

    @staticmethod
    def _attempt(work: Callable[[], Any]) -> Any:
        """Return what comes of it, or None where it cannot be done."""
        try:
            return work()
        except (OSError, ValueError):
            return None


def variables(bundle: str, certificate: str) -> dict[str, str]:
    """Return what tells programs whom to trust that do not ask the system: all certificates, or one more."""
    all_of_them = (
        *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO", "AWS_CA_BUNDLE"),
        *("CARGO_HTTP_CAINFO", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"),
    )
    one_more = ("NODE_EXTRA_CA_CERTS", "DENO_CERT")
    return {**dict.fromkeys(all_of_them, bundle), **dict.fromkeys(one_more, certificate)}


def _split(path: str) -> tuple[str, str]:
    directory, _, name = path.rpartition("/")
    return directory, name


def _write(directory: int, name: str, data: bytes, like: os.stat_result | None = None) -> None:
    """Put a file there, whole or not at all, whatever it was; with owner and mode as another one's, or root's."""
    if like is None and _is(directory, name, data):
        return
    draft = f".{name}.space"
    try:
        os.unlink(draft, dir_fd=directory)
    except FileNotFoundError:
        pass
    file = os.open(draft, _AFRESH, 0o600, dir_fd=directory)
    try:
        if os.write(file, data) != len(data):
            raise OSError("no room")
        if like is not None:
            os.fchown(file, like.st_uid, like.st_gid)
        os.fchmod(file, 0o644 if like is None else stat.S_IMODE(like.st_mode))
        os.rename(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(draft, dir_fd=directory)
        raise
    finally:
        os.close(file)


def _point(directory: int, name: str, target: str) -> None:
    """Let a name be a symbolic link, whatever it was."""
    try:
        if os.readlink(name, dir_fd=directory) == target:
            return
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError:
        os.unlink(name, dir_fd=directory)
    os.symlink(target, name, dir_fd=directory)


def _is(directory: int, name: str, data: bytes) -> bool:
    try:
        file = os.open(name, _READ, dir_fd=directory)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(file).st_mode) and os.read(file, len(data) + 1) == data
    finally:
        os.close(file)

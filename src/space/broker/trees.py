"""What a template's tree must hold, and its digest. Also a program, which looks at a tree that a guest has made.

``python -I -S trees.py BROKER ROOT [--tidy]`` sees nothing but that tree: it makes it the root of its own file system
first, so no link in it leads anywhere else, and it follows none anyway. It reads names and contents and understands
neither. Standard input is what the digest begins with; the answer is one line of JSON. It ends when the broker does.

Knows the standard library alone.
"""

# ruff: noqa: PTH101, PTH102, PTH106, PTH108, PTH114, PTH115, PTH118 - names are bytes that need not be text

import hashlib
import json
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ENTRIES_MAX = 2_000_000
PATH_BYTES_MAX = 4095
BYTES_MAX = 256 << 30
"""Of all files together, holes included: to be read through within the time that a template may take."""
REFUSED = 3
_BLOCK = 1 << 20
_MEMORY_MAX = 2 << 30
_NICE = 15
# What a machine needs to find in its root: a mount point for the runtime, a /tmp that stays on disk (gVisor puts a
# tmpfs over an empty one), and name files that are files.
_DIRECTORIES = (
    *((b".space", 0o755), (b"proc", 0o755), (b"sys", 0o755), (b"dev", 0o755), (b"run", 0o755), (b"tmp", 0o1777)),
    (b"tmp/.X11-unix", 0o1777),
    (b"etc", 0o755),
)
_FILES = (
    (b"etc/resolv.conf", b""),
    (b"etc/hostname", b"sandbox\n"),
    (b"etc/hosts", b"127.0.0.1 localhost\n::1 localhost\n"),
)
# A machine mounts something over these, so what lies in them can be seen in none.
_COVERED = (b".space", b"proc", b"sys", b"dev", b"run")
_MACHINE_ID, _MACHINE_ID_OF_DBUS = b"etc/machine-id", b"var/lib/dbus/machine-id"
# What the host itself says of a file, which is the same file elsewhere.
_OF_THE_HOST = (b"btrfs.", b"security.selinux")


class UnfitError(Exception):
    """This tree cannot be a template. `code` is one of `template-unfit`, `device-in-template`, `template-too-large`."""

    def __init__(self, code: str, message: str, path: bytes = b"") -> None:
        super().__init__(message)
        self.code = code
        self.path = path


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found in a tree. `bytes` is what it takes on the disk, files with several names once."""

    digest: str
    bytes: int
    entries: int


def complete(root: bytes) -> None:
    """Make what every machine needs in its root, without following any link that the template brings."""
    for name, mode in _DIRECTORIES:
        _make_directory(root, name, mode)
    for name, text in _FILES:
        path = os.path.join(root, name)
        if os.path.islink(path):
            os.unlink(path)
        if not os.path.lexists(path):
            _write(path, text, 0o644)


def tidy(root: bytes) -> None:
    """Remove what a machine has left of itself, so that the same work in another one leaves the same tree."""
    for name in (*_COVERED, b"tmp", b"etc"):
        _check_directory(root, name)
    for name in (*_COVERED, b"tmp"):
        path = os.path.join(root, name)
        if os.path.lexists(path):
            _empty(path)
    complete(root)
    for name, text in _FILES:
        _replace(os.path.join(root, name), text, 0o644)
    _replace(os.path.join(root, _MACHINE_ID), b"", 0o444)
    if _is_plain(root, _MACHINE_ID_OF_DBUS):
        _replace(os.path.join(root, _MACHINE_ID_OF_DBUS), b"", 0o444)


def look(root: bytes, head: bytes, going_on: Callable[[], None] = lambda: None) -> Seen:
    """Return what is in a tree that nobody writes to; its digest begins with `head`. `going_on` is called often.

    The digest says every path with its type, mode, owner, size, contents, link target and extended attributes. Raise
    `UnfitError` for device nodes, and beyond the limits.
    """
    digest, files, size, entries = hashlib.sha256(head), _Files(going_on), 0, 0
    for path, info in _walk(root):
        going_on()
        inside = b"" if path == root else path[len(root.rstrip(b"/")) :]
        if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
            raise UnfitError("device-in-template", "A template may not hold device nodes.", inside)
        digest.update(line(_describe(path, info, inside) | files.describe(path, info)))
        size += 512 * files.blocks(info)
        entries += 1
    return Seen(digest.hexdigest(), size, entries)


def line(record: dict[str, Any]) -> bytes:
    """Return a record as it goes into a digest."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _walk(root: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Yield everything in a tree, the tree itself first, each directory's entries in the order of bytes.

    Who is told of something that is no directory may remove it.
    """
    pending, count = [root], 1
    while pending:
        path = pending.pop()
        info = os.lstat(path)
        yield path, info
        if not stat.S_ISDIR(info.st_mode):
            continue
        names: list[bytes] = []
        with os.scandir(path) as found:
            for entry in found:
                names.append(entry.path)
                count += 1
                if count > ENTRIES_MAX:
                    raise UnfitError("template-too-large", f"A template may hold {ENTRIES_MAX} files at most.")
        if names and max(map(len, names)) - len(root) > PATH_BYTES_MAX:
            raise UnfitError("template-too-large", f"A path may have {PATH_BYTES_MAX} bytes at most.", path)
        names.sort(reverse=True)
        pending += names


def _describe(path: bytes, info: os.stat_result, inside: bytes) -> dict[str, Any]:
    attributes = sorted(
        name for name in os.listxattr(path, follow_symlinks=False) if not os.fsencode(name).startswith(_OF_THE_HOST)
    )
    record: dict[str, Any] = {
        "path": _text(inside),
        "type": stat.S_IFMT(info.st_mode),
        "mode": stat.S_IMODE(info.st_mode),
        "uid": info.st_uid,
        "gid": info.st_gid,
        "xattrs": {
            _text(os.fsencode(name)): os.getxattr(path, name, follow_symlinks=False).hex() for name in attributes
        },
    }
    if stat.S_ISLNK(info.st_mode):
        record["target"] = _text(os.readlink(path))
    return record


class _Files:
    """The contents of regular files; one with several names is read and counted once."""

    def __init__(self, going_on: Callable[[], None]) -> None:
        self._going_on = going_on
        self._known: dict[tuple[int, int], str] = {}
        self._counted: set[tuple[int, int]] = set()
        self._read = 0

    def describe(self, path: bytes, info: os.stat_result) -> dict[str, Any]:
        if not stat.S_ISREG(info.st_mode):
            return {}
        same = info.st_dev, info.st_ino
        found = self._known.get(same) or self._digest(path, info)
        if info.st_nlink > 1:
            self._known[same] = found
        return {"size": info.st_size, "sha256": found}

    def blocks(self, info: os.stat_result) -> int:
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            same = info.st_dev, info.st_ino
            if same in self._counted:
                return 0
            self._counted.add(same)
        return info.st_blocks

    def _digest(self, path: bytes, info: os.stat_result) -> str:
        self._read += info.st_size
        if self._read > BYTES_MAX:
            raise UnfitError("template-too-large", f"A template's files may have {BYTES_MAX >> 30} GiB at most.")
        digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while count := os.readv(descriptor, [block]):
                digest.update(block[:count])
                self._going_on()
        finally:
            os.close(descriptor)
        return digest.hexdigest()


def _make_directory(root: bytes, name: bytes, mode: int) -> None:
    _check_directory(root, name)
    path = os.path.join(root, name)
    if not os.path.lexists(path):
        os.mkdir(path)
        os.chmod(path, mode)


def _check_directory(root: bytes, name: bytes) -> None:
    path = os.path.join(root, name)
    if os.path.lexists(path) and not stat.S_ISDIR(os.lstat(path).st_mode):
        raise UnfitError("template-unfit", f"/{_text(name)} of the template is not a directory.", name)


def _is_plain(root: bytes, name: bytes) -> bool:
    """Whether it is a file, reached through no link."""
    path = root
    *parents, last = name.split(b"/")
    for parent in parents:
        path = os.path.join(path, parent)
        if not os.path.lexists(path) or not stat.S_ISDIR(os.lstat(path).st_mode):
            return False
    path = os.path.join(path, last)
    return os.path.lexists(path) and stat.S_ISREG(os.lstat(path).st_mode)


def _replace(path: bytes, text: bytes, mode: int) -> None:
    """Put a file of root's there, whatever it was."""
    if os.path.lexists(path):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            _empty(path)
            os.rmdir(path)
        else:
            os.unlink(path)
    _write(path, text, mode)


def _write(path: bytes, text: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
        os.fchmod(descriptor, mode)


def _empty(directory: bytes) -> None:
    """Remove all that is in a directory. `_walk` names a directory before what is in it."""
    directories: list[bytes] = []
    for path, info in _walk(directory):
        if stat.S_ISDIR(info.st_mode):
            directories.append(path)
        else:
            os.unlink(path)
    for path in reversed(directories[1:]):
        os.rmdir(path)


def _text(name: bytes) -> str:
    """Return a name so that different ones stay different, whatever the host's own encoding is."""
    return name.decode("utf-8", "surrogateescape")


def main() -> None:
    broker, root, *options = sys.argv[1:]
    head = sys.stdin.buffer.read()
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_MAX, _MEMORY_MAX))
    # SAFETY: the broker names the directory, a copy that is its alone. From here on no path leads out of it.
    os.chroot(root)
    os.chdir("/")
    os.umask(0o022)

    def going_on() -> None:
        if os.getppid() != int(broker):
            sys.exit("The broker has ended.")

    try:
        if "--tidy" in options:
            tidy(b"/")
        else:
            complete(b"/")
        seen = look(b"/", head, going_on)
        answer: dict[str, Any] = {"digest": seen.digest, "bytes": seen.bytes, "entries": seen.entries}
        status = 0
    except UnfitError as error:
        path = error.path.decode("utf-8", "backslashreplace")
        answer, status = {"code": error.code, "message": str(error), "path": path[:PATH_BYTES_MAX]}, REFUSED
    except MemoryError:
        message = "The template has directories with too many files."
        answer, status = {"code": "template-too-large", "message": message, "path": ""}, REFUSED
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    sys.exit(status)


if __name__ == "__main__":
    main()

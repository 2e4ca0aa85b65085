"""Metadata of files: extended attributes where the file system keeps them, else a record beside all files.

gVisor's disks refuse attributes (``setxattr`` is EOPNOTSUPP on the root file system, with directfs and without), and
show neither a birth time nor a lasting inode number. What lasts there, over suspend, stop, fork and a rename, is the
time of the last change, in nanoseconds. So a record is found by that and the size: whoever changes a file afterwards
has a file without metadata. Records lie on the disk, are root's alone, and are the newest of ``_RECORDS_MAX``.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time

_METADATA_MAX = 64
_NAME_MAX = 255
_METADATA_BYTES_MAX = 4096
_RECORD_BYTES_MAX = 1024 * 1024
_RECORDS_MAX = 10_000
_NONE_KEPT = (errno.EOPNOTSUPP, errno.ENOSYS)

records = "/var/lib/space/attributes"
"""Where records are, in the guest."""


def read(path: str, namespace: str) -> dict[str, str]:
    """Return the metadata of ``namespace``: the attributes ``user.<namespace>.…`` by what follows, as far as they are
    text and short, or what a record says.
    """
    prefix = f"user.{namespace}."
    found: dict[str, str] = {}
    try:
        for name in os.listxattr(path):
            if name.startswith(prefix) and len(name) > len(prefix) and len(found) < _METADATA_MAX:
                value = os.getxattr(path, name)
                if len(value) <= _METADATA_BYTES_MAX and b"\0" not in value:
                    found[name.removeprefix(prefix)] = value.decode("utf-8", "replace")
    except OSError:
        found.clear()  # Gone meanwhile, or a file system that keeps none.
    return found or _recorded(path, namespace)


def replace(fd: int, namespace: str | None, metadata: dict[str, str] | None, *, created: bool) -> bool:
    """Set a file's metadata to exactly these; False where they have to be recorded once the file is written."""
    if namespace is None or metadata is None:
        return True
    prefix = f"user.{namespace}."
    try:
        known = [] if created else [name for name in os.listxattr(fd) if name.startswith(prefix)]
        for name in known:
            if name.removeprefix(prefix) not in metadata:
                os.removexattr(fd, name)
        for name, value in metadata.items():
            os.setxattr(fd, prefix + name, value.encode("utf-8", "surrogateescape"))
    except OSError as error:
        if error.errno not in _NONE_KEPT:
            raise
        return not metadata
    return True


def record(fd: int, namespace: str, metadata: dict[str, str]) -> None:
    """Record the metadata of a file as it is now; its last change is from here on a moment that no other file has."""
    os.makedirs(os.path.join(records, namespace), 0o700, exist_ok=True)
    os.utime(fd, ns=(os.fstat(fd).st_atime_ns, time.time_ns()))
    path = _path(namespace, os.fstat(fd))
    with open(f"{path}.new", "x", encoding="utf-8", opener=_opener) as file:
        json.dump(metadata, file)
    os.rename(f"{path}.new", path)
    _forget_oldest(os.path.dirname(path))


def _recorded(path: str, namespace: str) -> dict[str, str]:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return {}
        with open(_path(namespace, status), "rb") as file:
            found = json.loads(file.read(_RECORD_BYTES_MAX))
    except (OSError, ValueError):
        return {}
    # Root of the guest may have written anything.
    if not isinstance(found, dict):
        return {}
    fitting = [(name, value) for name, value in found.items() if _fits(name, value)]
    return dict(fitting[:_METADATA_MAX])


def _fits(name: str, value: object) -> bool:
    """Whether a pair is what an attribute could be."""
    if not isinstance(value, str) or not name or "\0" in name + value:
        return False
    try:
        sizes = [len(text.encode("utf-8", "surrogateescape")) for text in (name, value)]
    except UnicodeEncodeError:
        return False
    return sizes[0] <= _NAME_MAX and sizes[1] <= _METADATA_BYTES_MAX


def _path(namespace: str, status: os.stat_result) -> str:
    return os.path.join(records, namespace, f"{status.st_mtime_ns:020d}-{status.st_size}")


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _forget_oldest(directory: str) -> None:
    names = os.listdir(directory)
    for name in sorted(names)[: max(0, len(names) - _RECORDS_MAX)]:
        try:
            os.unlink(os.path.join(directory, name))
        except FileNotFoundError:
            pass

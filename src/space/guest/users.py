"""Who the guest's own /etc/passwd and /etc/group say a user is. Parsed here, bounded, without the name service."""

from __future__ import annotations

import os

from space.guest.system import Identity, Refused, refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_FILE_BYTES_MAX = 4 * 1024 * 1024
_REMEMBERED_BYTES_MAX = 64 * 1024
_known: dict[str, tuple[tuple[int, ...], list[list[str]]]] = {}
_ID_MAX = 2**32 - 2
_GROUPS_MAX = 1024


def find_identity(user: str, root: str = "") -> Identity:
    """Return who ``user`` is: ``name``, ``uid``, ``name:group`` or ``uid:gid``. A number needs no entry, nor does root.

    ``root`` is put before the two files' paths. Raises ``Refused`` with code ``no-such-user`` or ``no-such-group``.
    """
    name, colon, group = user.partition(":")
    entry = _find_user(name, root)
    if entry is None:
        uid = _number("0" if name == "root" else name)
        if uid is None:
            raise Refused("no-such-user", f"There is no user {name!r} in the sandbox")
        identity = Identity(uid, uid if colon == "" else 0, (), name, "/", "/bin/sh")
    else:
        identity = entry
        identity.groups = tuple(_groups_of(identity.name, root))
    if colon:
        identity.gid = find_group(group, root)
    return identity


def names(root: str = "") -> tuple[dict[int, str], dict[int, str]]:
    """Return the names of users and of groups by number, the first entry of a number counting."""
    users: dict[int, str] = {}
    for fields in _entries(f"{root}/etc/passwd", 7):
        uid = _number(fields[2])
        if uid is not None:
            users.setdefault(uid, fields[0])
    groups: dict[int, str] = {}
    for fields in _entries(f"{root}/etc/group", 4):
        gid = _number(fields[2])
        if gid is not None:
            groups.setdefault(gid, fields[0])
    return users, groups


def _find_user(name: str, root: str) -> Identity | None:
    by_number: Identity | None = None
    for fields in _entries(f"{root}/etc/passwd", 7):
        uid, gid = _number(fields[2]), _number(fields[3])
        if uid is None or gid is None:
            continue
        if fields[0] == name or (by_number is None and fields[2] == name):
            found = Identity(uid, gid, (), fields[0], fields[5] or "/", fields[6] or "/bin/sh")
            if fields[0] == name:
                return found
            by_number = found
    return by_number


def find_group(name: str, root: str = "") -> int:
    """Return a group's number; a number, or root, need not be there. Raises ``Refused`` with code ``no-such-group``."""
    for fields in _entries(f"{root}/etc/group", 4):
        gid = _number(fields[2])
        if fields[0] == name and gid is not None:
            return gid
    gid = _number("0" if name == "root" else name)
    if gid is None:
        raise Refused("no-such-group", f"There is no group {name!r} in the sandbox")
    return gid


def _groups_of(name: str, root: str) -> Iterator[int]:
    count = 0
    for fields in _entries(f"{root}/etc/group", 4):
        gid = _number(fields[2])
        if gid is not None and name in fields[3].split(",") and count < _GROUPS_MAX:
            count += 1
            yield gid


def _entries(path: str, width: int) -> list[list[str]]:
    """Return the file's entries; read anew only when the file is another one than before."""
    try:
        status = os.stat(path)
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        known = _known.get(path)
        if known is not None and known[0] == key:
            return known[1]
        with open(path, "rb") as file:
            text = file.read(_FILE_BYTES_MAX).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise refused(error, path) from error
    entries = [fields for line in text.split("\n") if len(fields := line.split(":")) >= width]
    if len(text) <= _REMEMBERED_BYTES_MAX:
        _known[path] = (key, entries)
    return entries


def _number(text: str) -> int | None:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        return None
    value = int(text)
    return value if value <= _ID_MAX else None

"""Files that one user makes for another, and what is told of files beyond what every request is told.

Runs in the thread of the operation, with the rights of the user who acts.
"""

from __future__ import annotations

import errno
import os
import stat

from space.guest import attributes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from space.guest.system import Identity
    from space.guest.transfers import Task
    from space.protocol.messages import FileInfo

_TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "directory"}


def own(owner: Identity | None, what: str | int) -> None:
    """Give a file to ``owner``, where there is one."""
    if owner is not None:
        # SAFETY: with the rights of the user who acts: the guest's kernel decides whether that one may.
        os.chown(what, owner.uid, owner.gid)


def owns(owner: Identity | None, fd: int) -> bool:
    """Whether an open file is ``owner``'s already: giving it to its owner again would be seen by who watches it."""
    status = os.fstat(fd)
    return owner is not None and (status.st_uid, status.st_gid) == (owner.uid, owner.gid)


def make_directories(path: str, owner: Identity | None) -> None:
    """Make a directory and those above it that are missing; the new ones are ``owner``'s."""
    missing: list[str] = []
    while path not in ("", "/") and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        else:
            own(owner, directory)


def full_path(task: Task, path: str) -> dict[str, Any]:
    """Return where a file is, for a request that names an owner."""
    return {} if task.owner is None else {"full_path": path}


def more_of(task: Task, path: str, info: FileInfo) -> dict[str, Any]:
    """Return what a link leads to, for a request that names an owner, and a file's metadata, for one that asks."""
    found: dict[str, Any] = {}
    if task.owner is not None and info["type"] == "symlink":
        found["leads_to"] = _end_of(path)
    if task.fields["namespace"] is not None:
        found["metadata"] = attributes.read(path, task.fields["namespace"])
    return found


def _end_of(path: str) -> dict[str, Any] | None:
    try:
        status = os.stat(path)
        end = os.path.realpath(path)
    except OSError:
        return None
    kind = _TYPES.get(stat.S_IFMT(status.st_mode))
    return {"path": end, "type": kind, "mode": stat.S_IMODE(status.st_mode)} if kind is not None else None

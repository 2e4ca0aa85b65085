"""Looks at what is in a volume and changes it, in the sandbox that mounts it. A program of the standard library alone.

``python -c <this> OPERATION FIELDS`` with JSON fields; one line of JSON is the answer: ``{"ok": …}``, or
``{"error": "ENOENT"}``. It runs as the guest's root, and the guest's kernel alone resolves its paths.
"""

# ruff: noqa: PTH101, PTH102, PTH112, PTH114, PTH115 - names in a guest need be no text
# ruff: noqa: PTH119, PTH120, PTH208, T201

import errno
import json
import os
import stat
import sys
from typing import Any

_TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
_ENTRIES_MAX = 20_000


def describe(root: str, path: str) -> dict[str, Any]:
    """Return the stat of what is at a path of the volume, a link itself; times in nanoseconds."""
    place = root + path
    info = os.lstat(place)
    kind = _TYPES.get(stat.S_IFMT(info.st_mode), "unknown")
    told = {
        "name": os.path.basename(path) or "/",
        "type": kind,
        "path": path,
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "uid": info.st_uid,
        "gid": info.st_gid,
        "times": [info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns],
    }
    return {**told, "target": os.readlink(place)} if kind == "symlink" else told


def listed(root: str, path: str, depth: int) -> list[dict[str, Any]]:
    """Return what is in a directory, and below it to that depth, each directory followed by what is in it."""
    found: list[dict[str, Any]] = []
    waiting = [(f"{path.rstrip('/')}/{name}", 1) for name in sorted(os.listdir(root + path), reverse=True)]
    while waiting:
        inner, level = waiting.pop()
        try:
            told = describe(root, inner)
            below = os.listdir(root + inner) if told["type"] == "directory" and level < depth else []
        except OSError:
            continue  # It is gone, or so deep that no path leads there.
        found.append(told)
        if len(found) > _ENTRIES_MAX:
            raise OSError(errno.E2BIG, "too many")
        waiting += [(f"{inner}/{name}", level + 1) for name in sorted(below, reverse=True)]
    return found


def make(root: str, path: str, *, parents: bool, owner: tuple[int, int], mode: int | None) -> dict[str, Any]:
    """Make a directory; one that is there stays as it is."""
    missing = [path]
    while parents and not os.path.lexists(root + os.path.dirname(missing[-1])):
        missing.append(os.path.dirname(missing[-1]))
    for directory in reversed(missing):
        try:
            os.mkdir(root + directory)
        except FileExistsError:
            if directory == path and not os.path.isdir(root + path):
                raise
        else:
            os.chown(root + directory, *owner, follow_symlinks=False)
            if directory == path and mode is not None:
                os.chmod(root + path, mode)
    return describe(root, path)


def change(root: str, path: str, *, owner: tuple[int, int], mode: int | None) -> dict[str, Any]:
    """Change owner (-1: not) and mode of what is at a path; of a link its owner alone."""
    os.chown(root + path, *owner, follow_symlinks=False)
    if mode is not None and not os.path.islink(root + path):
        os.chmod(root + path, mode)
    return describe(root, path)


def carry_out(operation: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one operation."""
    root, path = fields["root"], fields["path"]
    owner = (fields.get("uid", -1), fields.get("gid", -1))
    try:
        match operation:
            case "stat":
                return {"ok": describe(root, path)}
            case "list":
                return {"ok": listed(root, path, fields["depth"])}
            case "make":
                return {"ok": make(root, path, parents=fields["force"], owner=owner, mode=fields.get("mode"))}
            case _:
                return {"ok": change(root, path, owner=owner, mode=fields.get("mode"))}
    except OSError as error:
        return {"error": errno.errorcode.get(error.errno or 0, "EIO")}


if __name__ == "__main__":
    print(json.dumps(carry_out(sys.argv[1], json.loads(sys.argv[2]))))

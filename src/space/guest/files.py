"""Operations on files, each run in a thread with the rights of its user: the guest's kernel alone decides what that
user may do and where a path leads.
"""

from __future__ import annotations

import errno
import json
import os
import stat

from space.guest import attributes
from space.guest.ownership import full_path, make_directories, more_of, own, owns
from space.guest.system import AT_FDCWD, RENAME_NOREPLACE, Refused, refused, syscall
from space.guest.users import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from space.guest.system import Identity
    from space.guest.transfers import Inlet, Outlet, Task
    from space.protocol.messages import FileInfo

    Names = tuple[dict[int, str], dict[int, str]]

CHUNK_BYTES = 256 * 1024
_LINES_BYTES = 64 * 1024
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "block",
    stat.S_IFCHR: "character",
}


def path_of(task: Task, field: str = "path") -> str:
    """Return a path of the request, absolute: what is relative starts where the user's commands start.

    With an owner it starts in the owner's home, as ``~`` does, and dots are taken out as they are written.
    """
    path: str = task.fields[field]
    if task.owner is None:
        return os.path.join(task.base, path)
    if path == "~" or path.startswith("~/"):
        path = task.base + path[1:]
    return "/" + os.path.normpath(os.path.join(task.base, path)).lstrip("/")


def outlet_of(task: Task) -> Outlet:
    if task.outlet is None:
        raise Refused("internal", "The operation has no stream")
    return task.outlet


def inlet_of(task: Task) -> Inlet:
    if task.inlet is None:
        raise Refused("internal", "The operation has no stream")
    return task.inlet


def file_read(task: Task) -> None:
    """Stream a file, or a range of it. One whose size the kernel gives as 0 (in /proc) is read to its end as well."""
    path, offset, length = path_of(task), task.fields["offset"], task.fields["length"]
    outlet = outlet_of(task)
    fd = _open_regular(path, os.O_RDONLY)
    try:
        if offset:
            os.lseek(fd, offset, os.SEEK_SET)
        task.answer({**describe(path, os.fstat(fd))})
        left = length
        while left is None or left > 0:
            size = min(outlet.wait_room(), CHUNK_BYTES)
            data = os.read(fd, size if left is None else min(size, left))
            if not data:
                break
            outlet.write(data)
            left = None if left is None else left - len(data)
        outlet.end()
    finally:
        os.close(fd)


def file_write(task: Task) -> dict[str, Any]:
    """Write a file as the stream arrives, making missing directories. ``mode`` is exact, whatever the umask; without it
    a new file gets 0644 and an old one keeps its own. A file that this made is removed again if the stream breaks off.
    """
    fields, inlet = task.fields, inlet_of(task)
    path = path_of(task)
    fd, created = _open_for_writing(path, task.owner, exclusive=fields["exclusive"])
    size = 0
    try:
        if created or not owns(task.owner, fd):
            own(task.owner, fd)
        kept = attributes.replace(fd, fields["namespace"], fields["metadata"], created=created)
        if fields["mode"] is not None:
            os.fchmod(fd, fields["mode"])
        while chunk := inlet.next_chunk():
            view = memoryview(chunk)
            while view:
                view = view[os.write(fd, view) :]
            size += len(chunk)
            inlet.done(len(chunk))
        if fields["size"] is not None and size != fields["size"]:
            raise Refused("size-mismatch", f"{fields['size']} bytes were announced, {size} arrived")
        if not kept:
            attributes.record(fd, fields["namespace"], fields["metadata"])
    except BaseException:
        if created:
            _discard(path)
        raise
    finally:
        os.close(fd)
    return {"size": size, "created": created, **full_path(task, path)}


def file_stat(task: Task) -> dict[str, Any]:
    """Describe a file, or the link itself where ``follow`` is false."""
    path = path_of(task)
    info = describe(path, os.stat(path, follow_symlinks=task.fields["follow"]))
    return {**info, **full_path(task, path), **more_of(task, path, info)}


def list_dir(task: Task) -> None:
    """Stream one JSON line for each entry, down to ``depth`` levels, links not followed, in no particular order."""
    top, outlet = path_of(task), outlet_of(task)
    os.scandir(top).close()  # Whether it can be listed at all is part of the reply.
    task.answer({})
    lines = bytearray()
    for line in _lines(task, top):
        lines += line
        if len(lines) >= _LINES_BYTES:
            outlet.write(bytes(lines))
            lines.clear()
    if lines:
        outlet.write(bytes(lines))
    outlet.end()


def make_dir(task: Task) -> dict[str, Any]:
    """Make a directory; one that is there already is no error."""
    path, mode = path_of(task), task.fields["mode"]
    told = full_path(task, path)
    try:
        if task.fields["parents"]:
            make_directories(os.path.dirname(path.rstrip("/")) or "/", task.owner)
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return {"created": False, **told}
    own(task.owner, path)
    if mode is not None:
        os.chmod(path, mode)
    return {"created": True, **told}


def move(task: Task) -> None:
    """Rename, over an existing file where ``overwrite``; between file systems by copying."""
    source, target = path_of(task, "source"), path_of(task, "target")
    if task.fields["parents"]:
        os.lstat(source)
        make_directories(os.path.dirname(target) or "/", task.owner)
    try:
        if task.fields["overwrite"]:
            os.rename(source, target)
        else:
            arguments = (AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE)
            syscall("renameat2", *arguments)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS) and not task.fields["overwrite"] and not os.path.lexists(target):
            os.rename(source, target)
        elif error.errno == errno.EXDEV and (task.fields["overwrite"] or not os.path.lexists(target)):
            import shutil

            shutil.move(source, target)
        else:
            raise refused(error, f"{task.fields['source']} → {task.fields['target']}") from error


def remove(task: Task) -> None:
    """Remove a file, a link, or a directory (with all that is in it where ``recursive``)."""
    path = path_of(task)
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
        elif task.fields["recursive"]:
            _remove_tree(path)
        else:
            os.rmdir(path)
    except FileNotFoundError:
        if not task.fields["missing_ok"]:
            raise


def change_mode(task: Task) -> None:
    os.chmod(path_of(task), task.fields["mode"])


def describe(path: str, status: os.stat_result, who: Names | None = None) -> FileInfo:
    """Return what is known of a file, as it travels. ``who`` saves looking the names up again for each of many."""
    users, groups = who or names()
    target = None
    if stat.S_ISLNK(status.st_mode):
        try:
            target = os.readlink(path)
        except OSError:
            target = None
    return {
        "name": os.path.basename(path.rstrip("/")) or "/",
        "type": _TYPES.get(stat.S_IFMT(status.st_mode), "file"),
        "size": status.st_size,
        "mode": stat.S_IMODE(status.st_mode),
        "uid": status.st_uid,
        "gid": status.st_gid,
        "owner": users.get(status.st_uid),
        "group": groups.get(status.st_gid),
        "mtime_ns": status.st_mtime_ns,
        "target": target,
    }


def _lines(task: Task, top: str) -> Iterator[bytes]:
    who, depth = names(), task.fields["depth"]
    waiting = [(top, "", 1)]
    while waiting:
        directory, prefix, level = waiting.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    info = _describe_entry(entry, who)
                    if info is None:
                        continue
                    more = more_of(task, entry.path, info)
                    yield json.dumps({"path": prefix + entry.name, **info, **more}).encode() + b"\n"
                    if level < depth and info["type"] == "directory":
                        waiting.append((entry.path, f"{prefix}{entry.name}/", level + 1))
        except OSError:
            continue  # Not readable for this user, or gone meanwhile.


def _describe_entry(entry: os.DirEntry[str], who: Names) -> FileInfo | None:
    try:
        return describe(entry.path, entry.stat(follow_symlinks=False), who)
    except OSError:
        return None  # Gone meanwhile.


def _open_regular(path: str, flags: int) -> int:
    # Without O_NONBLOCK opening a FIFO would wait for its other end.
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise Refused("not-a-file", f"{path}: not a regular file", errno.EINVAL)


def _open_for_writing(path: str, owner: Identity | None, *, exclusive: bool) -> tuple[int, bool]:
    directory = os.path.dirname(path)
    for attempt in range(3):
        try:
            if exclusive or not os.path.lexists(path):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                return os.open(path, flags, 0o644), True
            return _open_regular(path, os.O_WRONLY | os.O_TRUNC), False
        except FileNotFoundError:
            if attempt == 0 and not os.path.isdir(directory):
                make_directories(directory, owner)
            elif attempt and os.path.islink(path):
                # A link that leads nowhere yet: the file comes to be where it points.
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), False
        except FileExistsError:
            if exclusive:
                raise
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _discard(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _remove_tree(top: str) -> None:
    """Remove depth first, without recursion, never through a link, and however long its paths are: step by step."""
    fd = os.open(top, _DIRECTORY)
    above: list[tuple[str, tuple[int, int], list[str]]] = []
    """Of each directory on the way: where it is left for, what it is, and which directories it still has."""
    try:
        left = _without_files(fd)
        while left or above:
            if left:
                name = left.pop()
                above.append((name, _identity(fd), left))
                fd = _stepped(fd, name)
                left = _without_files(fd)
                continue
            name, parent, left = above.pop()
            fd = _stepped(fd, "..")
            if _identity(fd) != parent:
                raise OSError(errno.EBUSY, "Somebody moved a directory while it was removed")
            os.rmdir(name, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(top)


def _without_files(fd: int) -> list[str]:
    """Remove all but the directories of a directory, and return their names."""
    directories: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=fd)
    return directories


def _stepped(fd: int, name: str) -> int:
    """Return the directory of that name in an open one, which is closed."""
    inner = os.open(name, _DIRECTORY, dir_fd=fd)
    os.close(fd)
    return inner


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino

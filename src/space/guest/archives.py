"""Trees of files as tar streams, in and out, in bounded memory, with the rights of the user.

Out: PAX format, links kept, sockets left out. In: any format Python reads; names are taken below the target directory
(a leading slash is dropped; a name with ``..``, or through a link of the same archive, is skipped); devices are made
only if the user may; owners are kept only for root. What the user's rights do not allow fails the whole operation, as
it does for ``tar``.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile

from space.guest.files import CHUNK_BYTES, inlet_of, outlet_of, path_of
from space.guest.system import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from space.guest.transfers import Inlet, Task

_HEADER_BYTES_MAX = 1024 * 1024
_DIRECTORIES_MAX = 100_000
_LINKS_MAX = 100_000
_NAME_PARTS_MAX = 2048
"""More do not fit into a path."""
_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


def archive_read(task: Task) -> None:
    """Stream a file or directory as a tar; the names in it begin with the last part of its path."""
    top, outlet = path_of(task).rstrip("/") or "/", outlet_of(task)
    os.lstat(top)
    task.answer({})
    stream: Any = outlet
    with tarfile.open(mode="w|", fileobj=stream, bufsize=CHUNK_BYTES, format=tarfile.PAX_FORMAT) as archive:
        links: dict[tuple[int, int], str] = {}
        waiting = [(top, os.path.basename(top) or ".")]
        while waiting:
            path, name = waiting.pop()
            try:
                _add(archive, path, name, links)
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    waiting += [
                        (f"{path}/{entry}", f"{name}/{entry}") for entry in sorted(os.listdir(path), reverse=True)
                    ]
            except FileNotFoundError:
                continue  # Gone meanwhile.
    outlet.end()


def archive_write(task: Task) -> dict[str, Any]:
    """Unpack a tar stream into a directory, which is made if it is missing."""
    target, inlet = path_of(task), inlet_of(task)
    os.makedirs(target, exist_ok=True)
    source = _Source(inlet)
    stream: Any = source
    unpacker = _Unpacker(target, keep_owner=task.identity.uid == 0)
    try:
        with tarfile.open(mode="r|*", fileobj=stream, bufsize=CHUNK_BYTES, tarinfo=_Member) as archive:
            while (member := archive.next()) is not None:
                unpacker.unpack(archive, member)
                _forget_members(archive)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        # The library reads numbers, and one extended header after another, without asking whether they are sound.
        raise Refused("not-an-archive", f"The stream is not a tar archive: {error}", errno.EINVAL) from error
    source.drain()
    unpacker.finish()
    return {"entries": unpacker.entries, "bytes": unpacker.size, "skipped": unpacker.skipped}


class _Member(tarfile.TarInfo):
    """A member whose extended header, which the library reads whole, is bounded."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo | None:
        if self.type in _EXTENDED and self.size > _HEADER_BYTES_MAX:
            raise tarfile.ReadError("a header is too large")
        return super()._proc_member(archive)  # type: ignore[misc]


class _Source:
    """The stream from the host as a file that can be read."""

    def __init__(self, inlet: Inlet) -> None:
        self._inlet = inlet
        self._chunk = memoryview(b"")

    def read(self, size: int) -> bytes:
        parts: list[memoryview] = []
        while size > 0:
            if not self._chunk:
                self._chunk = memoryview(self._inlet.next_chunk())
                self._inlet.done(len(self._chunk))
                if not self._chunk:
                    break
            parts.append(self._chunk[:size])
            size -= len(parts[-1])
            self._chunk = self._chunk[len(parts[-1]) :]
        return b"".join(parts)

    def drain(self) -> None:
        """Read what follows the archive's end mark."""
        while self.read(CHUNK_BYTES):
            pass


class _Unpacker:
    """Makes what members describe, and gives directories their final modes and times at the end."""

    def __init__(self, target: str, *, keep_owner: bool) -> None:
        self._target = target
        self._keep_owner = keep_owner
        self._directories: list[tuple[str, int, float]] = []
        self._links: set[str] = set()
        """Where this archive has made symbolic links: nothing of it is made, or given rights, through them."""
        self.entries = 0
        self.size = 0
        self.skipped = 0

    def unpack(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name)
        if not self._lies_below(parts if member.isdir() else parts[:-1]) or parts[-1:] == [".."]:
            self.skipped += 1
            return
        path = os.path.join(self._target, *parts)
        if parts:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        if member.isdir():
            self._make_directory(path, member)
        elif not parts or not self._make(archive, member, path):
            self.skipped += 1
            return
        self.entries += 1

    def _lies_below(self, parts: list[str]) -> bool:
        if ".." in parts or len(parts) > _NAME_PARTS_MAX:
            return False
        path = self._target
        for part in parts if self._links else ():
            path = os.path.join(path, part)
            if path in self._links:
                return False
        return True

    def finish(self) -> None:
        """Children before parents: a directory's time changes with what is made in it."""
        for path, mode, mtime in reversed(self._directories):
            os.chmod(path, mode)
            os.utime(path, (mtime, mtime))
        self._directories.clear()

    def _make_directory(self, path: str, member: tarfile.TarInfo) -> None:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        if self._keep_owner:
            os.chown(path, member.uid, member.gid)
        if len(self._directories) >= _DIRECTORIES_MAX:
            self.finish()
        self._directories.append((path, member.mode & 0o7777, member.mtime))

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> bool:
        _clear(path)
        self._links.discard(path)
        if member.isreg():
            self._make_file(archive, member, path)
        elif member.issym():
            if len(self._links) >= _LINKS_MAX:
                raise Refused("not-an-archive", f"The archive has more than {_LINKS_MAX} symbolic links", errno.EINVAL)
            self._links.add(path)
            os.symlink(member.linkname, path)
        elif member.islnk():
            parts = _parts(member.linkname)
            if not self._lies_below(parts):
                return False
            os.link(os.path.join(self._target, *parts), path, follow_symlinks=False)
            return True
        elif member.isfifo():
            os.mkfifo(path)
        elif not _make_device(member, path):
            return False
        if self._keep_owner:
            os.lchown(path, member.uid, member.gid)
        if not member.issym():
            os.chmod(path, member.mode & 0o7777)
        os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)
        return True

    def _make_file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        source = archive.extractfile(member)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while source is not None and (data := source.read(CHUNK_BYTES)):
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                self.size += len(data)
        finally:
            os.close(fd)


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


class _Exactly:
    """A file of exactly the size its header says, though it may change while it is read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size

    def read(self, size: int) -> bytes:
        size = min(size, self._left)
        data = self._file.read(size)
        self._left -= size
        return data + bytes(size - len(data))


def _add(archive: tarfile.TarFile, path: str, name: str, links: dict[tuple[int, int], str]) -> None:
    member = archive.gettarinfo(path, name)
    _forget_members(archive)
    if not isinstance(member, tarfile.TarInfo):
        return  # A socket.
    status = os.lstat(path)
    identity = (status.st_dev, status.st_ino)
    if member.isreg() and status.st_nlink > 1:
        if identity in links:
            member.type, member.linkname, member.size = tarfile.LNKTYPE, links[identity], 0
        elif len(links) < _DIRECTORIES_MAX:
            links[identity] = name
    if not member.isreg():
        archive.addfile(member)
        return
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb", buffering=0) as file:
        content: Any = _Exactly(file, member.size)
        archive.addfile(member, content)


def _forget_members(archive: Any) -> None:
    """The library would remember every member and every file's number; only linked files matter, and not to it."""
    archive.members.clear()
    archive.inodes.clear()


def _clear(path: str) -> None:
    """What a member replaces must not be written through: it may be a link, or busy."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):
        if os.path.isdir(path) and not os.path.islink(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
        raise


def _make_device(member: tarfile.TarInfo, path: str) -> bool:
    if not (member.ischr() or member.isblk()):
        return False
    kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
    try:
        os.mknod(path, 0o600 | kind, os.makedev(member.devmajor, member.devminor))
    except PermissionError:
        return False
    return True

"""Directories to tar archives and back, chunk by chunk. What comes out of a sandbox is hostile."""

import os
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from space.errors import HostError, InvalidRequest

CHUNK_BYTES = 1024 * 1024
MEMBERS_MAX = 1_000_000
_NAME_MAX = 1000
HEADER_BYTES_MAX = 1024 * 1024
_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class Packer:
    """Makes a tar archive of a directory's content: files, directories and links, permission bits, no owners."""

    def __init__(self, directory: Path) -> None:
        self._chunks = _pack(directory)

    def next_chunk(self) -> bytes:
        """Return the next bytes of the archive, none at its end."""
        return next(self._chunks, b"")


def _pack(directory: Path) -> Iterator[bytes]:
    for path in sorted(directory.rglob("*")):
        yield from member(path.relative_to(directory).as_posix(), path)
    yield bytes(2 * tarfile.BLOCKSIZE)


def member(name: str, path: Path, mtime: int | None = None) -> Iterator[bytes]:
    """Yield a file, directory or link as an archive has it, with its own time unless another is given; nothing of what
    is none of these.
    """
    found = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime) if mtime is None else mtime
    if stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
        yield header(info)
    elif stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
        yield header(info)
    elif stat.S_ISREG(found.st_mode):
        with path.open("rb") as file:
            info.size = os.fstat(file.fileno()).st_size
            yield header(info)
            yield from contents(file, info.size)


def header(info: tarfile.TarInfo) -> bytes:
    """Return a member's headers; a name that is not UTF-8 stays what it is."""
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def contents(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield exactly so many bytes of a file, and the padding; raise ``InvalidRequest`` when it has become shorter."""
    left = size
    while left:
        chunk = file.read(min(CHUNK_BYTES, left))
        if not chunk:
            raise InvalidRequest(f"{file.name} became shorter while it was read.", code="file-changed")
        left -= len(chunk)
        yield chunk
    yield bytes(-size % tarfile.BLOCKSIZE)


class _Member(tarfile.TarInfo):
    """A member whose extended headers, which are read into memory, are of bounded size."""

    def _proc_member(self, tarfile: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADERS and self.size > HEADER_BYTES_MAX:
            raise InvalidRequest("The archive has a header of more than 1 MiB.", code="unsafe-archive")
        return super()._proc_member(tarfile)  # type: ignore[misc] (the entry point that subclasses may override)


class Unpacker:
    """Unpacks a tar archive that is fed in chunks; a thread of its own reads it through a pipe.

    Only files, directories and links are made, nothing outside the directory, and no set-user-id bits; ``strip`` is how
    many leading parts of each name are dropped. ``skipped`` names the links that would, or could yet, lead out of the
    directory: they are not made. Call `finish` or `abort`.
    """

    def __init__(self, directory: Path, *, strip: int = 0) -> None:
        self.skipped: list[str] = []
        self._strip = strip
        self._root = directory.resolve()
        self._members = 0
        self._error: Exception | None = None
        read_end, write_end = os.pipe()
        self._source, self._sink = os.fdopen(read_end, "rb"), os.fdopen(write_end, "wb", buffering=0)
        self._thread = threading.Thread(target=self._run, name="space-unpack", daemon=True)
        self._thread.start()

    def feed(self, data: bytes) -> None:
        """Take the next bytes; waits while unpacking is behind. Raises what made unpacking fail."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._sink.write(view) :]
        except BrokenPipeError:
            self._stop()
            self._raise()

    def finish(self) -> None:
        """Wait until everything is unpacked. Raises what made it fail."""
        self._stop()
        self._raise()

    def abort(self) -> None:
        """Stop; what was unpacked so far stays."""
        self._stop()

    def _stop(self) -> None:
        self._sink.close()
        self._thread.join()

    def _raise(self) -> None:
        # The library reads numbers without asking whether they are sound.
        if isinstance(self._error, tarfile.TarError | ValueError | OverflowError | RecursionError):
            raise HostError(f"The archive is not whole: {self._error}", code="archive-malformed") from self._error
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._source, tarfile.open(fileobj=self._source, mode="r|", tarinfo=_Member) as archive:
                while (member := archive.next()) is not None:
                    self._unpack(archive, member)
                    archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue] (it would remember every member)
                while self._source.read(CHUNK_BYTES):  # The padding after the end must not break the feeder's pipe.
                    pass
        except Exception as error:  # noqa: BLE001 (handed to the thread that feeds)
            self._error = error

    def _unpack(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self._members += 1
        if self._members > MEMBERS_MAX:
            raise InvalidRequest(f"The archive has more than {MEMBERS_MAX} members.", code="unsafe-archive")
        name = self._inside(member.name)
        target = self._root / name
        if target == self._root:
            return
        if not self._is_inside(target.parent):  # A link made by an earlier member, or there before.
            raise _unsafe(member.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if member.isdir():
            if target.is_symlink():
                raise _unsafe(member.name)
            target.mkdir(exist_ok=True)
            target.chmod((member.mode & 0o777) | 0o700)
        elif member.isfile():
            if member.issparse():  # It would be as large as it says, however little of it was sent.
                raise InvalidRequest(f"The archive's {member.name!r} is sparse.", code="unsafe-archive")
            source = archive.extractfile(member)
            if source is not None:
                self._write(target, source, member.mode & 0o777)
        elif member.issym() or member.islnk():
            self._link(target, member)

    def _inside(self, name: str) -> PurePosixPath:
        """Return a member's name below the directory. Raises ``InvalidRequest`` for one that leads out of it."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise _unsafe(name)
        return PurePosixPath(*path.parts[self._strip :])

    def _write(self, target: Path, source: IO[bytes], mode: int) -> None:
        if target.is_symlink() or target.is_file():
            target.unlink()
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                file.write(chunk)
            os.fchmod(file.fileno(), mode)

    def _link(self, target: Path, member: tarfile.TarInfo) -> None:
        leads_to = self._root / self._inside(member.linkname) if member.islnk() else target.parent / member.linkname
        if member.linkname.startswith("/") or _turns_back(member.linkname) or not self._is_inside(leads_to):
            self.skipped.append(member.name[:_NAME_MAX])
            return
        if target.is_symlink() or target.is_file():
            target.unlink()
        if member.issym():
            target.symlink_to(member.linkname)
        else:
            target.hardlink_to(leads_to.resolve())

    def _is_inside(self, path: Path) -> bool:
        try:
            return path.resolve().is_relative_to(self._root)
        except (RuntimeError, OSError):  # Links in a circle, or a name that cannot be.
            return False


def _turns_back(link: str) -> bool:
    """Whether ``..`` comes after a name: where that leads is changed by a link that takes the name's place later."""
    parts = PurePosixPath(link).parts
    steps = [part == ".." for part in parts]
    return steps != sorted(steps, reverse=True)


def _unsafe(name: str) -> InvalidRequest:
    return InvalidRequest(f"The archive's {name!r} would lead out of the directory.", code="unsafe-archive", name=name)

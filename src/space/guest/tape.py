"""Reading a tar archive from a descriptor, once, from its beginning to its end, in bounded memory and without belief.

The standard library understands the headers; contents are passed on as they lie in the buffer.
"""

from __future__ import annotations

import fcntl
import os
import tarfile
from tarfile import HeaderError, ReadError

from space.guest.rooted import Unfit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

FILE_BYTES_MAX = 256 << 30
_HEADER_BYTES_MAX = 1 << 20
_BUFFER_BYTES = 1 << 20
_END = (tarfile.EOFHeaderError, tarfile.EmptyHeaderError)  # type: ignore[attr-defined]
_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


def members(tape: Tape) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield what an archive holds, each member before its contents are read. Raises ``Unfit`` unless it is whole."""
    source: Any = tape
    try:
        archive: Any = tarfile.open(  # noqa: SIM115  there is nothing to close
            fileobj=source, mode="r:", tarinfo=_Member, encoding="utf-8", errors="surrogateescape"
        )
        while (member := archive.next()) is not None:
            yield archive, member
            archive.members.clear()
    except (tarfile.TarError, ValueError, OverflowError, IndexError, RecursionError) as error:
        # The library reads numbers, and one extended header after another, without asking whether they are sound.
        raise Unfit("not-an-archive", f"The layer is not a whole tar archive: {error}.") from error


def parts_of(archive: Any, member: Any) -> list[tuple[int, int]]:
    """Return where in a file its contents go, as ``(offset, size)``; the rest are holes. Raises ``Unfit``."""
    parts: list[tuple[int, int]] = [(0, member.size)] if member.sparse is None else member.sparse
    if member.size > FILE_BYTES_MAX:
        raise Unfit("template-too-large", f"A file may have {FILE_BYTES_MAX >> 30} GiB at most.")
    end = 0
    for offset, size in parts:
        if offset < end or size < 0 or offset + size > member.size:
            raise Unfit("not-an-archive", "The parts of a file do not fit together.")
        end = offset + size
    if sum(size for _, size in parts) > archive.offset - member.offset_data:
        raise Unfit("not-an-archive", "A file claims to be longer than it is.")
    return parts


class Tape:
    """What is read once, from the beginning to the end, as the library wants to see a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _BUFFER_BYTES)  # more may be under way at a time
        except OSError:
            pass  # It is no pipe.
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._position = 0

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise tarfile.ReadError("it leads backwards")
        while position > self._position and self._next(position - self._position):
            pass

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer at the end."""
        found = bytearray()
        while len(found) < size and (piece := self._next(size - len(found))):
            found += piece
        return bytes(found)

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Yield exactly the next ``size`` bytes; each piece holds until the next. Raises ``Unfit`` at the end."""
        while size > 0:
            piece = self._next(size)
            if not piece:
                raise Unfit("not-an-archive", "The archive ends in the middle of a file.")
            size -= len(piece)
            yield piece

    def drain(self) -> None:
        """Read what follows the archive's end mark, so that whoever writes it is not disturbed."""
        while os.readv(self._fd, [self._buffer]):
            pass

    def _next(self, most: int) -> memoryview:
        if self._start == self._end:
            self._start, self._end = 0, os.readv(self._fd, [self._buffer])
        piece = self._buffer[self._start : min(self._end, self._start + most)]
        self._start += len(piece)
        self._position += len(piece)
        return piece


class _Member(tarfile.TarInfo):
    """A member whose extended headers, which the library reads whole, are bounded; and one that is damaged is not the
    end of the archive.
    """

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Any:
        try:
            return super().fromtarfile(tarfile)
        except _END:
            raise
        except HeaderError as error:
            raise ReadError(str(error)) from None

    def _proc_member(self, archive: Any) -> tarfile.TarInfo:
        if self.size < 0 or (self.type in _EXTENDED and self.size > _HEADER_BYTES_MAX):
            raise ReadError("a header is too large")
        return super()._proc_member(archive)  # type: ignore[misc]

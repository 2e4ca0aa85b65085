"""Retained output of one stream: a file that holds the first bytes, a ring of the last ones, and the count of all.

Bytes are safe against the death of this process once ``append`` returns (they are in the page cache); a power cut may
lose them. One file per stream: a header page, the head, then the ring. The order "data, then count" and a ring with
room for one append more than it promises make every moment a consistent one: what is counted can be read. The file
appears with the first byte and is open only while it is used, so a silent command costs nothing.
"""

import os
import struct
from pathlib import Path

from space.errors import HostError

MAGIC = b"SPSPOOL1"
HEADER = struct.Struct(">8sQQQQ")
HEADER_BYTES = 4096
TOTAL = struct.Struct(">Q")
TOTAL_AT = 24
APPEND_BYTES_MAX = 256 * 1024
TAIL_BYTES_MIN = 4 * 1024 * 1024
"""A ring never smaller than this: more than a guest may send ahead of the slowest attached reader."""


class Spool:
    """One stream's output in the file ``path``, as its last writer left it. Not for use from several threads.

    ``keep_bytes`` is how much is kept: half from the start of the stream, half from its end. ``total`` counts all bytes
    there ever were; of a new stream that goes on from another's, ``start`` of them were never here. Raises
    ``HostError`` when the file is no spool.
    """

    def __init__(self, path: Path, keep_bytes: int, start: int = 0) -> None:
        self._path = path
        self._head = keep_bytes // 2
        self._tail = max(keep_bytes - self._head, TAIL_BYTES_MIN)
        self._fd = -1
        self._start = self.total = start
        if start or path.exists():
            self._open()
            self.close()

    @property
    def kept_bytes(self) -> int:
        """How much of the disk the stream takes, but for the header."""
        return min(self.total - self._start, self._head + self._tail + APPEND_BYTES_MAX)

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes at the end of the stream. Raises ``OSError`` when the host's disk does not take them."""
        if self._fd < 0:
            self._open()
        view = memoryview(data)
        for start in range(0, len(view), APPEND_BYTES_MAX):
            self._append_piece(view[start : start + APPEND_BYTES_MAX])

    def kept_from(self, offset: int) -> int:
        """Return the first offset at or after ``offset`` whose byte is still kept (``total`` when there is none)."""
        offset = max(offset, self._start)
        if offset < self._head:
            return min(offset, self.total)
        return min(max(offset, self.total - self._tail, self._head), self.total)

    def read(self, offset: int, bytes_max: int) -> bytes:
        """Return kept bytes from ``offset``: at least one unless ``offset`` is the end or in a gap."""
        if offset >= self.total or self.kept_from(offset) != offset:
            return b""
        if self._fd < 0:
            self._open()
        position, contiguous = self._position(offset)
        return os.pread(self._fd, min(bytes_max, contiguous, self.total - offset), position)

    def close(self) -> None:
        """Give the descriptor back; the next use opens the file again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        header = os.pread(descriptor, HEADER.size, 0)
        if header[: len(MAGIC)] == MAGIC:
            # One of an earlier version may end before the last field.
            _, self._head, self._tail, self.total, self._start = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
        elif not header:
            os.pwrite(descriptor, HEADER.pack(MAGIC, self._head, self._tail, self.total, self._start), 0)
        else:
            os.close(descriptor)
            raise HostError("Retained output is damaged.", code="spool-damaged")
        self._fd = descriptor

    def _append_piece(self, piece: memoryview) -> None:
        offset = self.total
        while piece:
            position, contiguous = self._position(offset)
            written = os.pwrite(self._fd, piece[:contiguous], position)
            offset += written
            piece = piece[written:]
        os.pwrite(self._fd, TOTAL.pack(offset), TOTAL_AT)
        self.total = offset

    def _position(self, offset: int) -> tuple[int, int]:
        """Return where in the file a stream offset lies and how many bytes follow without a jump."""
        if offset < self._head:
            return HEADER_BYTES + offset, self._head - offset
        ring = self._tail + APPEND_BYTES_MAX
        inside = (offset - self._head) % ring
        return HEADER_BYTES + self._head + inside, ring - inside

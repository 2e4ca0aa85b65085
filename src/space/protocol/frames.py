r"""Frames on one byte stream: how they are written, cut out of arbitrary chunks, and found again after a cut.

Knows nothing of sockets, files or what the frames mean. A frame is a 12-byte header ``>2sBBII`` (magic ``SP``, type,
flags 0, stream, payload length), the payload, and the trailer ``\xa5ECP``. A writer that dies in the middle of a frame
leaves a header whose trailer never comes; its successor writes ``PADDING`` first, which fills up any cut frame, so that
the reader finds zeros where the trailer must be, drops that frame and hunts for the next greeting.
"""

from __future__ import annotations

import struct
from enum import IntEnum

MAGIC = b"SP"
TRAILER = b"\xa5ECP"
HEADER = struct.Struct(">2sBBII")
OFFSET = struct.Struct(">Q")
PAYLOAD_BYTES_MAX = 256 * 1024
OVERHEAD_BYTES = HEADER.size + len(TRAILER)
FRAME_BYTES_MAX = PAYLOAD_BYTES_MAX + OVERHEAD_BYTES
PADDING = bytes(FRAME_BYTES_MAX)
NUMBER_MAX = 2**32 - 1
OFFSET_MAX = 2**63 - 1


class FrameType(IntEnum):
    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    REPLY = 4
    EVENT = 5
    DATA = 6
    ACK = 7
    EOF = 8
    RESET = 9


_TYPES = {int(kind): kind for kind in FrameType}
_FIXED_LENGTHS = {FrameType.ACK: OFFSET.size, FrameType.EOF: OFFSET.size}


class FrameError(ValueError):
    """The bytes are no frame. The decoder hunts for the next greeting when this is met."""


class Frame:
    """One whole frame as received; ``payload`` is the frame's own copy, at most ``PAYLOAD_BYTES_MAX`` bytes."""

    __slots__ = ("kind", "payload", "stream")

    def __init__(self, kind: FrameType, stream: int, payload: bytes) -> None:
        self.kind = kind
        self.stream = stream
        self.payload = payload

    def __repr__(self) -> str:
        return f"Frame({self.kind.name}, stream={self.stream}, {len(self.payload)} bytes)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frame):
            return NotImplemented
        return (self.kind, self.stream, self.payload) == (other.kind, other.stream, other.payload)

    __hash__ = None  # type: ignore[assignment]


def encode(kind: FrameType, stream: int, payload: bytes | memoryview) -> list[bytes | memoryview]:
    """Return the frame as buffers for one gathered write; the payload is not copied when it is large."""
    size = len(payload)
    if size > PAYLOAD_BYTES_MAX:
        raise FrameError(f"A payload of {size} bytes does not fit into a frame")
    header = HEADER.pack(MAGIC, kind, 0, stream, size)
    if size <= 1024:
        return [b"".join((header, payload, TRAILER))]
    return [header, payload, TRAILER]


class Decoder:
    """Cut frames out of chunks of any size.

    ``wanted`` is the greeting to hunt for: HELLO at the guest, WELCOME at the host. The decoder holds at most one
    frame beyond the chunk it is given. While it hunts, everything but a whole frame of the wanted type is dropped; a
    greeting that is not acceptable is refused with ``refuse``, which starts the hunt anew.
    """

    def __init__(self, wanted: FrameType, *, hunting: bool = False) -> None:
        self._mark = MAGIC + bytes((wanted, 0))
        self._buffer = bytearray()
        self.hunting = hunting
        self.dropped_bytes = 0

    def hunt(self) -> None:
        """Forget all that is buffered and take nothing but the wanted greeting from now on."""
        self.dropped_bytes += len(self._buffer)
        self._buffer.clear()
        self.hunting = True

    def refuse(self) -> None:
        """Say that the greeting just returned was not the right one: go on hunting behind it, keeping the buffer."""
        self.hunting = True

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes. Call ``next_frame`` until it returns None before feeding again, to stay bounded."""
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None when more bytes are needed."""
        while True:
            if self.hunting and not self._seek():
                return None
            buffer = self._buffer
            if len(buffer) < HEADER.size:
                return None
            magic, code, flags, stream, size = HEADER.unpack_from(buffer)
            kind = _TYPES.get(code)
            if magic != MAGIC or kind is None or flags or size > PAYLOAD_BYTES_MAX:
                self._lose(1)
                continue
            end = HEADER.size + size
            if len(buffer) < end + len(TRAILER):
                return None
            if not buffer.startswith(TRAILER, end) or _FIXED_LENGTHS.get(kind, size) != size:
                # While hunting, the true greeting may lie within what only looked like a frame.
                self._lose(1 if self.hunting else end + len(TRAILER))
                continue
            with memoryview(buffer) as view:
                payload = bytes(view[HEADER.size : end])
            del buffer[: end + len(TRAILER)]
            self.hunting = False
            return Frame(kind, stream, payload)

    def _lose(self, count: int) -> None:
        self.hunting = True
        self.dropped_bytes += count
        del self._buffer[:count]

    def _seek(self) -> bool:
        """Drop bytes up to the next thing that looks like the wanted greeting; False when there is none yet."""
        found = self._buffer.find(self._mark)
        keep_from = found if found >= 0 else max(0, len(self._buffer) - len(self._mark) + 1)
        self.dropped_bytes += keep_from
        del self._buffer[:keep_from]
        return found >= 0

"""The two halves of one stream: what has been sent and may be sent again, and what has arrived and in which order.

Offsets are absolute: they count the stream's bytes from its first one and never start anew, whatever happens to the
connection. A *durable* stream (of a command) keeps what it sent until the other side has made it safe, and goes on
after a resynchronisation; the others (of files) end there.
"""

from __future__ import annotations

from collections import deque

from space.protocol.frames import PAYLOAD_BYTES_MAX

WINDOW_BYTES = 1024 * 1024
"""How far a sender may be ahead of what the receiver has acknowledged."""
PORT_WINDOW_BYTES = 512 * 1024
"""The same for connections to ports, of which there may be thousands: both ends keep to it."""
ACK_STEP_BYTES = WINDOW_BYTES // 8
"""Smaller progress than this is not acknowledged on its own."""
SMALL_BYTES = 8 * 1024
"""Pieces up to this size are joined while they wait."""


class StreamError(ValueError):
    """The other side broke the rules of a stream, or this side was asked to."""


class SendHalf:
    """Bytes on their way out. Holds at most ``WINDOW_BYTES``: nothing is queued that may not be sent at once."""

    def __init__(self, number: int, *, durable: bool, offset: int = 0) -> None:
        self.number = number
        self.durable = durable
        self.acked = offset
        self.sent = offset
        self.produced = offset
        self.ended = False
        self.eof_sent = False
        self.announce = False
        """Whether the offset must be stated before the next DATA, because it does not follow on the last one."""
        self.held = False
        """Whether nothing may be sent until the other side has said how far it is."""
        self.queued = False
        """Whether it waits for its turn to send."""
        self._unsent: deque[bytes] = deque()
        self._unacked: deque[bytes] = deque()
        self._unacked_from = offset

    @property
    def room(self) -> int:
        """How many bytes may be appended now."""
        return self.acked + WINDOW_BYTES - self.produced

    @property
    def ready(self) -> bool:
        """Whether there is a DATA or EOF frame to send."""
        return not self.held and (bool(self._unsent) or (self.ended and not self.eof_sent))

    def append(self, data: bytes) -> None:
        """Queue bytes. More than ``room``, or anything after the end, is an error of the caller."""
        if len(data) > self.room or self.ended:
            raise StreamError(f"Stream {self.number} has room for {self.room} bytes, not {len(data)}")
        if data:
            self.produced += len(data)
            join_small(self._unsent, data)

    def take(self) -> bytes | memoryview:
        """Return the next payload to send, at most one frame's; empty when all is sent."""
        if not self._unsent:
            return b""
        chunk: bytes = self._unsent.popleft()
        if len(chunk) > PAYLOAD_BYTES_MAX:
            self._unsent.appendleft(chunk[PAYLOAD_BYTES_MAX:])
            chunk = chunk[:PAYLOAD_BYTES_MAX]
        self.sent += len(chunk)
        if self.durable:
            join_small(self._unacked, chunk)
        return chunk

    def acknowledge(self, offset: int) -> bool:
        """Take note that the other side has everything up to ``offset``; True when that was news."""
        if offset > (self.produced if self.durable else self.sent):
            raise StreamError(f"Stream {self.number} was acknowledged beyond its {self.produced} bytes")
        if offset <= self.acked:
            return False
        self.acked = offset
        if offset > self.sent:
            # It had them before a resynchronisation made this side go back.
            self._drop_unsent(offset - self.sent)
            self.sent = offset
            self.announce = True
        if self.durable:
            while self._unacked and self._unacked_from + len(self._unacked[0]) <= offset:
                self._unacked_from += len(self._unacked.popleft())
            if not self._unacked:
                self._unacked_from = self.sent
        return True

    def rewind(self, offset: int | None = None) -> None:
        """Go back to ``offset`` (the last acknowledged one by default): all from there on is sent again."""
        target = self.acked if offset is None else offset
        if not self._unacked_from <= target <= self.produced:
            raise StreamError(f"Stream {self.number} cannot go on at {target}")
        self.eof_sent = False
        self.announce = True
        self._unsent.extendleft(reversed(self._unacked))
        self._unacked.clear()
        self._drop_unsent(target - self._unacked_from)
        self.sent = self._unacked_from = target

    def _drop_unsent(self, count: int) -> None:
        while count and self._unsent:
            chunk = self._unsent.popleft()
            if len(chunk) > count:
                self._unsent.appendleft(chunk[count:])
                return
            count -= len(chunk)


class ReceiveHalf:
    """Bytes that arrive. Cuts repeats by offset; refuses gaps and what exceeds the window."""

    def __init__(self, number: int, *, durable: bool, offset: int = 0) -> None:
        self.number = number
        self.durable = durable
        self.received = offset
        self.consumed = offset
        self.acked = offset
        self.length: int | None = None
        self._position = offset

    @property
    def ended(self) -> bool:
        return self.length is not None

    def at(self, offset: int) -> None:
        """The next DATA begins at ``offset``."""
        if offset > self.received:
            raise StreamError(f"Stream {self.number} would miss bytes from {self.received} to {offset}")
        self._position = offset

    def accept(self, data: bytes) -> bytes:
        """Return the part of ``data`` that is new; empty when all of it is a repeat."""
        start, self._position = self._position, self._position + len(data)
        if self._position > self.consumed + WINDOW_BYTES:
            raise StreamError(f"Stream {self.number} was sent more than its window")
        if self._position <= self.received:
            return b""
        if self.length is not None:
            raise StreamError(f"Stream {self.number} goes on after its end")
        fresh = data[self.received - start :]
        self.received = self._position
        return fresh

    def end(self, length: int) -> bool:
        """The stream is ``length`` bytes long and complete; True when that was news."""
        if length != self.received or length != self._position:
            raise StreamError(f"Stream {self.number} ended at {length} but {self.received} bytes arrived")
        news = self.length is None
        self.length = length
        return news

    def consume(self, offset: int) -> bool:
        """Everything up to ``offset`` is safe; True when the other side should be told now."""
        if not self.consumed <= offset <= self.received:
            raise StreamError(f"Stream {self.number} cannot be acknowledged up to {offset}")
        self.consumed = offset
        return offset - self.acked >= ACK_STEP_BYTES or (offset > self.acked and offset == self.length)


def join_small(chunks: deque[bytes], data: bytes) -> None:
    """Append, joining small pieces, so that a stream of single bytes costs no object for each."""
    if chunks and len(chunks[-1]) + len(data) <= SMALL_BYTES:
        chunks[-1] += data
    else:
        chunks.append(data)

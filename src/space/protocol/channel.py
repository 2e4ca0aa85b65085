"""One end of the channel between host and guest, without I/O: bytes in, events out; calls in, bytes out.

How to drive an end, in the manner of h11::

    channel.feed(os.read(fd, 1 << 20))          # bytes that arrived
    while (event := channel.next_event()) is not None:
        ...                                     # act; calls on the channel are welcome here
    while buffers := channel.outgoing():        # bytes to write now
        channel.written(os.writev(fd, buffers))

``HostChannel`` (host.py) greets and requests; ``GuestChannel`` (guest.py) is greeted and replies. Streams are numbered
by the host and have up to two halves. A sender may be ``WINDOW_BYTES`` ahead of the receiver's ``ack``; ``room`` says
what may be sent now, so nothing grows without bound whatever the other side does. Messages and rules broken by the
other side never raise: a broken stream is reset, broken framing leads to ``OutOfStep``. Exceptions are this side's own
mistakes.
"""

from __future__ import annotations

from collections import deque

from space.protocol import messages
from space.protocol.checks import MessageError
from space.protocol.events import (
    Ended,
    Event,
    Received,
    WasReset,
    Writable,
)
from space.protocol.frames import NUMBER_MAX, OFFSET, Decoder, Frame, FrameType, encode
from space.protocol.streams import ReceiveHalf, SendHalf, StreamError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from space.protocol.messages import Failure

PENDING_BYTES_MAX = 512 * 1024
"""No further frames are made while this much waits to be written."""
BACKLOG_BYTES_MAX = 1024 * 1024
"""``congested`` from here on: the user stops feeding until the other side reads."""
BUFFERS_MAX = 64


class ChannelError(RuntimeError):
    """This side asked the channel for what is not possible now."""


def failure(code: str, message: str = "", errno: int | None = None) -> Failure:
    """Return a failure as it travels in replies and resets; the message is cut to what may travel."""
    return {"code": code, "message": message[:1000], "errno": errno}


class Channel:
    """What both ends share: streams, their credit, and the order in which frames go out."""

    def __init__(self, wanted: FrameType, *, hunting: bool) -> None:
        self._decoder = Decoder(wanted, hunting=hunting)
        self._events: deque[Event] = deque()
        self._control: deque[list[bytes | memoryview]] = deque()
        self._control_bytes = 0
        self._pending: deque[bytes | memoryview] = deque()
        self._pending_bytes = 0
        self._sends: dict[int, SendHalf] = {}
        self._receives: dict[int, ReceiveHalf] = {}
        self._turns: deque[SendHalf] = deque()
        self._acks: set[int] = set()
        self._silent = True
        """Nothing but greetings goes out before the two ends know one another."""

    # --- bytes in, events out

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes that arrived. Call ``next_event`` until None before feeding again."""
        self._decoder.feed(data)

    def next_event(self) -> Event | None:
        """Return what happened next, or None when more bytes are needed."""
        while not self._events:
            was_hunting = self._decoder.hunting
            frame = self._decoder.next_frame()
            if self._decoder.hunting and not was_hunting:
                self._on_out_of_step()
            if frame is None:
                break
            try:
                self._on_frame(frame)
            except StreamError as error:
                self.reset(frame.stream, "protocol-error", str(error))
                self._events.append(WasReset(frame.stream, failure("protocol-error", str(error))))
        return self._events.popleft() if self._events else None

    # --- bytes out

    def outgoing(self) -> list[bytes | memoryview]:
        """Return buffers to write now in one gathered write (at most 64); empty when there is nothing to say."""
        if self._pending_bytes < PENDING_BYTES_MAX:
            self._refill()
        pending = self._pending
        return [pending[i] for i in range(min(len(pending), BUFFERS_MAX))]

    def written(self, count: int) -> None:
        """Say that the first ``count`` bytes of what ``outgoing`` returned are written."""
        pending = self._pending
        self._pending_bytes -= count
        while count:
            buffer = pending.popleft()
            size = len(buffer)
            if size > count:
                pending.appendleft(memoryview(buffer)[count:])
                return
            count -= size

    @property
    def congested(self) -> bool:
        """Whether so much waits to be written that no more should be fed."""
        return self._control_bytes + self._pending_bytes > BACKLOG_BYTES_MAX

    # --- streams

    def open_send(self, number: int, *, durable: bool = False, offset: int = 0) -> None:
        """Begin to send on a stream, its next byte being number ``offset``. ``durable``: it survives ``hello``."""
        self._open(self._sends, number)
        self._sends[number] = SendHalf(number, durable=durable, offset=offset)

    def open_receive(self, number: int, *, durable: bool = False, offset: int = 0) -> None:
        """Begin to receive on a stream, of which ``offset`` bytes are already safe here (and acknowledged now)."""
        self._open(self._receives, number)
        self._receives[number] = ReceiveHalf(number, durable=durable, offset=offset)
        if offset:
            self._acks.add(number)

    def sends(self, number: int) -> bool:
        """Whether the stream's sending half is open here."""
        return number in self._sends

    def receives(self, number: int) -> bool:
        """Whether the stream's receiving half is open here."""
        return number in self._receives

    def room(self, number: int) -> int:
        """How many bytes ``send`` takes for this stream now; 0 too when it is not open."""
        half = self._sends.get(number)
        return half.room if half is not None and not half.ended else 0

    def place(self, number: int) -> tuple[int, int, bool]:
        """Where the sending half is: ``(acked, produced, ended)``."""
        half = self._sends[number]
        return half.acked, half.produced, half.ended

    def taken(self, number: int) -> tuple[int, int, bool]:
        """Where the receiving half is: ``(consumed, received, ended)``."""
        half = self._receives[number]
        return half.consumed, half.received, half.ended

    def send(self, number: int, data: bytes) -> None:
        """Queue bytes of a stream, at most ``room``. On a stream that is not open (it was reset) they are dropped."""
        half = self._sends.get(number)
        if half is not None:
            half.append(data)
            self._schedule(half)

    def end(self, number: int) -> None:
        """All of the stream was given to ``send``: it is complete. Again, or not open: no effect."""
        half = self._sends.get(number)
        if half is not None:
            half.ended = True
            self._schedule(half)

    def ack(self, number: int, offset: int) -> None:
        """All bytes before ``offset`` are safe here: the sender may go on and need not keep them."""
        half = self._receives.get(number)
        if half is not None and half.consume(offset):
            self._acks.add(number)

    def reset(self, number: int, code: str, message: str = "") -> None:
        """End both halves of a stream unfinished and tell the other side, if it is open at all."""
        if self.close(number):
            self._say(FrameType.RESET, number, {"code": code, "message": message[:1000]})

    def close(self, number: int) -> bool:
        """Forget a stream without a word; False when it was not open."""
        self._acks.discard(number)
        known = number in self._sends or number in self._receives
        self._forget_send(number)
        self._receives.pop(number, None)
        return known

    # --- for the two ends

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is FrameType.DATA:
            self._on_data(frame)
        elif frame.kind is FrameType.ACK:
            half = self._sends.get(frame.stream)
            if half is not None:
                self._on_ack(half, OFFSET.unpack(frame.payload)[0])
        elif frame.kind is FrameType.EOF:
            half = self._receives.get(frame.stream)
            if half is not None and half.end(OFFSET.unpack(frame.payload)[0]):
                self._acks.add(frame.stream)
                self._events.append(Ended(frame.stream, half.received))
        elif frame.kind is FrameType.RESET:
            self._on_reset(frame)

    def _on_ack(self, half: SendHalf, offset: int) -> None:
        if half.acknowledge(offset):
            self._events.append(Writable(half.number, half.acked))
        if half.eof_sent and not half.durable and half.acked == half.produced:
            self._forget_send(half.number)

    def _on_data(self, frame: Frame) -> None:
        half = self._receives.get(frame.stream)
        if half is None:
            return  # A late frame of a stream that was reset here.
        offset = half.received
        data = half.accept(frame.payload)
        if data:
            self._events.append(Received(frame.stream, offset, data))

    def _on_reset(self, frame: Frame) -> None:
        try:
            why = messages.check_reset(messages.decode_json(frame.payload))
        except MessageError as error:
            why = failure("bad-message", str(error))
        if self.close(frame.stream):
            self._events.append(WasReset(frame.stream, why))

    def _on_out_of_step(self) -> None:
        """Called once when the bytes that arrive stop being frames."""

    def _end_transfers(self) -> None:
        """Streams that do not survive a new greeting end here; the rest will be gone over again."""
        self._acks.clear()
        halves = [*self._sends.values(), *self._receives.values()]
        for number in dict.fromkeys(half.number for half in halves if not half.durable):
            self.close(number)
            why = failure("resynchronised", "The connection between host and guest was made anew")
            self._events.append(WasReset(number, why))

    def _drop_outgoing(self) -> None:
        self._control.clear()
        self._pending.clear()
        self._control_bytes = self._pending_bytes = 0

    def _say(self, kind: FrameType, number: int, message: dict[str, Any]) -> None:
        """Queue a message, unless this side has to be silent."""
        if not self._silent:
            self._queue(encode(kind, number, messages.encode_json(message)))

    def _queue(self, buffers: list[bytes | memoryview]) -> None:
        self._control.append(buffers)
        self._control_bytes += sum(map(len, buffers))

    def _open(self, halves: dict[int, Any], number: int) -> None:
        if number in halves or not 1 <= number <= NUMBER_MAX:
            raise ChannelError(f"Stream {number} is in use")

    def _forget_send(self, number: int) -> None:
        self._sends.pop(number, None)  # Its turn, if it waits for one, is passed over.

    def _schedule(self, half: SendHalf) -> None:
        """Give a stream that has something to send a turn. The others cost nothing, however many they are."""
        if half.ready and not half.queued:
            half.queued = True
            self._turns.append(half)

    def _refill(self) -> None:
        while self._control and self._pending_bytes < PENDING_BYTES_MAX:
            buffers = self._control.popleft()
            self._control_bytes -= sum(map(len, buffers))
            self._put(buffers)
        if self._silent:
            return
        while self._acks:
            half = self._receives[self._acks.pop()]
            half.acked = half.consumed
            self._put(encode(FrameType.ACK, half.number, OFFSET.pack(half.consumed)))
            if half.consumed == half.length and not half.durable:
                del self._receives[half.number]
        turns = self._turns
        while turns and self._pending_bytes < PENDING_BYTES_MAX:
            half = turns.popleft()
            half.queued = False
            if half.ready and self._sends.get(half.number) is half:
                self._put_data(half)
                self._schedule(half)

    def _put_data(self, half: SendHalf) -> None:
        if half.announce:
            half.announce = False
            self._announce(half)
        data = half.take()
        if data:
            self._put(encode(FrameType.DATA, half.number, data))
        elif half.ended and not half.eof_sent:
            half.eof_sent = True
            self._put(encode(FrameType.EOF, half.number, OFFSET.pack(half.produced)))

    def _announce(self, half: SendHalf) -> None:
        """State at which offset the stream goes on; the host need not, for the guest told it where."""

    def _put(self, buffers: list[bytes | memoryview]) -> None:
        self._pending.extend(buffers)
        self._pending_bytes += sum(map(len, buffers))

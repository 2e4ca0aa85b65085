"""The host's end of a guest's channel: bytes of two FIFOs in and out, requests and answers, streams and their users.

Everything that comes from a guest is hostile. The protocol bounds what a guest can make this process keep; what is
added here bounds time: a guest gets short slices of the event loop, and one whose bytes stop being frames is greeted
anew a few times and then given up. Knows nothing of commands, files or the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import structlog

from space.errors import InvalidRequest, MachineLost, OutcomeUnknown, SpaceError, Unavailable
from space.node.errors import error_from_guest
from space.protocol.channel import ChannelError
from space.protocol.checks import MessageError
from space.protocol.events import (
    Ended,
    Event,
    Happened,
    OutOfStep,
    Received,
    Replied,
    WasReset,
    Welcomed,
    Writable,
)
from space.protocol.host import HostChannel
from space.protocol.streams import WINDOW_BYTES, StreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from space.protocol.messages import Welcome

log = structlog.get_logger(__name__)

READ_BYTES = 512 * 1024
SLICE_BYTES_MIN = 16 * 1024
SLICE_S = 0.004
"""How long one guest's bytes may keep the event loop. Tiny frames are the dearest: what is fed at once adapts."""
GREET_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 30.0
OUT_OF_STEP_MAX = 3
OUT_OF_STEP_PERIOD_S = 60.0
CONGESTED_TIMEOUT_S = 60.0


class StreamUser(Protocol):
    """Whoever uses a stream of the channel. Called from the reading callback: must not block and must not raise."""

    def on_data(self, number: int, offset: int, data: bytes) -> None:
        """Bytes arrived, each exactly once and in order; acknowledge them with ``Guest.ack`` when they are safe."""

    def on_end(self, number: int, length: int) -> None:
        """The stream is complete."""

    def on_reset(self, number: int, error: SpaceError) -> None:
        """The stream is over, unfinished."""

    def on_room(self, number: int, acked: int) -> None:
        """The guest has taken what was sent up to ``acked``."""


class GuestOwner(Protocol):
    """Whoever has opened the channel."""

    def on_welcome(self, guest: Guest, welcome: Welcome) -> None:
        """The guest answered a greeting; streams of commands must be opened or resumed before this returns."""

    def on_exit(self, guest: Guest, fields: dict[str, Any]) -> None:
        """A command ended; may be told again."""

    def on_lost(self, guest: Guest, cause: str) -> None:
        """The channel is closed for good: ``machine-exited``, ``protocol-violation`` or ``guest-unresponsive``."""


class Guest:
    """The channel to one running machine. ``open`` it, then ``greet``; ``detach`` before the machine is suspended."""

    traffic: ClassVar[Counter[str]] = Counter()
    """Of all channels of this process: bytes ``received`` and ``sent``, and ``resyncs``."""

    def __init__(self, machine: str, directory: Path, owner: GuestOwner) -> None:
        self.machine = machine
        self.boot_id: str | None = None
        self.standing = False
        """Whether it had quiesced, and was not awakened, when it was greeted."""
        self.lost = False
        """Whether it went away, or was given up, by itself: the owner is told, and finds out why."""
        self.trusted: str | None = None
        """The certificate that it was told to trust."""
        self.errands: dict[str, asyncio.Future[dict[str, Any]]] = {}
        """Commands that the node itself has begun, and who waits for their exit: the owner does not know them."""
        self.names: dict[str, str] = {}
        """Of a guest that is the copy of another: ids that commands had there, and what they are called here."""
        self._directory = directory
        self._owner = owner
        self._channel = HostChannel()
        self._in = -1
        self._out = -1
        self._buffer = bytearray(READ_BYTES)
        self._slice = SLICE_BYTES_MIN
        self._paused: asyncio.TimerHandle | None = None
        self._congested_since: float | None = None
        self._writing = False
        self._written = 0
        self._last_word: int | None = None
        """How much was written when it was asked to quiesce, which it did; None: it was not, or not all was."""
        self._cut = True
        """Whether part of what was written may never reach it."""
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._users: dict[int, StreamUser] = {}
        self._welcomed: asyncio.Future[Welcome] | None = None
        self._out_of_step: list[float] = []
        self._deadline: asyncio.TimerHandle | None = None

    # --- the connection

    @property
    def connected(self) -> bool:
        """Whether the FIFOs are open and the guest has answered."""
        return self._out >= 0 and self._channel.welcomed

    def open(self) -> None:
        """Open the machine's FIFOs. Raises ``MachineLost`` when there is no machine at the other end."""
        if self._out >= 0:
            return
        try:
            self._out = os.open(self._directory / "out", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._in = os.open(self._directory / "in", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._close_files()
            raise MachineLost(f"The machine's channel cannot be opened: {error.strerror}") from error
        asyncio.get_running_loop().add_reader(self._out, self._on_readable)

    async def greet(self, timeout_s: float = GREET_TIMEOUT_S, *, saying: Callable[[], None] | None = None) -> Welcome:
        """Greet the guest and wait for its answer, by which all streams of commands are resumed. ``saying`` asks it
        more in the same breath.
        """
        self.open()
        welcomed = self._hello()
        if saying is not None:
            saying()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(welcomed)
        except TimeoutError as error:
            raise MachineLost(
                f"The guest agent did not answer within {timeout_s:g} s.", code="guest-unresponsive"
            ) from error

    def hand_over(self, machine: str, owner: GuestOwner) -> None:
        """Belong to another owner from now on, and to the machine's new name."""
        self.machine, self._owner = machine, owner

    def detach(self) -> None:
        """Close the FIFOs but keep the channel's streams, which go on when the guest is greeted again."""
        self._close_files()
        self._cut = self._written != self._last_word
        self._fail_answers(OutcomeUnknown("The machine was suspended before the guest answered."))

    def close(self, error: SpaceError) -> None:
        """Close for good: every stream's user and every waiting request gets ``error``."""
        self._close_files()
        self._fail_answers(error)
        users, self._users = self._users, {}
        for number, user in users.items():
            self._channel.close(number)
            user.on_reset(number, error)

    # --- requests

    async def request(
        self, op: str, fields: dict[str, Any] | None = None, *, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> dict[str, Any]:
        """Ask the guest and return its checked answer, or raise its failure as an error."""
        number, answer = self._ask(op, fields)
        written = None if self._channel.outgoing() else self._written
        try:
            async with asyncio.timeout(timeout_s):
                result = await answer
            if op == "quiesce":
                self._last_word = written
            return result  # noqa: TRY300
        except TimeoutError as error:
            raise OutcomeUnknown(f"The guest did not answer {op} within {timeout_s:g} s.", op=op) from error
        finally:
            self._answers.pop(number, None)

    def ask(self, op: str, fields: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
        """Ask the guest; the answer is for the caller to await. Whoever does not must see to its end by other means."""
        number, answer = self._ask(op, fields)

        def done(answer: asyncio.Future[dict[str, Any]]) -> None:
            self._answers.pop(number, None)
            if not answer.cancelled():
                answer.exception()  # Retrieved here: the asker may be gone.

        answer.add_done_callback(done)
        return answer

    def tell(self, op: str, fields: dict[str, Any] | None = None) -> None:
        """Ask the guest and drop its answer. Nothing happens when it cannot be asked now."""
        with contextlib.suppress(SpaceError):
            number, _ = self._ask(op, fields)
            self._answers.pop(number, None)

    def _ask(self, op: str, fields: dict[str, Any] | None) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        if self._out < 0:
            raise MachineLost
        if self._channel.congested:
            raise Unavailable("The guest agent does not read what it is asked.", code="guest-busy")
        try:
            number = self._channel.request(op, fields)
        except MessageError as error:
            raise InvalidRequest(
                f"The guest cannot be asked that: {error}", field=str(error).partition(":")[0]
            ) from error
        except ChannelError as error:
            raise Unavailable(f"The guest cannot be asked now: {error}", code="guest-busy") from error
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._flush()
        return number, answer

    # --- streams

    def new_number(self) -> int:
        """Return a number for a stream that was never used before while the machine lives."""
        try:
            return self._channel.new_number()
        except ChannelError as error:
            raise MachineLost("The guest agent left no stream numbers.", code="protocol-violation") from error

    def receive(self, number: int, user: StreamUser, *, durable: bool = False, offset: int = 0) -> None:
        """Begin to receive on a stream, of which ``offset`` bytes are safe already."""
        if not self._channel.receives(number):
            self._channel.open_receive(number, durable=durable, offset=offset)
        self._users[number] = user

    def transmit(self, number: int, user: StreamUser, *, durable: bool = False) -> None:
        """Begin to send on a stream."""
        self._channel.open_send(number, durable=durable)
        self._users[number] = user

    def resume_transmit(self, number: int, user: StreamUser, acked: int, received: int, *, ended: bool) -> None:
        """Go on sending on a command's input where the guest says that it is. Only from ``on_welcome``."""
        try:
            if not acked <= received <= acked + WINDOW_BYTES:
                raise StreamError("The guest contradicts itself")  # noqa: TRY301 - handled as any other lie
            self._channel.resume_send(number, acked, received, ended=ended)
        except StreamError as error:
            self._channel.reset(number, "protocol-error", str(error))
            user.on_reset(number, MachineLost("The guest is not where it was.", code="protocol-violation"))
        else:
            self._users[number] = user

    def room(self, number: int) -> int:
        return self._channel.room(number)

    def place(self, number: int) -> tuple[int, int, bool]:
        """Return how far a stream that is sent is: ``(acked, sent or queued, ended)``."""
        return self._channel.place(number) if self._channel.sends(number) else (0, 0, True)

    def send(self, number: int, data: bytes) -> None:
        """Send at most ``room`` bytes of a stream."""
        self._channel.send(number, data)
        self._flush()

    def end(self, number: int) -> None:
        """Say that a stream is complete."""
        self._channel.end(number)
        self._flush()

    def ack(self, number: int, offset: int) -> None:
        """Say that a stream's bytes before ``offset`` are safe. Sent with the next write."""
        self._channel.ack(number, offset)

    def flush(self) -> None:
        """Write what waits. Needed after ``ack`` from anywhere but a stream user's callback."""
        self._flush()

    def drop(self, number: int) -> None:
        """Forget a stream without a word: it is finished, or the guest knows by other means."""
        if self._users.pop(number, None) is not None:
            self._channel.close(number)

    def reset(self, number: int, code: str, message: str) -> None:
        """End a stream unfinished."""
        if self._users.pop(number, None) is not None:
            self._channel.reset(number, code, message)
            self._flush()

    # --- bytes

    def _hello(self) -> asyncio.Future[Welcome]:
        if self._welcomed is None or self._welcomed.done():
            self._welcomed = asyncio.get_running_loop().create_future()
        self._channel.hello(cut=self._cut)
        self._cut, self._last_word = True, None
        self._dispatch_all()
        self._flush()
        return self._welcomed

    def _on_readable(self) -> None:
        """Take what is there, in slices; a guest that costs more than its slice has to wait as long as it took."""
        try:
            count = os.readv(self._out, [self._buffer])
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("channel-unreadable", machine=self.machine, error=error.strerror)
            count = 0
        if count == 0:
            self._lose("machine-exited", MachineLost("The sandbox's machine has ended."))
            return
        self.traffic["received"] += count
        began = time.monotonic()
        self._take(count)
        if self._out < 0:
            return
        self._flush()
        took = time.monotonic() - began
        if took > SLICE_S or self._channel.congested:
            self._pause_reading(max(took, SLICE_S))

    def _take(self, count: int) -> None:
        """Feed what was read, slice by slice; a slice that took long makes the next ones shorter."""
        start = 0
        with memoryview(self._buffer) as view:
            while start < count and self._out >= 0:
                began = time.monotonic()
                end = min(start + self._slice, count)
                self._channel.feed(view[start:end])
                self._dispatch_all()
                start = end
                took = time.monotonic() - began
                if took > SLICE_S:
                    self._slice = max(self._slice // 4, SLICE_BYTES_MIN)
                elif took < SLICE_S / 4:
                    self._slice = min(self._slice * 2, READ_BYTES)

    def _pause_reading(self, pause_s: float) -> None:
        if self._out < 0 or self._paused is not None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._out)
        self._paused = loop.call_later(pause_s, self._go_on_reading)

    def _go_on_reading(self) -> None:
        self._paused = None
        if self._out < 0:
            return
        if not self._channel.congested:
            self._congested_since = None
            asyncio.get_running_loop().add_reader(self._out, self._on_readable)
            return
        now = time.monotonic()
        self._congested_since = self._congested_since or now
        if now - self._congested_since > CONGESTED_TIMEOUT_S:
            self._lose("guest-unresponsive", MachineLost("The guest agent no longer reads.", code="guest-unresponsive"))
        else:
            self._pause_reading(0.05)

    def _flush(self) -> None:
        if self._writing or self._in < 0:
            return
        try:
            while buffers := self._channel.outgoing():
                count = os.writev(self._in, buffers)
                self.traffic["sent"] += count
                self._written += count
                self._channel.written(count)
        except BlockingIOError:
            self._writing = True
            asyncio.get_running_loop().add_writer(self._in, self._on_writable)
        except OSError:
            # The reader is gone; the end of `out` follows and tells the rest.
            log.info("channel-unwritable", machine=self.machine)

    def _on_writable(self) -> None:
        asyncio.get_running_loop().remove_writer(self._in)
        self._writing = False
        self._flush()

    def _close_files(self) -> None:
        loop = asyncio.get_running_loop()
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._out >= 0:
            loop.remove_reader(self._out)
            os.close(self._out)
        if self._in >= 0:
            loop.remove_writer(self._in)
            os.close(self._in)
        self._in = self._out = -1
        self._writing = False

    def _fail_answers(self, error: SpaceError) -> None:
        answers, self._answers = self._answers, {}
        for answer in (*answers.values(), *self.errands.values()):
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # Retrieved here: the asker may be gone.
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(error)
            self._welcomed.exception()

    def _lose(self, cause: str, error: SpaceError) -> None:
        self.lost = True
        self.close(error)
        self._owner.on_lost(self, cause)

    # --- events

    def _dispatch_all(self) -> None:
        while (event := self._channel.next_event()) is not None:
            self._dispatch(event)
            if self._out < 0:
                return

    def _dispatch(self, event: Event) -> None:
        user = self._users.get(event.number) if isinstance(event, Received | Ended | Writable | WasReset) else None
        match event:
            case Received() if user is not None:
                user.on_data(event.number, event.offset, event.data)
            case Ended() if user is not None:
                user.on_end(event.number, event.length)
            case Writable() if user is not None:
                user.on_room(event.number, event.acked)
            case WasReset() if user is not None:
                del self._users[event.number]
                user.on_reset(event.number, error_from_guest(event.failure))
            case Replied():
                self._on_replied(event)
            case Happened(name="exit"):
                self._on_exit(event.fields)
            case Welcomed():
                self._on_welcomed(event.welcome)
            case OutOfStep():
                self._on_out_of_step()
            case _:
                pass

    def _on_exit(self, fields: dict[str, Any]) -> None:
        errand = self.errands.get(fields["id"])
        if errand is None:
            self._owner.on_exit(self, fields)
        elif not errand.done():
            errand.set_result(fields)

    def _on_replied(self, event: Replied) -> None:
        answer = self._answers.get(event.number)
        if answer is None or answer.done():
            return
        if event.failure is None:
            answer.set_result(event.ok or {})
        else:
            answer.set_exception(error_from_guest(event.failure, event.op))

    def _on_welcomed(self, welcome: Welcome) -> None:
        self.boot_id = welcome["boot_id"]
        self.standing = welcome["standing"]
        self._owner.on_welcome(self, welcome)
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_result(welcome)

    def _on_out_of_step(self) -> None:
        """Greet again, which costs the guest its transfers but no command; too often, and it is given up."""
        self.traffic["resyncs"] += 1
        now = time.monotonic()
        self._out_of_step = [at for at in self._out_of_step if now - at < OUT_OF_STEP_PERIOD_S] + [now]
        log.warning("guest-out-of-step", machine=self.machine, times=len(self._out_of_step))
        if len(self._out_of_step) > OUT_OF_STEP_MAX:
            self._lose(
                "protocol-violation",
                MachineLost("The guest agent broke the protocol.", code="protocol-violation"),
            )
        else:
            self._hello()
            self._deadline = asyncio.get_running_loop().call_later(GREET_TIMEOUT_S, self._check_welcomed)

    def _check_welcomed(self) -> None:
        if self._out >= 0 and not self._channel.welcomed:
            self._lose("guest-unresponsive", MachineLost("The guest agent does not answer.", code="guest-unresponsive"))

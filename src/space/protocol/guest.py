"""The guest's end of the channel: is greeted, and answers."""

from __future__ import annotations

from space.protocol import messages
from space.protocol.channel import Channel, failure
from space.protocol.checks import MessageError
from space.protocol.events import Greeted, Requested
from space.protocol.frames import PADDING, Frame, FrameType, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from space.protocol.messages import CommandRecord, Failure
    from space.protocol.streams import SendHalf


class GuestChannel(Channel):
    """The guest's end. Says nothing until it is greeted, nor from ``fall_silent`` to the next greeting or ``speak``."""

    def __init__(self) -> None:
        super().__init__(FrameType.HELLO, hunting=True)
        self._nonce = ""
        self._number = 0
        self._requests: set[int] = set()
        self._later: list[tuple[tuple[int, ...], list[bytes | memoryview]]] = []
        self._unsaid: list[list[bytes | memoryview]] | None = None
        """What would have been said since ``fall_silent``; None when silence is not of that kind."""

    @property
    def silent(self) -> bool:
        """Whether nothing may be said until the next greeting."""
        return self._silent

    def welcome(self, boot_id: str, pid: int, commands: list[CommandRecord], *, standing: bool = False) -> None:
        """Answer ``Greeted``, before anything else is done on the channel. The streams of ``commands`` go on from what
        the host has acknowledged; events of their ends must be given to ``event`` again.
        """
        self._silent = False
        self._unsaid = None
        self._queue([PADDING])
        message = {"version": messages.VERSION, "nonce": self._nonce, "boot_id": boot_id, "pid": pid}
        self._say(FrameType.WELCOME, 0, {**message, "number": self._number, "standing": standing, "commands": commands})

    def reply(self, number: int, ok: dict[str, Any] | None = None) -> None:
        """Answer a request; one that was asked before the last greeting is dropped."""
        if number in self._requests:
            self._requests.discard(number)
            try:
                self._say(FrameType.REPLY, number, {"ok": ok or {}})
            except MessageError as error:
                self._say(FrameType.REPLY, number, {"error": failure("too-large", str(error))})

    def refuse(self, number: int, why: Failure) -> None:
        """Answer a request with a failure."""
        if number in self._requests:
            self._requests.discard(number)
            self._say(FrameType.REPLY, number, {"error": why})

    def event(self, fields: dict[str, Any], *, after: Iterable[int] = (), stream: int = 0) -> None:
        """Report something, once the ends of all the streams ``after`` are sent. A new greeting drops what waits."""
        if not self._silent or self._unsaid is not None:
            buffers = encode(FrameType.EVENT, stream, messages.encode_json(fields))
            self._later.append((tuple(after), buffers))

    def fall_silent(self, number: int, ok: dict[str, Any] | None = None) -> None:
        """Answer a request with the last frame before the next greeting or ``speak``. What is to be said meanwhile is
        kept for ``speak``; a greeting drops it.
        """
        self.speak()
        self.reply(number, ok)
        self._silent = True
        self._unsaid = []

    def speak(self) -> None:
        """Go on after ``fall_silent`` on the same connection, of which no byte was lost. Otherwise: no effect."""
        if self._unsaid is not None:
            unsaid, self._unsaid = self._unsaid, None
            self._silent = False
            for buffers in unsaid:
                self._queue(buffers)

    def _say(self, kind: FrameType, number: int, message: dict[str, Any]) -> None:
        if self._unsaid is not None:
            self._unsaid.append(encode(kind, number, messages.encode_json(message)))
        else:
            super()._say(kind, number, message)

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is FrameType.HELLO:
            self._on_hello(frame)
        elif frame.kind is FrameType.REQUEST:
            self._on_request(frame)
        else:
            super()._on_frame(frame)

    def _on_hello(self, frame: Frame) -> None:
        try:
            hello = messages.check_hello(messages.decode_json(frame.payload))
        except MessageError:
            self._decoder.refuse()
            return
        self._silent = True
        self._unsaid = None
        self._nonce = hello["nonce"]
        self._drop_outgoing()
        self._later.clear()
        self._requests.clear()
        self._end_transfers()
        for send in self._sends.values():
            send.rewind()
            self._schedule(send)
        for receive in self._receives.values():
            receive.at(receive.received)
            receive.acked = receive.consumed
        self._events.append(Greeted(hello["version"], hello["nonce"]))

    def _on_request(self, frame: Frame) -> None:
        number = frame.stream
        if number in self._requests:
            return
        self._requests.add(number)
        if len(self._requests) > messages.REQUESTS_MAX:
            self.refuse(number, failure("busy", "Too many requests are unanswered"))
            return
        try:
            op, fields = messages.check_request_message(messages.decode_json(frame.payload))
        except MessageError as error:
            self.refuse(number, failure("invalid-request", str(error)))
            return
        self._number = max(self._number, number, *messages.streams_of(fields))
        self._events.append(Requested(number, op, fields))

    def _announce(self, half: SendHalf) -> None:
        fields = {"event": "stream-at", "stream": half.number, "offset": half.sent}
        self._put(encode(FrameType.EVENT, half.number, messages.encode_json(fields)))

    def _refill(self) -> None:
        super()._refill()
        if self._later and not self._silent:
            waiting = self._later
            self._later = []
            for after, buffers in waiting:
                if any((half := self._sends.get(number)) is not None and not half.eof_sent for number in after):
                    self._later.append((after, buffers))
                else:
                    self._put(buffers)

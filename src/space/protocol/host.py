"""The host's end of the channel: greets, requests, and treats whatever the guest sends as an attacker's."""

from __future__ import annotations

import os

from space.protocol import messages
from space.protocol.channel import Channel, ChannelError, failure
from space.protocol.checks import MessageError
from space.protocol.events import Happened, OutOfStep, Replied, Welcomed
from space.protocol.frames import NUMBER_MAX, PADDING, Frame, FrameType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class HostChannel(Channel):
    """The host's end. Begin with ``hello``; do it again whenever the connection may have lost bytes."""

    def __init__(self) -> None:
        super().__init__(FrameType.WELCOME, hunting=True)
        self._nonce = ""
        self._number = 0
        self._requests: dict[int, str] = {}
        self.welcomed = False
        """Whether the guest answered the last hello."""

    def hello(self, *, cut: bool = True) -> None:
        """Greet the guest. Everything queued and not written is dropped, streams of files and unanswered requests end
        (as events), and nothing is taken from the guest until it answers. Requests may be made at once. Where no frame
        can have been ``cut`` on its way to the guest, nothing has to be filled up.
        """
        self._drop_outgoing()
        self._decoder.hunt()
        self._end_transfers()
        for number, op in self._requests.items():
            lost = failure("outcome-unknown", "The connection was made anew before the guest answered")
            self._events.append(Replied(number, op, None, lost))
        self._requests.clear()
        self.welcomed = False
        self._silent = False
        for half in self._sends.values():
            half.held = True
        self._nonce = os.urandom(16).hex()
        if cut:
            self._queue([PADDING])
        self._say(FrameType.HELLO, 0, {"version": messages.VERSION, "nonce": self._nonce})

    def new_number(self) -> int:
        """Return a number for a stream, never used before while the machine lives (after ``Welcomed`` at least)."""
        if self._number >= NUMBER_MAX:
            raise ChannelError("No stream or request numbers are left")
        self._number += 1
        return self._number

    def request(self, op: str, fields: dict[str, Any] | None = None) -> int:
        """Ask the guest and return the number its ``Replied`` will carry. Raises ``MessageError`` for wrong fields and
        ``ChannelError`` before ``hello`` or with too many unanswered requests.
        """
        if self._silent or len(self._requests) >= messages.REQUESTS_MAX:
            raise ChannelError("The guest has not been greeted" if self._silent else "Too many unanswered requests")
        fields = fields or {}
        messages.check_request(op, fields)
        number = self.new_number()
        self._say(FrameType.REQUEST, number, {"op": op, **fields})
        self._requests[number] = op
        return number

    def resume_send(self, number: int, acked: int, received: int, *, ended: bool) -> None:
        """After ``Welcomed``: go on with an input stream where the guest says that it is (its ``acked`` and
        ``produced``). An open half is rewound, one that is not open is opened there.
        """
        if number not in self._sends:
            self.open_send(number, durable=True, offset=received)
            half = self._sends[number]
        else:
            half = self._sends[number]
            half.acknowledge(acked)
            half.rewind(received)
            half.announce = False  # The guest itself said where it is.
            half.held = False
        half.acked = acked
        half.ended = half.ended or ended
        half.eof_sent = ended
        self._schedule(half)

    def _on_out_of_step(self) -> None:
        self._events.append(OutOfStep())

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is FrameType.WELCOME:
            self._on_welcome(frame)
        elif frame.kind is FrameType.REPLY:
            self._on_reply(frame)
        elif frame.kind is FrameType.EVENT:
            self._on_event(frame)
        else:
            super()._on_frame(frame)

    def _on_welcome(self, frame: Frame) -> None:
        if self.welcomed:
            return
        try:
            welcome = messages.check_welcome(messages.decode_json(frame.payload))
        except MessageError:
            welcome = None
        if welcome is None or welcome["nonce"] != self._nonce:
            self._decoder.refuse()
            return
        self.welcomed = True
        named = [place["number"] for command in welcome["commands"] for place in command["streams"].values()]
        self._number = max(self._number, welcome["number"], *named)
        self._acks.update(self._receives)
        self._events.append(Welcomed(welcome))

    def _on_reply(self, frame: Frame) -> None:
        op = self._requests.pop(frame.stream, None)
        if op is None:
            return
        try:
            ok, why = messages.check_reply(op, messages.decode_json(frame.payload))
        except MessageError as error:
            ok, why = None, failure("bad-message", f"The guest's answer to {op} is malformed: {error}")
        self._events.append(Replied(frame.stream, op, ok, why))

    def _on_event(self, frame: Frame) -> None:
        try:
            name, fields = messages.check_event(messages.decode_json(frame.payload))
        except MessageError:
            return  # A guest that talks nonsense harms only itself.
        if name != "stream-at":
            self._events.append(Happened(name, fields))
        elif (half := self._receives.get(frame.stream)) is not None and fields["stream"] == frame.stream:
            half.at(fields["offset"])

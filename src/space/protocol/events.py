"""What a channel tells its user, one object for each thing that happened."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from space.protocol.messages import Failure, Welcome


class Event:
    """Base of all events."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r:.80}' for name in self.__slots__)})"


class Greeted(Event):
    """Guest: the host (re)connected. Streams of files and open requests are gone; answer with ``welcome``."""

    __slots__ = ("nonce", "version")

    def __init__(self, version: int, nonce: str) -> None:
        self.version = version
        self.nonce = nonce


class Welcomed(Event):
    """Host: the guest answered this host's own hello; ``welcome`` says what runs there and how far its streams are.

    A host that has not got those streams open (it was started anew) opens them before it asks for the next event.
    """

    __slots__ = ("welcome",)

    def __init__(self, welcome: Welcome) -> None:
        self.welcome = welcome


class Requested(Event):
    """Guest: the host asks for ``op`` with checked ``fields``; answer ``number`` once with ``reply`` or ``refuse``."""

    __slots__ = ("fields", "number", "op")

    def __init__(self, number: int, op: str, fields: dict[str, Any]) -> None:
        self.number = number
        self.op = op
        self.fields = fields


class Replied(Event):
    """Host: request ``number`` is answered; exactly one of ``ok`` and ``failure`` is set.

    ``failure["code"]`` is ``outcome-unknown`` when the connection was made anew before the answer came, and
    ``bad-message`` when the guest's answer was malformed.
    """

    __slots__ = ("failure", "number", "ok", "op")

    def __init__(self, number: int, op: str, ok: dict[str, Any] | None, failure: Failure | None) -> None:
        self.number = number
        self.op = op
        self.ok = ok
        self.failure = failure


class Happened(Event):
    """Host: the guest reports ``exit`` or ``oom`` (``stream-at`` stays inside the channel). May be repeated after a
    resynchronisation.
    """

    __slots__ = ("fields", "name")

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self.name = name
        self.fields = fields


class Received(Event):
    """Bytes of a stream, in order, each exactly once; ``offset`` is that of the first. ``ack`` them when safe."""

    __slots__ = ("data", "number", "offset")

    def __init__(self, number: int, offset: int, data: bytes) -> None:
        self.number = number
        self.offset = offset
        self.data = data


class Ended(Event):
    """A stream is complete: all its ``length`` bytes were received."""

    __slots__ = ("length", "number")

    def __init__(self, number: int, length: int) -> None:
        self.number = number
        self.length = length


class WasReset(Event):
    """A stream is over, unfinished, and the channel has forgotten it. Codes of this side's own: ``resynchronised``,
    ``protocol-error``.
    """

    __slots__ = ("failure", "number")

    def __init__(self, number: int, failure: Failure) -> None:
        self.number = number
        self.failure = failure


class Writable(Event):
    """More of a stream that this side sends is acknowledged, up to ``acked``: see ``room``."""

    __slots__ = ("acked", "number")

    def __init__(self, number: int, acked: int) -> None:
        self.number = number
        self.acked = acked


class OutOfStep(Event):
    """Host: what the guest sends is no longer frames. Nothing more is taken from it until ``hello`` and its answer."""

    __slots__ = ()

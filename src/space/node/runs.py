"""One run of a program to its end for one client (`exec`): stateless, kept in memory, gone with the client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from space.errors import MachineLost, SpaceError
from space.model.command import CommandSpec, Exit, ExitKind
from space.model.ids import new_id
from space.node.guests import Guest
from space.node.readers import Chunk, Exited
from space.protocol.streams import SMALL_BYTES

if TYPE_CHECKING:
    from space.protocol.messages import StreamPlace

START_TIMEOUT_S = 60.0
SIGKILL = 9


class Run:
    """A running program. ``take(stream, offset, data)`` gets its output and says whether it is done with it at once."""

    def __init__(
        self, guest: Guest, spec: CommandSpec, stdin: bytes | None, take: Callable[[str, int, bytes], bool]
    ) -> None:
        self.id = new_id("cmd")
        self.guest = guest
        self._spec = spec
        self._take = take
        self._stdin = memoryview(stdin) if stdin is not None else None
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._received: dict[str, int] = {"stdout": 0, "stderr": 0}
        self._torn = False
        self._on_ended: Callable[[], object] | None = None
        self._began = 0.0

    @property
    def produced(self) -> dict[str, int]:
        return dict(self._received)

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def ended(self) -> Exit | None:
        """How it ended, or None while it runs."""
        return self._exit.result() if self._exit.done() else None

    def when_ended(self, call: Callable[[], object]) -> None:
        """Have ``call`` made when the run ends; one call at a time."""
        self._on_ended = call

    async def start(self) -> None:
        """Start the program, or raise what the guest refused it with."""
        guest, spec = self.guest, self._spec
        self._numbers = {name: guest.new_number() for name in self._received}
        self._names = {number: name for name, number in self._numbers.items()}
        for number in self._names:
            guest.receive(number, self, durable=True)
        if self._stdin is not None:
            self._numbers["stdin"] = guest.new_number()
            guest.transmit(self._numbers["stdin"], self, durable=True)
        fields: dict[str, Any] = {
            "id": self.id,
            "argv": list(spec.argv),
            "env": spec.env,
            "cwd": spec.cwd,
            "user": spec.user,
            "timeout_s": spec.timeout_s,
            "streams": dict(self._numbers),
        }
        self._began = time.monotonic()
        await guest.request("start", fields, timeout_s=START_TIMEOUT_S)
        self._pump()

    async def wait(self) -> Exit:
        """Wait for the end of the program, after its last byte of output."""
        return await asyncio.shield(self._exit)

    def done(self, stream: str, offset: int) -> None:
        """Say that output which ``take`` kept is dealt with up to ``offset``."""
        self.guest.ack(self._numbers[stream], offset)
        self.guest.flush()

    def kill(self) -> None:
        """Kill everything the program started; what it still says is dropped."""
        self._take = _drop
        for name, number in self._numbers.items():
            if name != "stdin":
                self.guest.ack(number, self._received[name])
        self.guest.tell("signal", {"id": self.id, "signal": SIGKILL, "tree": True})

    def finish(self, end: Exit) -> None:
        """The guest says how the program ended, or it is known to be lost."""
        for number in self._numbers.values():
            self.guest.drop(number)
        self.guest.tell("forget", {"id": self.id})
        self._settle(Exit(ExitKind.LOST) if self._torn and end.kind is not ExitKind.OOM_KILLED else end)

    def resume(self, places: dict[str, StreamPlace]) -> None:
        """The guest was greeted anew and still has the program."""
        number, place = self._numbers.get("stdin"), places.get("stdin")
        if number is not None and place is not None:
            self.guest.resume_transmit(number, self, place["acked"], place["produced"], ended=place["ended"])

    # --- StreamUser

    def on_data(self, number: int, offset: int, data: bytes) -> None:
        name = self._names.get(number)
        if name is not None:
            end = self._received[name] = offset + len(data)
            if self._take(name, offset, data):
                self.guest.ack(number, end)

    def on_end(self, number: int, length: int) -> None:
        """Nothing to do: the exit follows."""

    def on_reset(self, number: int, error: SpaceError) -> None:
        if number in self._names:
            self._torn = True
        # Of a guest that was lost it is found out why: only then is it told how its commands ended.
        if isinstance(error, MachineLost) and not self.guest.lost:
            self._settle(Exit(ExitKind.LOST))

    def on_room(self, number: int, acked: int) -> None:  # noqa: ARG002
        self._pump()

    def _settle(self, end: Exit) -> None:
        if not self._exit.done():
            self._exit.set_result(end)
            if self._on_ended is not None:
                self._on_ended()

    def _pump(self) -> None:
        if self._stdin is None:
            return
        number = self._numbers["stdin"]
        room = self.guest.room(number)
        piece, self._stdin = self._stdin[:room], self._stdin[room:]
        if piece:
            self.guest.send(number, bytes(piece))
        if not self._stdin:
            self._stdin = None
            self.guest.end(number)


class Budget:
    """How many bytes all captures of a process may hold together."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max

    def take(self, wanted: int) -> int:
        """Take up to ``wanted`` bytes and return how many there were."""
        given = min(wanted, self._left)
        self._left -= given
        return given

    def give_back(self, count: int) -> None:
        self._left += count


class Capture:
    """Output kept in memory, the first ``keep_bytes`` of each stream. Use as a context manager."""

    def __init__(self, keep_bytes: int, budget: Budget) -> None:
        self._keep = keep_bytes
        self._budget = budget
        self.kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self.truncated = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.give_back(sum(map(len, self.kept.values())))
        self.kept = {}

    def take(self, stream: str, offset: int, data: bytes) -> bool:  # noqa: ARG002
        kept = self.kept.get(stream)
        if kept is not None:
            wanted = min(len(data), self._keep - len(kept))
            given = self._budget.take(wanted)
            kept += data if given == len(data) else data[:given]
            self.truncated = self.truncated or given < len(data)
        return True


class _Piece:
    """Output that waits."""

    __slots__ = ("data", "offset", "stream")

    def __init__(self, stream: str, offset: int, data: bytes) -> None:
        self.stream = stream
        self.offset = offset
        self.data = data


class Relay:
    """Output handed on as it comes, as fast as it is taken: what waits is bounded by the channel's window.

    Small pieces are joined while they wait, so that a guest that sends single bytes does not cost an object for each.
    """

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque()
        self._last: dict[str, _Piece] = {}
        self._changed = asyncio.Event()

    def take(self, stream: str, offset: int, data: bytes) -> bool:
        last = self._last.get(stream)
        if last is not None and len(last.data) + len(data) <= SMALL_BYTES:
            last.data += data
        else:
            piece = self._last[stream] = _Piece(stream, offset, data)
            self._pieces.append(piece)
        self._changed.set()
        return False

    @property
    def waiting(self) -> bool:
        """Whether output is there that was not taken yet."""
        return bool(self._pieces)

    async def follow(self, run: Run) -> Chunk | Exited:
        """Return the next output, or how the run ended once there is no more. Then call ``run.done`` for it."""
        run.when_ended(self._changed.set)
        while not self._pieces:
            if run.ended is not None:
                return Exited(run.ended, run.produced, run.duration_s)
            self._changed.clear()
            await self._changed.wait()
        piece = self._pieces.popleft()
        if self._last[piece.stream] is piece:
            del self._last[piece.stream]
        return Chunk(piece.stream, piece.offset, piece.data)


def _drop(stream: str, offset: int, data: bytes) -> bool:  # noqa: ARG001
    return True

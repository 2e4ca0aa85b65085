"""One command session: a program in a guest, the output kept of it, and whoever is attached.

What the guest sends goes to the spool first and is acknowledged only then, so the death of this process loses nothing.
Attached readers read from the spool, each at its own offset; the slowest of them bounds what the guest may send, and
with none attached the spool alone takes everything. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from space.errors import Conflict, HostFull, LimitExceeded, OutcomeUnknown, SpaceError, Unavailable
from space.model.command import CommandState, Exit, ExitKind
from space.node.guests import Guest
from space.node.readers import Exited, Reader
from space.node.records import TOKENS_MAX, CommandRecord, CommandRecords
from space.node.spool import Spool
from space.node.stdin import Stdin

if TYPE_CHECKING:
    from space.protocol.messages import StreamPlace

log = structlog.get_logger(__name__)

MIB = 1024 * 1024
READ_AHEAD_BYTES = MIB
"""How far the guest's acknowledged bytes may be ahead of the slowest attached reader."""
READERS_MAX = 32
START_TIMEOUT_S = 60.0
STDIN = "stdin"
TTY = "tty"


class Output:
    """One output stream: its spool, and how much the guest was told to be safe."""

    __slots__ = ("acked", "name", "spool")

    def __init__(self, name: str, spool: Spool) -> None:
        self.name = name
        self.spool = spool
        self.acked = spool.total


class Session:
    """A command. Everything here runs in the event loop's thread; the guest's callbacks never block."""

    def __init__(
        self,
        record: CommandRecord,
        records: CommandRecords,
        grown: Callable[[str, int], None],
        starts: Mapping[str, int] | None = None,
    ) -> None:
        """``grown`` is told the sandbox and by how many bytes more output is kept; it raises what forbids that.

        ``starts`` is where the streams go on, of a command that is the copy of another.
        """
        self.record = record
        self._records = records
        self._grown = grown
        self._guest: Guest | None = None
        self._readers: set[Reader] = set()
        self._starting = asyncio.Lock()
        self._stdin = Stdin() if record.spec.stdin else None
        self._torn = False
        self._error: SpaceError | None = None
        keep = record.spec.output_mib * MIB
        names = (TTY,) if record.spec.tty else ("stdout", "stderr")
        self._outputs = {
            name: Output(name, Spool(records.spool_path(record.id, name), keep, (starts or {}).get(name, 0)))
            for name in names
        }

    # --- what it is

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def ended(self) -> bool:
        return self.record.state is CommandState.ENDED

    @property
    def stdin_safe(self) -> int:
        """How many bytes of stdin the guest has taken."""
        return self._stdin.safe if self._stdin is not None else 0

    @property
    def stdin_next(self) -> int:
        """Where whoever writes to stdin without having written before goes on: how many bytes were accepted."""
        return self._stdin.accepted if self._stdin is not None else 0

    @property
    def produced(self) -> dict[str, int]:
        return {name: output.spool.total for name, output in self._outputs.items()}

    @property
    def kept_bytes(self) -> int:
        return sum(output.spool.kept_bytes for output in self._outputs.values())

    @property
    def attached(self) -> int:
        return len(self._readers)

    # --- start, feed, signal

    async def start(self, guest: Guest) -> None:
        """Start the program unless it has been; several callers at once start it once.

        Raises what the guest refused it with (then it may be started again), or ``OutcomeUnknown``.
        """
        async with self._starting:
            if self.record.state is not CommandState.CREATED:
                return
            self._open_streams(guest)
            self.record.state = CommandState.RUNNING
            self._save()
            try:
                started = await guest.request("start", start_fields(self.record), timeout_s=START_TIMEOUT_S)
                self.record.pid = started["pid"]
            except OutcomeUnknown:
                raise  # The next greeting tells whether it was started.
            except SpaceError:
                self._unstart(guest)
                raise
            self._confirm()

    async def feed(self, data: bytes, offset: int | None = None) -> int:
        """Give bytes to stdin, waiting until the guest has room; return how many it was given altogether.

        ``offset`` is where ``data`` begins in the stream; what was accepted before is skipped, so that a client may
        repeat itself after a reconnect. What the program no longer reads (it closed its stdin) is dropped.
        """
        guest = self._running()
        accepted = await self._with_stdin().feed(guest, data, offset)
        self._wake()
        return accepted

    async def end_stdin(self) -> None:
        """Close stdin once all of it is sent. Repeating it, or a program that has closed it itself, is no error."""
        if self.record.spec.tty is not None:
            raise Conflict("A terminal has no end of stdin; send Ctrl-D.", code="no-stdin")
        if not self.ended:
            guest = self._running()
            await self._with_stdin().finish(guest)

    async def signal(self, number: int, *, tree: bool = True) -> None:
        """Send a signal to the command's processes (``tree``) or to its first one only."""
        await self._running().request("signal", {"id": self.id, "signal": number, "tree": tree})

    async def resize(self, rows: int, cols: int) -> None:
        if self.record.spec.tty is None:
            raise Conflict("The command has no terminal.", code="no-tty")
        await self._running().request("resize", {"id": self.id, "rows": rows, "cols": cols})

    def attached_with(self, fingerprint: str) -> bool:
        """Whether the command was attached with that very token."""
        return fingerprint in self.record.tokens

    def remember_token(self, fingerprint: str) -> None:
        if fingerprint not in self.record.tokens:
            self.record.tokens = [*self.record.tokens[1 - TOKENS_MAX :], fingerprint]
            self._save()

    # --- readers

    def read_from(self, offsets: Mapping[str, int]) -> Reader:
        """Attach a reader; close it with ``Reader.close``. Raises ``Conflict`` when too many are attached."""
        if len(self._readers) >= READERS_MAX:
            raise Conflict(f"{READERS_MAX} clients are attached to this command.", code="too-many-attached")
        reader = Reader(self, {name: offsets.get(name, 0) for name in self._outputs})
        self._readers.add(reader)
        return reader

    def release(self, reader: Reader) -> None:
        self._readers.discard(reader)
        self.advance()
        if self.ended and not self._readers:
            self._close_spools()

    def output(self, name: str) -> Output:
        return self._outputs[name]

    def failure(self) -> SpaceError | None:
        """Why readers must stop although there is no exit record."""
        return self._error

    def ending(self) -> Exited | None:
        """How it ended, once it has."""
        record = self.record
        if record.exit is None:
            return None
        began, ended = record.started_at or record.created_at, record.ended_at or record.created_at
        return Exited(record.exit, dict(record.produced), max(0.0, ended - began))

    def advance(self) -> None:
        """Tell the guest how much is safe and read by all who are attached."""
        if self._acknowledge() and self._guest is not None:
            self._guest.flush()

    def _acknowledge(self) -> bool:
        """Acknowledge what is safe and read; true when there was news, which goes out with the next write."""
        guest, news = self._guest, False
        if guest is None:
            return False
        for name, output in self._outputs.items():
            limit = min(
                (reader.offsets[name] + READ_AHEAD_BYTES for reader in self._readers), default=output.spool.total
            )
            safe = min(limit, output.spool.total)
            if safe > output.acked:
                output.acked = safe
                guest.ack(self._numbers[name], safe)
                news = True
        return news

    # --- the guest's side (StreamUser)

    def on_data(self, number: int, offset: int, data: bytes) -> None:  # noqa: ARG002
        output = self._by_number(number)
        if output is None:
            return
        try:
            self._records.check_room()
            before = output.spool.kept_bytes
            output.spool.append(data)
            self._grown(self.record.sandbox_id, output.spool.kept_bytes - before)
        except (HostFull, LimitExceeded) as error:
            self._fail(error)
            return
        except OSError as error:
            self._fail(HostFull(f"The host could not keep the command's output: {error.strerror}"))
            return
        self._acknowledge()
        self._wake()

    def on_end(self, number: int, length: int) -> None:
        """Nothing to do: the exit record says that all streams have ended."""

    def on_reset(self, number: int, error: SpaceError) -> None:
        log.debug("command-stream-reset", command=self.id, number=number, code=error.code)
        if self._stdin is not None and number == self._numbers.get(STDIN):
            self._stdin.close()
        if self._by_number(number) is not None:
            self._torn = True

    def on_room(self, number: int, acked: int) -> None:
        if self._stdin is not None and number == self._numbers.get(STDIN):
            self._stdin.on_room(acked)
            self._wake()

    def resume(self, guest: Guest, places: Mapping[str, StreamPlace], pid: int | None) -> None:
        """Go on with a command that the guest says it has. Only from the guest's welcome."""
        self._guest = guest
        self.record.pid = self.record.pid or pid
        self._confirm()
        for name, output in self._outputs.items():
            output.acked = output.spool.total
            guest.receive(self._numbers[name], self, durable=True, offset=output.spool.total)
        if self._stdin is not None:
            place = places.get(STDIN)
            if place is None:
                self._stdin.close()
            else:
                acked, received, ended = place["acked"], place["produced"], place["ended"]
                guest.resume_transmit(self._numbers[STDIN], self, acked, received, ended=ended)
                self._stdin.resume(self._numbers[STDIN], acked, received)
        self.advance()

    def absent(self, guest: Guest) -> None:
        """The guest knows nothing of the command: it was never started there, or its guest is gone."""
        if self.record.started_at is None and self.record.boot_id == guest.boot_id:
            self._unstart(guest)
        else:
            self.lose()

    def finish(self, end: Exit) -> None:
        """The command has ended and all its output is here; a stream that was torn on the way makes it lost."""
        if self.ended:
            return
        record = self.record
        record.exit = Exit(ExitKind.LOST) if self._torn and end.kind is not ExitKind.OOM_KILLED else end
        record.ended_at = time.time()
        record.produced = self.produced
        record.state = CommandState.ENDED
        self._save()
        self._let_go()
        if not self._readers:
            self._close_spools()

    def lose(self, kind: ExitKind = ExitKind.LOST) -> None:
        """The machine ended under the command. One that was only created stays so."""
        if self.record.state is CommandState.RUNNING:
            self.finish(Exit(kind))

    def discard(self, error: SpaceError) -> None:
        """The sandbox is deleted or the record is too old: readers end with ``error``, nothing is kept."""
        self._error = error
        self._let_go()
        self._close_spools()
        self._records.remove(self.id)

    # --- private

    @property
    def _numbers(self) -> dict[str, int]:
        return self.record.numbers

    def _by_number(self, number: int) -> Output | None:
        return next((o for name, o in self._outputs.items() if self._numbers.get(name) == number), None)

    def _running(self) -> Guest:
        if self.record.state is CommandState.CREATED:
            raise Conflict("The command has not been started.", code="not-started", state="created")
        if self.ended:
            raise Conflict("The command has ended.", code="command-ended", state="ended")
        if self._guest is None:
            raise Unavailable("The sandbox's guest agent is not ready.", code="not-ready")
        return self._guest

    def _with_stdin(self) -> Stdin:
        if self._stdin is None:
            raise Conflict("The command was created without stdin.", code="no-stdin")
        return self._stdin

    def _open_streams(self, guest: Guest) -> None:
        record = self.record
        numbers = {name: guest.new_number() for name in self._outputs}
        if self._stdin is not None:
            numbers[STDIN] = numbers[TTY] if TTY in numbers else guest.new_number()
        record.numbers = numbers
        record.boot_id = guest.boot_id
        for name in self._outputs:
            guest.receive(numbers[name], self, durable=True)
        if self._stdin is not None:
            guest.transmit(numbers[STDIN], self, durable=True)
            self._stdin.open(numbers[STDIN])
        self._guest = guest

    def _confirm(self) -> None:
        if self.record.started_at is None and not self.ended:
            self.record.started_at = time.time()
            self._save()
            self._wake()

    def _unstart(self, guest: Guest) -> None:
        if self.record.state is CommandState.RUNNING and self.record.started_at is None:
            for number in set(self._numbers.values()):
                guest.drop(number)
            self._guest = None
            self.record.numbers = {}
            self.record.state = CommandState.CREATED
            self._save()

    def _let_go(self) -> None:
        guest, self._guest = self._guest, None
        if guest is not None:
            for number in set(self._numbers.values()):
                guest.drop(number)
            guest.tell("forget", {"id": self.id})
        if self._stdin is not None:
            self._stdin.close()
        self._wake()

    def _fail(self, error: SpaceError) -> None:
        log.error("command-given-up", command=self.id, code=error.code, error=error.message)
        if self._guest is not None:
            self._guest.tell("signal", {"id": self.id, "signal": 9, "tree": True})
        self._error = error
        self.finish(Exit(ExitKind.LOST))

    def _save(self) -> None:
        if self._error is None:
            self._records.save(self.record)

    def _wake(self) -> None:
        for reader in self._readers:
            reader.wake()

    def _close_spools(self) -> None:
        for output in self._outputs.values():
            output.spool.close()


def start_fields(record: CommandRecord) -> dict[str, Any]:
    """Return the fields of the guest's ``start`` request for a command whose stream numbers are chosen."""
    spec = record.spec
    numbers = record.numbers
    streams = {TTY: numbers[TTY]} if TTY in numbers else dict(numbers)
    return {
        "id": record.id,
        "argv": list(spec.argv),
        "env": spec.env,
        "cwd": spec.cwd,
        "user": spec.user,
        "tty": {"rows": spec.tty.rows, "cols": spec.tty.cols} if spec.tty else None,
        "timeout_s": spec.timeout_s,
        "wait_output": spec.wait_output,
        "streams": streams,
    }

"""All commands of this node: sessions by id, runs in flight, and what happens to them when guests come and go."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import structlog

from space.errors import Conflict, LimitExceeded, NotFound, SpaceError
from space.model.command import CommandSpec, CommandState, Exit, ExitKind
from space.model.ids import new_id
from space.node.guests import Guest
from space.node.records import CommandRecord, CommandRecords
from space.node.runs import SIGKILL, Budget, Run
from space.node.sessions import Session
from space.node.tasks import Tasks

if TYPE_CHECKING:
    from space.protocol.messages import Welcome

log = structlog.get_logger(__name__)

SESSIONS_MAX = 1024
"""Commands remembered for one sandbox; beyond that the oldest that has ended makes room."""
KEPT_BYTES_MAX = 1024 * 1024 * 1024
"""Output kept for one sandbox, twice what its largest command may keep; the oldest that has ended makes room."""
RUNNING_MAX = 384
"""Command sessions running in one sandbox; together with ``RUNS_MAX`` within what a guest keeps records of."""
RUNS_MAX = 64
CAPTURE_BYTES_MAX = 512 * 1024 * 1024
UNUSED_S_MIN = 120.0
"""A command that was created and never attached is forgotten after the replay time, at least this."""


class Commands:
    """The node's commands. Create it before the guests are greeted; ``sweep`` it now and then."""

    def __init__(self, records: CommandRecords, tasks: Tasks, replay_s: float) -> None:
        self._records = records
        self._tasks = tasks
        self._replay_s = replay_s
        self._sessions: dict[str, Session] = {}
        self._runs: dict[str, Run] = {}
        self._kept: Counter[str] = Counter()
        self.budget = Budget(CAPTURE_BYTES_MAX)
        for record in records.load():
            try:
                session = self._sessions[record.id] = Session(record, records, self._grown)
                self._kept[record.sandbox_id] += session.kept_bytes
            except SpaceError as error:
                log.warning("command-output-damaged", command=record.id, error=error.message)
                records.remove(record.id)

    # --- sessions

    def create(self, sandbox_id: str, spec: CommandSpec, command_id: str | None) -> Session:
        """Reserve a command; nothing runs yet. The same ``command_id`` again returns what was created.

        Raises ``HostFull`` when its output could not be kept, ``LimitExceeded`` when the sandbox has too many.
        """
        if command_id is not None and command_id in self._sessions:
            known = self._sessions[command_id]
            if known.record.sandbox_id != sandbox_id or known.record.spec != spec:
                raise Conflict("That command id belongs to another command.", code="command-exists")
            return known
        self._records.check_room()
        self._make_room(sandbox_id)
        record = CommandRecord(command_id or new_id("cmd"), sandbox_id, spec, created_at=time.time())
        session = Session(record, self._records, self._grown)
        self._records.save(record)
        self._sessions[record.id] = session
        return session

    def get(self, command_id: str) -> Session:
        """Return a command, or raise ``NotFound``: unknown and too old look the same."""
        session = self._sessions.get(command_id)
        if session is None:
            raise NotFound("There is no such command.", code="command-not-found")
        return session

    def of(self, sandbox_id: str) -> list[Session]:
        """Return a sandbox's commands, the newest first."""
        found = [s for s in self._sessions.values() if s.record.sandbox_id == sandbox_id]
        return sorted(found, key=lambda session: session.record.created_at, reverse=True)

    async def start(self, session: Session, guest: Guest) -> None:
        """Start a command if it has not been. A caller that goes away meanwhile does not undo it."""
        if session.record.state is not CommandState.CREATED:
            return
        running = sum(s.record.state is CommandState.RUNNING for s in self.of(session.record.sandbox_id))
        if running >= RUNNING_MAX:
            raise LimitExceeded(
                f"{RUNNING_MAX} commands are running in the sandbox.", code="too-many-commands", limit=RUNNING_MAX
            )
        starting = self._tasks.spawn(session.start(guest), f"start {session.id}")
        if starting is not None:
            await asyncio.shield(starting)

    def sweep(self) -> None:
        """Forget what ended longer ago than the replay time, and what was never used."""
        now = time.time()
        for session in list(self._sessions.values()):
            record = session.record
            if record.state is CommandState.CREATED and not session.attached:
                old = now - record.created_at > max(self._replay_s, UNUSED_S_MIN)
            else:
                old = record.ended_at is not None and now - record.ended_at > self._replay_s and not session.attached
            if old:
                self._forget(session, NotFound("The command's output is no longer kept.", code="command-not-found"))

    def inherit(self, sandbox_id: str, origins: Mapping[str, CommandRecord], welcome: Welcome) -> dict[str, str]:
        """Make commands of this sandbox of those that run in its guest, which is a copy of another's; return their new
        ids by those that the guest knows. ``origins`` are the commands of the other; nothing else goes on.
        """
        names: dict[str, str] = {}
        taken: set[int] = set()
        for listed in welcome["commands"]:
            origin, places = origins.get(listed["id"]), listed["streams"]
            numbers = {name: place["number"] for name, place in places.items()}
            if origin is None or listed["state"] != "running" or not _fitting(origin.spec, numbers, taken):
                continue
            taken |= set(numbers.values())
            record = CommandRecord(
                new_id("cmd"),
                sandbox_id,
                origin.spec,
                created_at=time.time(),
                state=CommandState.RUNNING,
                numbers=numbers,
                boot_id=welcome["boot_id"],
                started_at=origin.started_at or origin.created_at,
                pid=listed["pid"],
                forked_from=origin.id,
            )
            self._records.save(record)
            starts = {name: place["acked"] for name, place in places.items()}
            self._sessions[record.id] = Session(record, self._records, self._grown, starts)
            names[origin.id] = record.id
        return names

    # --- runs

    def add_run(self, run: Run) -> None:
        """Take note of a run, or raise ``LimitExceeded`` when its sandbox has too many."""
        count = sum(known.guest is run.guest for known in self._runs.values())
        if count >= RUNS_MAX:
            raise LimitExceeded(f"{RUNS_MAX} programs are being run by exec.", code="too-many-execs", limit=RUNS_MAX)
        self._runs[run.id] = run

    def give_up_run(self, run: Run) -> None:
        """A run whose start failed or whose client is gone; should it run all the same, it is killed."""
        if self._runs.pop(run.id, None) is not None:
            run.kill()
            run.finish(Exit(ExitKind.LOST))

    def give_up_runs_of(self, guest: Guest) -> None:
        """Nobody is going to find out what became of this guest."""
        for run in [run for run in self._runs.values() if run.guest is guest]:
            self._runs.pop(run.id).finish(Exit(ExitKind.LOST))

    # --- guests come and go

    def on_welcome(self, guest: Guest, welcome: Welcome, *, copied: bool = False) -> None:
        """Go on with every command the guest has, kill the runs of a client long gone, and settle what it lacks.

        A guest that is ``copied`` from another's may yet know commands by the ids they had there; what else it has is
        none of this sandbox's and is forgotten when it is awakened.
        """
        listed = {guest.names.get(command["id"], command["id"]): command for command in welcome["commands"]}
        for session in self.of(guest.machine):
            if session.record.state is CommandState.RUNNING:
                known = listed.pop(session.id, None)
                if known is None:
                    session.absent(guest)
                else:
                    session.resume(guest, known["streams"], known["pid"])
        for run in [run for run in self._runs.values() if run.guest is guest]:
            known = listed.pop(run.id, None)
            if known is None:
                self._runs.pop(run.id).finish(Exit(ExitKind.LOST))
            else:
                run.resume(known["streams"])
        for command_id, command in listed.items() if not copied else ():
            if command["state"] == "running" and command_id not in self._sessions:
                guest.tell("signal", {"id": command_id, "signal": SIGKILL, "tree": True})
            guest.tell("forget", {"id": command_id})

    def on_exit(self, guest: Guest, fields: dict[str, Any]) -> None:
        """A command of that guest ended. Ids of another guest's commands mean nothing here."""
        end = Exit(ExitKind(fields["kind"]), fields["code"], fields["signal"])
        told: str = fields["id"]
        command_id = guest.names.get(told, told)
        run = self._runs.get(command_id)
        session = self._sessions.get(command_id)
        if run is not None and run.guest is guest:
            del self._runs[run.id]
            run.finish(end)
        elif session is not None and session.record.sandbox_id == guest.machine and not session.ended:
            session.finish(end)
        else:
            guest.tell("forget", {"id": fields["id"]})

    def machine_lost(self, sandbox_id: str, cause: str | None = None) -> None:
        """The machine is gone, for the broker's ``cause``, with all that ran in it; what was only created stays."""
        kind = ExitKind.OOM_KILLED if cause == "oom-killed" else ExitKind.LOST
        for session in self.of(sandbox_id):
            session.lose(kind)
        for run in [run for run in self._runs.values() if run.guest.machine == sandbox_id]:
            del self._runs[run.id]
            run.finish(Exit(kind))

    def forget_sandbox(self, sandbox_id: str) -> None:
        """The sandbox is deleted: nothing of it is kept, and who is attached is told."""
        self.machine_lost(sandbox_id)
        for session in self.of(sandbox_id):
            self._forget(session, NotFound("The sandbox was deleted.", code="sandbox-deleted"))

    def alive(self, sandbox_id: str) -> list[CommandRecord]:
        """Return the records of the commands that run in a sandbox."""
        return [s.record for s in self.of(sandbox_id) if s.record.state is CommandState.RUNNING]

    def sandboxes(self) -> set[str]:
        return {session.record.sandbox_id for session in self._sessions.values()}

    def running(self, sandbox_id: str) -> int:
        """How many commands and runs are alive in a sandbox."""
        sessions = sum(s.record.state is CommandState.RUNNING for s in self.of(sandbox_id))
        return sessions + sum(run.guest.machine == sandbox_id for run in self._runs.values())

    def counts(self) -> dict[str, int]:
        running = sum(s.record.state is CommandState.RUNNING for s in self._sessions.values())
        return {"commands": len(self._sessions), "commands_running": running + len(self._runs)}

    def _forget(self, session: Session, error: SpaceError) -> None:
        sandbox_id = session.record.sandbox_id
        del self._sessions[session.id]
        self._kept[sandbox_id] -= session.kept_bytes
        if self._kept[sandbox_id] <= 0:
            del self._kept[sandbox_id]
        session.discard(error)

    def _make_room(self, sandbox_id: str) -> None:
        known = self.of(sandbox_id)
        if len(known) < SESSIONS_MAX:
            return
        if not self._forget_oldest(known):
            raise LimitExceeded(
                f"The sandbox has {SESSIONS_MAX} commands, none of which has ended.",
                code="too-many-commands",
                limit=SESSIONS_MAX,
            )

    def _grown(self, sandbox_id: str, count: int) -> None:
        """Count output that was kept; beyond the bound old commands are forgotten, or ``LimitExceeded`` is raised."""
        self._kept[sandbox_id] += count
        while self._kept[sandbox_id] > KEPT_BYTES_MAX:
            if not self._forget_oldest(self.of(sandbox_id)):
                raise LimitExceeded(
                    "The sandbox's running commands have more output kept than a sandbox may.",
                    code="too-much-output",
                    limit_mib=KEPT_BYTES_MAX // (1024 * 1024),
                )

    def _forget_oldest(self, known: list[Session]) -> bool:
        """Forget the oldest command that has ended and nobody reads; False when there is none."""
        ended = [s for s in known if s.ended and not s.attached]
        if ended:
            self._forget(ended[-1], NotFound("The command made room for newer ones.", code="command-not-found"))
        return bool(ended)


def _fitting(spec: CommandSpec, numbers: Mapping[str, int], taken: set[int]) -> bool:
    """Whether a guest's word for a command's streams can be true: those that it must have, on numbers of their own."""
    outputs = {"tty"} if spec.tty is not None else {"stdout", "stderr"}
    if not outputs <= numbers.keys() <= outputs | {"stdin"} or taken & set(numbers.values()):
        return False
    shared = spec.tty is not None and "stdin" in numbers
    return len(set(numbers.values())) == len(numbers) - shared and (not shared or numbers["stdin"] == numbers["tty"])

"""Machines of this node: lifecycle through the broker, one guest channel each, and whether the guest is ready.

The broker says what a machine is; what is kept here beside it is what its guest has to be told at boot and how far that
got. Every call may be repeated after a crash and then finishes what was begun. Calls for one machine take turns.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from space.errors import Conflict, HostError, MachineLost, NotFound, SpaceError, Unavailable
from space.model.command import ExitKind
from space.node.broker import BrokerClient
from space.node.commands import Commands
from space.node.events import Events
from space.node.guests import Guest
from space.node.machine import Machine, Phases
from space.node.records import BOOTING, READY, SUSPENDED, SUSPENDING, MachineRecords
from space.node.tasks import Tasks

if TYPE_CHECKING:
    from space.protocol.messages import Welcome

log = structlog.get_logger(__name__)

QUICK_S = 30.0
BOOT_S = 120.0
IMAGE_S = 600.0
"""Suspend and wake write and read whole memory images."""
QUIESCE_S = 60.0
ENTROPY_BYTES = 64
ADOPT_PAUSE_S = 0.5
DYING_S = 5.0
DYING_PAUSE_S = 0.05


class Machines:
    """All machines. ``adopt`` finds those that run already; the rest are lifecycle calls."""

    def __init__(
        self,
        *,
        broker: BrokerClient,
        channels: Path,
        records: MachineRecords,
        commands: Commands,
        tasks: Tasks,
        events: Events,
        driver: str,
    ) -> None:
        self._broker = broker
        self._channels = channels
        self._records = records
        self._commands = commands
        self._tasks = tasks
        self._events = events
        self._driver = driver
        self._machines: dict[str, Machine] = {}
        self.adopted = False

    # --- looking

    def known(self, machine_id: str) -> Machine:
        """Return a machine of this node, or raise ``NotFound`` (``Unavailable`` while they are being looked for)."""
        machine = self._machines.get(machine_id)
        if machine is None or machine.state == "absent":
            if not self.adopted:
                raise Unavailable("The node is still looking for its machines.", code="not-ready")
            raise NotFound("There is no such sandbox on this node.", code="sandbox-not-found")
        return machine

    @contextmanager
    def in_use(self, machine_id: str) -> Generator[None]:
        """Count a client of the machine while the block lasts; a machine with clients is not idle."""
        machine = self._machines.get(machine_id)
        if machine is None:
            yield
            return
        machine.clients += 1
        machine.active_at = time.time()
        try:
            yield
        finally:
            machine.clients -= 1
            machine.active_at = time.time()

    def runs(self, machine_id: str) -> bool:
        """Whether the machine runs, so that time passes in it."""
        machine = self._machines.get(machine_id)
        return machine is not None and machine.state == "running"

    def guest(self, machine_id: str) -> Guest:
        """Return the guest of a running, ready machine.

        Raises ``NotFound`` when there is no such machine, ``Conflict`` (``wrong-state``) when it does not run, and
        ``Unavailable`` while its guest is not ready.
        """
        machine = self.known(machine_id)
        if machine.state != "running":
            raise Conflict(f"The sandbox is {machine.state}.", code="wrong-state", state=machine.state)
        if machine.guest is None or not machine.ready:
            raise Unavailable("The sandbox's guest agent is not ready.", code="not-ready")
        return machine.guest

    def counts(self) -> dict[str, int]:
        return {"machines": len(self._machines), "machines_ready": sum(m.ready for m in self._machines.values())}

    def close(self) -> None:
        """Close all channels; the machines go on."""
        for machine in self._machines.values():
            if machine.guest is not None:
                machine.guest.detach()

    async def inspect(self, machine_id: str) -> dict[str, Any]:
        """Return the broker's view of a machine with what the node knows beside it."""
        seen = await self._broker.call("inspect", timeout_s=QUICK_S, machine=machine_id)
        return self._describe(seen)

    async def list(self) -> list[dict[str, Any]]:
        seen = await self._broker.call("machines", timeout_s=QUICK_S)
        return [self._describe(machine) for machine in _rows(seen, "machines")]

    def _describe(self, seen: dict[str, Any]) -> dict[str, Any]:
        machine = self._machines.get(str(seen.get("machine")))
        if machine is None:
            return {**seen, "ready": False, "commands_running": 0, "clients": 0, "active_at": None}
        return {
            **seen,
            "ready": machine.ready and seen.get("state") == "running",
            "commands_running": self._commands.running(machine.id),
            "clients": machine.clients,
            "active_at": machine.active_at,
        }

    # --- lifecycle

    async def boot(self, machine_id: str, request: dict[str, Any]) -> dict[str, Any]:
        """Boot a new machine and make its guest ready; a machine that is ready already stays as it is."""
        fields = {name: request[name] for name in ("template", "resources", "hostname")}
        fields["driver"] = request["driver"] or self._driver
        return await self._bring_up(machine_id, "boot", request, fields)

    async def start(self, machine_id: str, request: dict[str, Any] | None) -> dict[str, Any]:
        """Boot a stopped machine afresh on its disk. Without ``request`` what was last told about it holds."""
        return await self._bring_up(machine_id, "start", request, {})

    async def pause(self, machine_id: str, _request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Let the machine's CPUs stand still."""
        async with self._turn(machine_id, "pausing") as (machine, phases):
            phases.add(await self._broker.call("pause", timeout_s=QUICK_S, machine=machine_id))
            phases.mark("pause")
            machine.state = "paused"
        return self._answer(machine, phases)

    async def resume(self, machine_id: str, _request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Let the machine's CPUs go on. A guest that this node has not met yet is greeted and made ready."""
        async with self._turn(machine_id, "resuming") as (machine, phases):
            phases.add(await self._broker.call("resume", timeout_s=QUICK_S, machine=machine_id))
            phases.mark("resume")
            await self._make_ready(machine, phases)
            machine.state = "running"
        return self._answer(machine, phases)

    async def suspend(self, machine_id: str, _request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Have the guest quiesce, write its memory, and end the machine. If that fails, the machine goes on."""
        async with self._turn(machine_id, "suspending") as (machine, phases):
            was_paused = await self._thaw(machine, phases)
            guest = machine.guest
            try:
                if guest is not None:
                    self._records.note(machine_id, SUSPENDING)
                    await guest.request("quiesce", timeout_s=QUIESCE_S)
                    phases.mark("quiesce")
                    guest.detach()
                phases.add(await self._broker.call("suspend", timeout_s=IMAGE_S, machine=machine_id))
            except SpaceError:
                if guest is not None:
                    # A guest that is only slow quiesces yet, and then says nothing before it is greeted anew.
                    guest.detach()
                    await self._unsuspend(machine, phases, pause=was_paused)
                raise
            phases.mark("suspend")
            self._records.note(machine_id, SUSPENDED)
            machine.state, machine.ready = "suspended", False
        return self._answer(machine, phases)

    async def wake(self, machine_id: str, _request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Restore a suspended machine; its user processes go on once the guest has new time and entropy."""
        async with self._turn(machine_id, "waking") as (machine, phases):
            phases.add(await self._broker.call("wake", timeout_s=IMAGE_S, machine=machine_id))
            phases.mark("wake")
            await self._make_ready(machine, phases)
            machine.state = "running"
        return self._answer(machine, phases)

    async def stop(self, machine_id: str, _request: dict[str, Any] | None = None) -> dict[str, Any]:
        """End the machine and keep its disk. Files are synced first where the guest still answers."""
        async with self._turn(machine_id, "stopping") as (machine, phases):
            guest = machine.guest
            if guest is not None and machine.spoken_with:
                try:
                    await guest.request("quiesce", timeout_s=QUIESCE_S / 4)
                except SpaceError as error:
                    log.warning("guest did not sync before stop", machine=machine_id, code=error.code)
                phases.mark("quiesce")
            self._part(machine, MachineLost("The sandbox was stopped.", code="machine-stopped"))
            phases.add(await self._broker.call("stop", timeout_s=QUICK_S, machine=machine_id))
            phases.mark("stop")
            self._commands.machine_lost(machine_id)
            machine.state = "stopped"
        return self._answer(machine, phases)

    async def destroy(self, machine_id: str) -> dict[str, Any]:
        """Leave nothing of the machine, here or at the broker. Unknown machines are destroyed already."""
        async with self._turn(machine_id, "deleting") as (machine, phases):
            self._part(machine, MachineLost("The sandbox was deleted.", code="sandbox-deleted"))
            phases.add(await self._broker.call("destroy", timeout_s=BOOT_S, machine=machine_id))
            phases.mark("destroy")
            self._commands.forget_sandbox(machine_id)
            self._records.remove(machine_id)
            machine.state = "absent"
            self._machines.pop(machine_id, None)
        return self._answer(machine, phases)

    # --- after a restart of the node

    async def adopt(self) -> None:
        """Find the machines that outlived the last node and open their channels; forget what belongs to none."""
        while True:
            try:
                seen = _rows(await self._broker.call("machines", timeout_s=QUICK_S), "machines")
                break
            except SpaceError as error:
                log.warning("machines cannot be listed yet", code=error.code)
                await asyncio.sleep(ADOPT_PAUSE_S)
        known = {str(row["machine"]): row for row in seen if row.get("state") != "absent"}
        for gone in (self._commands.sandboxes() | set(self._records.names())) - set(known):
            self._commands.forget_sandbox(gone)
            self._records.remove(gone)
        await asyncio.gather(*(self._adopt_one(machine_id, row) for machine_id, row in known.items()))
        self.adopted = True

    async def _adopt_one(self, machine_id: str, seen: dict[str, Any]) -> None:
        machine = self._machines.setdefault(machine_id, Machine(machine_id))
        async with machine.turn:
            machine.state, machine.cause = str(seen.get("state")), seen.get("cause")
            if machine.state in {"stopped", "exited"}:
                self._commands.machine_lost(machine_id)
            if machine.state != "running":
                return
            try:
                await self._greet(machine, Phases())
            except SpaceError as error:
                log.warning("guest of a running machine does not answer", machine=machine_id, code=error.code)
                return
            machine.ready = self._records.phase(machine_id) == READY

    # --- the guest's channel (GuestOwner)

    def on_welcome(self, guest: Guest, welcome: Welcome) -> None:
        self._commands.on_welcome(guest, welcome)

    def on_exit(self, guest: Guest, fields: dict[str, Any]) -> None:
        machine = self._machines.get(guest.machine)
        if machine is not None:
            machine.active_at = time.time()
        self._commands.on_exit(guest, fields)

    def on_lost(self, guest: Guest, cause: str) -> None:
        machine = self._machines.get(guest.machine)
        if machine is None or machine.guest is not guest:
            return
        machine.ready = False
        log.warning("guest lost", machine=machine.id, cause=cause)
        self._tasks.spawn(self._find_cause(machine, guest, cause), f"cause {machine.id}")

    async def _find_cause(self, machine: Machine, guest: Guest, cause: str) -> None:
        """Ask the broker what became of a machine whose channel closed, and tell everybody."""
        async with machine.turn:
            if machine.guest is not guest:
                return
            seen = await self._look_after_end(machine, cause)
            machine.guest = None
            if seen.get("state") == "running":
                # The machine is there, but its agent is not to be spoken with.
                self._events.publish({"machine": machine.id, "event": "guest-lost", "cause": cause})
            else:
                machine.state = str(seen.get("state") or "exited")
                machine.cause = seen.get("cause") or cause
                self._events.publish({"machine": machine.id, "event": "exited", "cause": machine.cause})
            oom = machine.cause == "oom-killed"
            self._commands.machine_lost(machine.id, ExitKind.OOM_KILLED if oom else ExitKind.LOST)

    async def _look_after_end(self, machine: Machine, cause: str) -> dict[str, Any]:
        """Inspect a machine. One whose channel reached its end is dying: it closes its files before it is seen dead."""
        deadline = time.monotonic() + DYING_S
        while True:
            try:
                seen = await self._broker.call("inspect", timeout_s=QUICK_S, machine=machine.id)
            except SpaceError as error:
                log.warning("machine cannot be inspected", machine=machine.id, code=error.code)
                return {}
            if cause != "machine-exited" or seen.get("state") != "running" or time.monotonic() > deadline:
                return seen
            await asyncio.sleep(DYING_PAUSE_S)

    # --- private

    @asynccontextmanager
    async def _turn(self, machine_id: str, passing: str) -> AsyncGenerator[tuple[Machine, Phases]]:
        """Take the machine's turn. While it lasts the data plane sees ``passing``; a failure asks the broker anew."""
        machine = self._machines.setdefault(machine_id, Machine(machine_id))
        async with machine.turn:
            phases = Phases()
            machine.state = passing
            try:
                yield machine, phases
            except BaseException:
                self._tasks.spawn(self._look(machine), f"look {machine_id}")
                raise

    async def _look(self, machine: Machine) -> None:
        """After a failure: take the machine's state from the broker."""
        async with machine.turn:
            try:
                seen = await self._broker.call("inspect", timeout_s=QUICK_S, machine=machine.id)
            except SpaceError as error:
                log.warning("machine cannot be inspected", machine=machine.id, code=error.code)
                return
            machine.state = str(seen.get("state"))
            machine.cause = seen.get("cause")
            if machine.state == "absent":
                self._machines.pop(machine.id, None)

    async def _bring_up(
        self, machine_id: str, verb: str, request: dict[str, Any] | None, fields: dict[str, Any]
    ) -> dict[str, Any]:
        async with self._turn(machine_id, f"{verb}ing") as (machine, phases):
            known = request or self._records.request(machine_id)
            if known is None:
                raise NotFound("There is no such sandbox on this node.", code="sandbox-not-found")
            if not machine.spoken_with:
                self._records.save(machine_id, {"request": known, "phase": BOOTING})
            phases.add(await self._broker.call(verb, timeout_s=BOOT_S, machine=machine_id, **fields))
            phases.mark(verb)
            await self._make_ready(machine, phases)
            machine.state, machine.cause = "running", None
        return self._answer(machine, phases)

    async def _make_ready(self, machine: Machine, phases: Phases) -> None:
        """Greet the guest of a machine that runs, unless that is done, and tell it what it has not been told yet."""
        if machine.spoken_with:
            return
        await self._greet(machine, phases)
        phase = self._records.phase(machine.id)
        if phase == BOOTING:
            await self._configure(machine, phases)
        elif phase in {SUSPENDING, SUSPENDED}:
            await self._awaken(machine, phases)
        elif phase != READY:
            raise HostError("The node does not know what the sandbox's guest was told.", code="machine-unknown")
        self._records.note(machine.id, READY)
        machine.ready = True

    async def _greet(self, machine: Machine, phases: Phases) -> None:
        if machine.guest is None:
            machine.guest = Guest(machine.id, self._channels / machine.id, self)
        if not machine.guest.connected:
            await machine.guest.greet()
            phases.mark("guest")

    async def _configure(self, machine: Machine, phases: Phases) -> None:
        request = self._records.request(machine.id) or {}
        defaults: dict[str, Any] = request["defaults"]
        pids = request["resources"].get("pids")
        fields = {
            "hostname": request["hostname"],
            "env": {**defaults["env"], **request["env"]},
            "workdir": defaults["workdir"],
            "user": defaults["user"],
            "now_ns": time.time_ns(),
            "entropy": _entropy(),
            # The cgroup on the host is only the backstop: reaching that ends the machine.
            "limits": {"pids": pids if type(pids) is int else None},
        }
        await machine.present_guest().request("configure", fields)
        phases.mark("configure")

    async def _awaken(self, machine: Machine, phases: Phases) -> None:
        await machine.present_guest().request("awaken", {"now_ns": time.time_ns(), "entropy": _entropy()})
        phases.mark("awaken")

    async def _thaw(self, machine: Machine, phases: Phases) -> bool:
        """Make a paused machine able to quiesce; True when it was paused."""
        seen = await self._broker.call("inspect", timeout_s=QUICK_S, machine=machine.id)
        if seen.get("state") == "suspended":
            self._part(machine, MachineLost("The sandbox was suspended."))
            return False
        if seen.get("state") == "paused":
            await self._broker.call("resume", timeout_s=QUICK_S, machine=machine.id)
        if seen.get("state") in {"paused", "running"} and (machine.guest is None or not machine.guest.connected):
            await self._greet(machine, phases)
        phases.mark("inspect")
        return seen.get("state") == "paused"

    async def _unsuspend(self, machine: Machine, phases: Phases, *, pause: bool) -> None:
        """The memory image could not be made: let the guest go on, as it was before."""
        try:
            machine.ready = False
            await self._make_ready(machine, phases)
            if pause:
                await self._broker.call("pause", timeout_s=QUICK_S, machine=machine.id)
        except SpaceError as error:
            log.warning("machine does not go on after a failed suspend", machine=machine.id, code=error.code)

    def _part(self, machine: Machine, error: SpaceError) -> None:
        guest, machine.guest = machine.guest, None
        machine.ready = False
        if guest is not None:
            guest.close(error)

    def _answer(self, machine: Machine, phases: Phases) -> dict[str, Any]:
        return {"timings": phases.timings, "ready": machine.ready and machine.state == "running"}


def _rows(answer: Any, key: str) -> list[dict[str, Any]]:
    rows = answer.get(key) if isinstance(answer, dict) else answer
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _entropy() -> str:
    return base64.b64encode(os.urandom(ENTROPY_BYTES)).decode()

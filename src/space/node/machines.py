"""Machines of this node: lifecycle through the broker, one guest channel each, and whether the guest is ready.

The broker says what a machine is; what is kept here beside it is what its guest has to be told at boot and how far that
got. Every call may be repeated after a crash and then finishes what was begun. Calls for one machine take turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from space.errors import Conflict, MachineLost, NotFound, SpaceError, Unavailable
from space.node.adoption import QUICK_S, Adoption, rows
from space.node.boots import Boots
from space.node.broker import BrokerClient
from space.node.commands import Commands
from space.node.entries import enter_again
from space.node.events import Events
from space.node.guests import Guest
from space.node.introductions import Introductions
from space.node.machine import Machine, Phases
from space.node.places import Places
from space.node.pool import Pool
from space.node.records import SUSPENDED, SUSPENDING
from space.node.snapshots import Snapshots
from space.node.tasks import Tasks
from space.node.trust import Trust

if TYPE_CHECKING:
    from space.protocol.messages import Welcome

log = structlog.get_logger(__name__)

IMAGE_S = 930.0
"""Suspend and wake write and read whole memory images."""
DESTROY_S = 120.0
QUIESCE_S = 60.0
"""Hooks in the guest have half of this."""
SYNC_S = 15.0
"""How long a guest that is to be stopped may take to write what it has not written yet."""


class Machines:
    """All machines. ``adopt`` finds those that run already; the rest are lifecycle calls."""

    def __init__(
        self,
        *,
        broker: BrokerClient,
        places: Places,
        commands: Commands,
        tasks: Tasks,
        events: Events,
        pool: Pool,
        trust: Trust,
    ) -> None:
        self._broker = broker
        self._records = places.machines
        self._commands = commands
        self._tasks = tasks
        self._machines: dict[str, Machine] = {}
        self.trust = trust
        self._introductions = Introductions(self, places, commands, trust)
        self._boots = Boots(broker, places.machines, self._introductions, pool, self)
        self._adoption = Adoption(broker, places, commands, events, self._introductions)
        self.snapshots = Snapshots(broker, places, commands, self._introductions)
        self.adopted = False
        self.builders: set[str] = set()
        """Machines of the node's own, in which it builds templates: nobody's, and shown to nobody."""

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

    async def enter_again(self, machine_id: str) -> bool | None:
        """Start again what the template starts, where it has ended. Raises as ``guest`` and ``entries.enter_again``."""
        guest, machine = self.guest(machine_id), self.known(machine_id)
        async with machine.entering:
            with self.in_use(machine_id):
                return await enter_again(guest, (self._records.load(machine_id) or {})["request"]["defaults"])

    def counts(self) -> dict[str, int]:
        machines = self._machines.values()
        ready, clients = sum(m.ready for m in machines), sum(m.clients for m in machines)
        return {"machines": len(machines), "machines_ready": ready, "clients": clients}

    def close(self) -> None:
        """Close all channels; the machines go on."""
        for machine in self._machines.values():
            if machine.guest is not None:
                machine.guest.detach()

    async def inspect(self, machine_id: str) -> dict[str, Any]:
        """Return the broker's view of a machine with what the node knows beside it."""
        return self._describe(await self._broker.call("inspect", timeout_s=QUICK_S, machine=machine_id))

    async def list(self) -> list[dict[str, Any]]:
        """Return all machines that are somebody's."""
        seen = rows(await self._broker.call("machines", timeout_s=QUICK_S), "machines")
        somebodys = [row for row in seen if row.get("spare") is not True and row.get("machine") not in self.builders]
        return [self._describe(row) for row in somebodys]

    def activity(self) -> dict[str, dict[str, Any]]:
        """Return what is going on in each machine, from memory alone."""
        return {
            machine.id: {"state": machine.state, **self._told(machine, running=machine.state == "running")}
            for machine in self._machines.values()
            if machine.state != "absent" and machine.id not in self.builders
        }

    def note_activity(self) -> None:
        """Put on disk when each machine was last active, so that the next node knows. To be called now and then."""
        for machine in self._machines.values():
            self._records.note(machine.id, active_at=self._active_at(machine))

    def _describe(self, seen: dict[str, Any]) -> dict[str, Any]:
        machine = self._machines.get(str(seen.get("machine")))
        if machine is None:
            return {**seen, "ready": False, "commands_running": 0, "clients": 0, "active_at": None}
        told = self._told(machine, running=seen.get("state") == "running")
        return {**seen, **told, "commands_running": told["commands"]}

    def _told(self, machine: Machine, *, running: bool) -> dict[str, Any]:
        return {
            "ready": machine.ready and running,
            "commands": self._commands.running(machine.id),
            "clients": machine.clients,
            "active_at": self._active_at(machine),
        }

    def _active_at(self, machine: Machine) -> float:
        """When it was last active: now, while somebody is there or a command runs, however silent."""
        busy = machine.clients > 0 or self._commands.running(machine.id) > 0
        return time.time() if busy else machine.active_at

    # --- lifecycle

    async def boot(self, machine_id: str, request: dict[str, Any]) -> dict[str, Any]:
        """Make a new machine and its guest ready; a machine that is ready already stays as it is.

        The answer names the ``commands`` that a machine made from a snapshot goes on with.
        """
        fresh = machine_id not in self._machines
        async with self._turn(machine_id, "booting") as (machine, phases):
            await self._boots.boot(machine, phases, request, fresh=fresh and not machine.spoken_with)
        renamed = (self._records.load(machine_id) or {}).get("rename") or {}
        return {**self._answer(machine, phases), "driver": machine.driver, "commands": list(renamed.values())}

    async def start(self, machine_id: str, request: dict[str, Any] | None) -> dict[str, Any]:
        """Boot a stopped machine afresh on its disk. Without ``request`` what was last told about it holds."""
        async with self._turn(machine_id, "starting") as (machine, phases):
            known = request or self._records.request(machine_id)
            if known is None:
                raise NotFound("There is no such sandbox on this node.", code="sandbox-not-found")
            await self._boots.start(machine, phases, known)
        return self._answer(machine, phases)

    async def pause(self, machine_id: str, *, if_idle_s: float | None = None) -> dict[str, Any]:
        """Let the machine's CPUs stand still."""
        async with self._turn(machine_id, "pausing", if_idle_s) as (machine, phases):
            phases.add(await self._broker.call("pause", timeout_s=QUICK_S, machine=machine_id))
            phases.mark("pause")
            machine.state = "paused"
        return self._answer(machine, phases)

    async def resume(self, machine_id: str) -> dict[str, Any]:
        """Let the machine's CPUs go on. A guest that this node has not met yet is greeted and made ready."""
        async with self._turn(machine_id, "resuming") as (machine, phases):
            phases.add(await self._broker.call("resume", timeout_s=QUICK_S, machine=machine_id))
            phases.mark("resume")
            await self._introductions.make_ready(machine, phases)
            machine.state = "running"
        return self._answer(machine, phases)

    async def suspend(self, machine_id: str, *, if_idle_s: float | None = None) -> dict[str, Any]:
        """Have the guest quiesce, write its memory, and end the machine. If that fails, the machine goes on."""
        async with self._turn(machine_id, "suspending", if_idle_s) as (machine, phases):
            was_paused = await self._thaw(machine, phases)
            guest = machine.guest
            try:
                if guest is not None:
                    self._records.note(machine_id, phase=SUSPENDING)
                    phases.heed(await guest.request("quiesce", {"event": "suspend"}, timeout_s=QUIESCE_S))
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
            self._records.note(machine_id, phase=SUSPENDED)
            machine.state, machine.ready = "suspended", False
        return self._answer(machine, phases)

    async def wake(self, machine_id: str) -> dict[str, Any]:
        """Restore a suspended machine; its user processes go on once the guest has new time and entropy."""
        async with self._turn(machine_id, "waking") as (machine, phases):
            if not machine.spoken_with:
                self._records.note(machine_id, phase=SUSPENDED)
            phases.add(await self._broker.call("wake", timeout_s=IMAGE_S, machine=machine_id))
            phases.mark("wake")
            await self._introductions.make_ready(machine, phases)
            machine.state = "running"
        return self._answer(machine, phases)

    async def stop(self, machine_id: str, *, if_idle_s: float | None = None) -> dict[str, Any]:
        """End the machine and keep its disk. Files are synced first where the guest still answers, if need be after it
        was resumed.
        """
        async with self._turn(machine_id, "stopping", if_idle_s) as (machine, phases):
            try:
                async with asyncio.timeout(SYNC_S):
                    await self._thaw(machine, phases)
                    if machine.guest is not None and machine.guest.connected:
                        await machine.guest.request("quiesce", timeout_s=SYNC_S)
            except (SpaceError, TimeoutError) as error:
                log.warning("guest did not sync before stop", machine=machine_id, error=type(error).__name__)
            phases.mark("quiesce")
            machine.part(MachineLost("The sandbox was stopped.", code="machine-stopped"))
            phases.add(await self._broker.call("stop", timeout_s=QUICK_S, machine=machine_id))
            phases.mark("stop")
            self._commands.machine_lost(machine_id)
            machine.state = "stopped"
        return self._answer(machine, phases)

    async def destroy(self, machine_id: str, *, if_idle_s: float | None = None) -> dict[str, Any]:
        """Leave nothing of the machine, here or at the broker. Unknown machines are destroyed already."""
        async with self._turn(machine_id, "deleting", if_idle_s) as (machine, phases):
            machine.part(MachineLost("The sandbox was deleted.", code="sandbox-deleted"))
            phases.add(await self._broker.call("destroy", timeout_s=DESTROY_S, machine=machine_id))
            phases.mark("destroy")
            self._commands.forget_sandbox(machine_id)
            self._records.remove(machine_id)
            machine.state = "absent"
            self._machines.pop(machine_id, None)
        return self._answer(machine, phases)

    async def snapshot(self, machine_id: str, snapshot_id: str, kind: str) -> dict[str, Any]:
        """Keep a point in the machine's life. It is afterwards as it was, and to the outside all the while."""
        self.known(machine_id)
        async with self._turn(machine_id, None) as (machine, phases):
            taken = await self.snapshots.take(machine, phases, snapshot_id, kind)
        return {**self._answer(machine, phases), **taken}

    # --- after a restart of the node

    async def adopt(self) -> None:
        """Find the machines that outlived the last node and open their channels; forget what belongs to none."""
        await self._adoption.adopt(self._machines)
        self.adopted = True

    # --- the guests' channels (GuestOwner)

    def on_welcome(self, guest: Guest, welcome: Welcome) -> None:
        self._introductions.on_welcome(guest, welcome)

    def on_exit(self, guest: Guest, fields: dict[str, Any]) -> None:
        machine = self._machines.get(guest.machine)
        if machine is not None:
            machine.active_at = time.time()
        self._commands.on_exit(guest, fields)

    def on_lost(self, guest: Guest, cause: str) -> None:
        machine = self._machines.get(guest.machine)
        if machine is None or machine.guest is not guest:
            self._commands.give_up_runs_of(guest)
            return
        machine.ready = False
        log.warning("guest lost", machine=machine.id, cause=cause)
        self._tasks.spawn(self._adoption.find_cause(machine, guest, cause), f"cause {machine.id}")

    # --- private

    @asynccontextmanager
    async def _turn(
        self, machine_id: str, passing: str | None, if_idle_s: float | None = None
    ) -> AsyncGenerator[tuple[Machine, Phases]]:
        """Take the machine's turn. While it lasts the data plane sees ``passing``; a failure asks the broker anew."""
        machine = self._machines.setdefault(machine_id, Machine(machine_id))
        async with machine.turn:
            if if_idle_s is not None:
                self._check_idle(machine, if_idle_s)  # Before anything is touched: a refusal changes nothing.
            phases = Phases()
            machine.found, machine.state = machine.state, passing or machine.state
            try:
                if not self.adopted:  # a former node's machine may have another's body
                    machine.inhabit(await self._broker.call("inspect", timeout_s=QUICK_S, machine=machine_id))
                yield machine, phases
            except BaseException:
                self._tasks.spawn(self._look(machine), f"look {machine_id}")
                raise

    def _check_idle(self, machine: Machine, if_idle_s: float) -> None:
        """Raise ``Conflict`` unless nobody is there, no command runs, and nothing has happened for so long."""
        if not self.adopted:
            raise Unavailable("The node is still looking for its machines.", code="not-ready")
        active_at = self._active_at(machine)
        busy = machine.clients > 0 or self._commands.running(machine.id) > 0
        if busy or time.time() - active_at < if_idle_s:
            raise Conflict(
                f"The sandbox has not been idle for {if_idle_s:g} s.",
                code="not-idle",
                commands=self._commands.running(machine.id),
                clients=machine.clients,
                active_at=active_at,
            )

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
            if machine.state in {"stopped", "exited"}:
                self._commands.machine_lost(machine.id, machine.cause)
            if machine.state == "absent":
                self._machines.pop(machine.id, None)

    async def _thaw(self, machine: Machine, phases: Phases) -> bool:
        """Make a paused machine able to quiesce; True when it was paused."""
        if machine.found == "running" and machine.guest is not None and machine.guest.connected:
            return False
        seen = await self._broker.call("inspect", timeout_s=QUICK_S, machine=machine.id)
        if seen.get("state") == "suspended":
            machine.part(MachineLost("The sandbox was suspended."))
            return False
        if seen.get("state") == "paused":
            await self._broker.call("resume", timeout_s=QUICK_S, machine=machine.id)
        if seen.get("state") in {"paused", "running"} and (machine.guest is None or not machine.guest.connected):
            await self._introductions.greet(machine, phases)
        phases.mark("inspect")
        return seen.get("state") == "paused"

    async def _unsuspend(self, machine: Machine, phases: Phases, *, pause: bool) -> None:
        """The memory image could not be made: let the guest go on, as it was before."""
        try:
            machine.ready = False
            await self._introductions.make_ready(machine, phases)
            if pause:
                await self._broker.call("pause", timeout_s=QUICK_S, machine=machine.id)
        except SpaceError as error:
            log.warning("machine does not go on after a failed suspend", machine=machine.id, code=error.code)

    def _answer(self, machine: Machine, phases: Phases) -> dict[str, Any]:
        answer = {"timings": phases.timings, "ready": machine.ready and machine.state == "running"}
        return {**answer, "hooks": phases.hooks} if phases.hooks else answer

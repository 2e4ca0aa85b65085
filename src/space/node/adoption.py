"""What machines do without being asked: outlive the node that knew them, and end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import structlog

from space.errors import Conflict, SpaceError
from space.node.broker import BrokerClient
from space.node.commands import Commands
from space.node.events import Events
from space.node.guests import Guest
from space.node.introductions import Introductions
from space.node.machine import Machine, Phases
from space.node.places import Places
from space.node.records import READY, SUSPENDING

log = structlog.get_logger(__name__)

QUICK_S = 30.0
NOTE_S = 10.0
"""How often it is put on disk when machines were active. What came after the last note is taken to have been later."""
ADOPT_PAUSE_S = 0.5
DYING_S = 15.0
"""How long a machine may take to be gone whose channel has closed: on a busy host its memory takes seconds."""
DYING_PAUSE_S = 0.05


class Adoption:
    """Takes over machines of a former node, and finds out why a channel closed."""

    def __init__(
        self, broker: BrokerClient, places: Places, commands: Commands, events: Events, introductions: Introductions
    ) -> None:
        self._broker = broker
        self._places = places
        self._records = places.machines
        self._commands = commands
        self._events = events
        self._introductions = introductions

    async def adopt(self, machines: dict[str, Machine]) -> None:
        """Find the machines that outlived the last node and open their channels; forget what belongs to none."""
        while True:
            try:
                seen = rows(await self._broker.call("machines", timeout_s=QUICK_S), "machines")
                break
            except SpaceError as error:
                log.warning("machines cannot be listed yet", code=error.code)
                await asyncio.sleep(ADOPT_PAUSE_S)
        known = {
            str(row["machine"]): row for row in seen if row.get("state") != "absent" and row.get("spare") is not True
        }
        for gone in (self._commands.sandboxes() | set(self._records.names())) - set(known):
            self._commands.forget_sandbox(gone)
            self._records.remove(gone)
        for machine_id in known:
            machines.setdefault(machine_id, Machine(machine_id, self._active_at(machine_id)))
        await asyncio.gather(*(self._adopt_one(machines[machine_id], row) for machine_id, row in known.items()))
        await self._forget_snapshots()

    async def _adopt_one(self, machine: Machine, seen: dict[str, Any]) -> None:
        async with machine.turn:
            if machine.state != "absent":  # somebody has asked something of it since the list was made
                try:
                    seen = await self._broker.call("inspect", timeout_s=QUICK_S, machine=machine.id)
                except SpaceError as error:
                    log.warning("machine cannot be inspected", machine=machine.id, code=error.code)
                    return
            machine.state, machine.cause = str(seen.get("state")), seen.get("cause")
            machine.inhabit(seen)
            if machine.state in {"stopped", "exited"}:
                self._commands.machine_lost(machine.id, machine.cause)
            try:
                phase = self._records.phase(machine.id)
                if phase == SUSPENDING:
                    await self._settle(machine)
                if machine.state != "running":
                    return
                if phase == SUSPENDING:
                    await self._introductions.make_ready(machine, Phases())
                else:
                    await self._introductions.greet(machine, Phases())
            except SpaceError as error:
                log.warning("guest of a running machine does not answer", machine=machine.id, code=error.code)
                return
            machine.ready = self._records.phase(machine.id) == READY
            if (self._records.load(machine.id) or {}).get("paused") is True:
                await self._pause_again(machine)

    async def _pause_again(self, machine: Machine) -> None:
        """A machine that was let run for a snapshot only, by a node that then died, goes back to where it was."""
        try:
            await self._broker.call("pause", timeout_s=QUICK_S, machine=machine.id)
        except SpaceError as error:
            log.warning("machine is not paused again", machine=machine.id, code=error.code)
            return
        machine.state = "paused"
        self._records.note(machine.id, paused=False)

    async def _settle(self, machine: Machine) -> None:
        """Wait until the broker is done with the suspend or snapshot that a node asked for before it died.

        Such a machine runs, whatever it did before, or is suspended by now; so to resume it does nothing but wait.
        """
        with contextlib.suppress(Conflict):
            await self._broker.call("resume", timeout_s=QUICK_S, machine=machine.id)
        seen = await self._broker.call("inspect", timeout_s=QUICK_S, machine=machine.id)
        machine.state = str(seen.get("state"))

    def _active_at(self, machine_id: str) -> float:
        """When a machine was last active, as far as anybody knows: never so early that it would be idle too soon."""
        noted = (self._records.load(machine_id) or {}).get("active_at")
        now = time.time()
        return min(now, noted + 2 * NOTE_S) if isinstance(noted, int | float) else now

    async def _forget_snapshots(self) -> None:
        """Drop what was noted of snapshots that are not there any more."""
        notes = self._places.snapshots
        try:
            seen = rows(await self._broker.call("snapshots", timeout_s=QUICK_S), "snapshots")
        except SpaceError as error:
            log.warning("snapshots cannot be listed", code=error.code)
            return
        for gone in set(notes.names()) - {str(row.get("snapshot")) for row in seen}:
            notes.remove(gone)

    async def find_cause(self, machine: Machine, guest: Guest, cause: str) -> None:
        """Ask the broker what became of a machine whose channel closed, and tell everybody."""
        async with machine.turn:
            if machine.guest is not guest:
                self._commands.give_up_runs_of(guest)
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
            self._commands.machine_lost(machine.id, machine.cause)

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


def rows(answer: Any, key: str) -> list[dict[str, Any]]:
    """Return the objects of a broker's list, which stands alone or under ``key``."""
    found = answer.get(key) if isinstance(answer, dict) else answer
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []

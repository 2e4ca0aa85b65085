"""Keeping points in the lives of machines. A machine goes on afterwards as if nothing had happened."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import structlog

from space.errors import SpaceError
from space.node.adoption import QUICK_S, rows
from space.node.broker import BrokerClient
from space.node.commands import Commands
from space.node.introductions import Introductions
from space.node.machine import Machine, Phases
from space.node.places import Places
from space.node.records import SUSPENDING

log = structlog.get_logger(__name__)

TAKE_S = 930.0
DROP_S = 120.0
QUIESCE_S = 60.0
FULL = "full"


class Snapshots:
    """Takes snapshots of machines, and knows which commands ran in them."""

    def __init__(self, broker: BrokerClient, places: Places, commands: Commands, introductions: Introductions) -> None:
        self._broker = broker
        self._records = places.machines
        self._notes = places.snapshots
        self._commands = commands
        self._introductions = introductions

    async def take(self, machine: Machine, phases: Phases, snapshot: str, kind: str) -> dict[str, Any]:
        """Take a snapshot in the machine's turn; return ``bytes`` and the ids of the ``commands`` that run in it.

        The guest of a machine that runs, or is paused, quiesces for it. Its channel stays as it is and it is awakened
        on the same connection: transfers go on, and what is asked of it meanwhile waits.
        """
        awake = await self._guest_is_up(machine, phases)
        try:
            if awake:
                await self._quiesce(machine, phases)
            commands = self._notes.save(snapshot, self._commands.alive(machine.id)) if kind == FULL else []
        except BaseException:
            if awake:
                await self._go_on(machine, phases)
            raise
        taken = asyncio.Event()
        keeping = self._keep(machine, snapshot, kind, taken)
        if not awake:
            answer = await keeping
        else:
            # The guest goes on while the broker still makes safe what it has taken, and also when that fails.
            results = await asyncio.gather(keeping, self._go_on(machine, phases, taken), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            answer = cast("dict[str, Any]", results[0])
        phases.add(answer)
        phases.mark("keep" if awake else "snapshot")
        return {"bytes": answer.get("bytes"), "commands": commands}

    async def _keep(self, machine: Machine, snapshot: str, kind: str, taken: asyncio.Event) -> dict[str, Any]:
        """Have the broker keep the machine; ``taken`` is set when that is over or the machine runs again."""
        fields = {"machine": machine.id, "snapshot": snapshot, "kind": kind}
        try:
            return await self._broker.call("snapshot", timeout_s=TAKE_S, noted=taken, **fields)
        except SpaceError:
            self._notes.remove(snapshot)
            raise
        finally:
            taken.set()

    async def drop(self, snapshot: str) -> None:
        """Leave nothing of a snapshot. Machines made from it live on."""
        await self._broker.call("drop-snapshot", timeout_s=DROP_S, snapshot=snapshot)
        self._notes.remove(snapshot)

    async def list(self) -> list[dict[str, Any]]:
        return rows(await self._broker.call("snapshots", timeout_s=QUICK_S), "snapshots")

    async def _guest_is_up(self, machine: Machine, phases: Phases) -> bool:
        """Have the guest of a machine that has one ready to quiesce, a paused one included; False: it has none."""
        if machine.state not in {"running", "paused"}:
            return False
        if machine.state == "paused":
            # Whoever comes after a node that dies now must know that this machine is not to run.
            self._records.note(machine.id, paused=True)
            await self._broker.call("resume", timeout_s=QUICK_S, machine=machine.id)
        try:
            await self._introductions.make_ready(machine, phases)
        except SpaceError:
            await self._pause_again(machine)
            raise
        return True

    async def _quiesce(self, machine: Machine, phases: Phases) -> None:
        self._records.note(machine.id, phase=SUSPENDING)
        guest = machine.present_guest()
        try:
            phases.heed(await guest.request("quiesce", {"event": "snapshot"}, timeout_s=QUIESCE_S))
        except SpaceError:
            # It may only be slow, and will then say nothing before it is greeted anew.
            guest.detach()
            raise
        phases.mark("quiesce")

    async def _go_on(self, machine: Machine, phases: Phases, taken: asyncio.Event | None = None) -> None:
        """Awaken the guest, once it is taken; where that fails on the connection as it is, on a new one."""
        if taken is not None:
            await taken.wait()
            phases.mark("snapshot")
        try:
            await self._introductions.awaken(machine, phases)
        except SpaceError as error:
            log.warning("guest is greeted anew after a snapshot", machine=machine.id, code=error.code)
            machine.ready = False
            if machine.guest is not None:
                machine.guest.detach()
            await self._introductions.make_ready(machine, phases)
        await self._pause_again(machine)

    async def _pause_again(self, machine: Machine) -> None:
        if machine.state == "paused":
            await self._broker.call("pause", timeout_s=QUICK_S, machine=machine.id)
            self._records.note(machine.id, paused=False)

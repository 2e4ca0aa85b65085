"""How a machine comes up: as a spare that was waiting, restored from a snapshot, or booted; whichever is quickest."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from space.errors import Conflict, HostError, HostFull, InvalidRequest, MachineLost, OutcomeUnknown, SpaceError
from space.node.broker import BrokerClient
from space.node.guests import GuestOwner
from space.node.introductions import Introductions, configure
from space.node.machine import Machine, Phases
from space.node.pool import Pool
from space.node.records import MachineRecords
from space.node.spares import Spare

log = structlog.get_logger(__name__)

BOOT_S = 120.0
CLAIM_S = 5.0
READY_S = 60.0
"""A whole system that boots has so long until its agent answers; on emulated processors it takes seconds."""


class Boots:
    """Brings machines up and makes their guests ready. Each call is made in the machine's turn."""

    def __init__(
        self,
        broker: BrokerClient,
        records: MachineRecords,
        introductions: Introductions,
        pool: Pool,
        owner: GuestOwner,
    ) -> None:
        self._broker = broker
        self._records = records
        self._introductions = introductions
        self._pool = pool
        self._owner = owner

    async def boot(self, machine: Machine, phases: Phases, request: dict[str, Any], *, fresh: bool) -> None:
        """Bring up a machine. One that is not ``fresh`` may be there already, from a call that was cut short."""
        fields = {name: request[name] for name in ("template", "resources", "hostname")}
        fields["driver"] = machine.driver = await self._driver(request)
        if request.get("volumes"):
            fields["volumes"] = request["volumes"]
        if not machine.spoken_with:
            self._records.begin(machine.id, request)
        with self._pool.foreground():
            if not fresh and await self._is_up(machine, phases):
                await self._make_ready(machine, phases, restored=request.get("snapshot") is not None)
            elif (snapshot := request.get("snapshot")) is not None:
                await self._bring_up(machine, phases, {**fields, "snapshot": snapshot})
            elif request.get("builder") or request.get("volumes"):
                await self._bring_up(machine, phases, fields)  # no spare is ever kept for one
            else:
                await self._boot_fresh(machine, phases, fields)
        machine.state, machine.cause = "running", None

    async def start(self, machine: Machine, phases: Phases, request: dict[str, Any]) -> None:
        """Boot a stopped machine afresh on its disk."""
        if not machine.spoken_with:
            self._records.begin(machine.id, {**request, "snapshot": None})
        with self._pool.foreground():
            answer = await self._broker.call("start", timeout_s=BOOT_S, machine=machine.id)
            machine.inhabit(answer)
            phases.add(answer)
            phases.mark("start")
            await self._introductions.make_ready(machine, phases)
        machine.state, machine.cause = "running", None

    async def _driver(self, request: dict[str, Any]) -> str:
        drivers, named = self._pool.drivers, request["driver"]
        if request.get("builder"):
            return await drivers.for_builds(named)
        if request.get("volumes"):
            return await drivers.for_volumes(named)
        return named or await drivers.default()

    async def _boot_fresh(self, machine: Machine, phases: Phases, fields: dict[str, Any]) -> None:
        shape = await self._pool.drivers.shape(fields["template"], fields["driver"], fields["resources"])
        spare = self._pool.take(shape, (self._records.request(machine.id) or {}).get("defaults") or {})
        if spare is not None and await self._claim(machine, phases, spare, fields):
            self._pool.took(shape, "claims", phases.timings["claim"])
            return
        warm = self._pool.warm(shape)
        if warm is not None:
            try:
                await self._bring_up(machine, phases, {**fields, "snapshot": warm})
            except (HostFull, OutcomeUnknown, Conflict):
                raise  # A boot would meet the same.
            except SpaceError as error:
                log.warning("warm-snapshot-failed", machine=machine.id, code=error.code)
                if not isinstance(error, InvalidRequest):
                    self._pool.distrust(shape)
                await self._give_up(machine)
            else:
                self._pool.took(shape, "restores")
                return
        await self._bring_up(machine, phases, fields)
        self._pool.took(shape, "boots")

    async def _make_ready(self, machine: Machine, phases: Phases, *, restored: bool) -> None:
        """Make a guest ready. Where it was booted and never answers, that is the host's fault, which the broker can
        explain; nothing is left of the machine.
        """
        try:
            await self._introductions.make_ready(machine, phases, READY_S)
        except MachineLost as error:
            if restored or (machine.guest is not None and machine.guest.boot_id is not None):
                raise
            failure = await self._not_ready(machine, error)
            await self._give_up(machine)
            raise failure from error

    async def _not_ready(self, machine: Machine, error: MachineLost) -> HostError:
        log.warning("guest-not-ready", machine=machine.id, code=error.code)
        what = "did not answer in time" if error.code == "guest-unresponsive" else "ended before it had answered"
        reason = "What it said is in the broker's log."
        driver = machine.driver
        try:
            seen = await self._broker.call("inspect", timeout_s=CLAIM_S, machine=machine.id)
            driver = seen.get("driver") or driver
            told = await self._pool.drivers.told()
            reason = next((one["reason"] for one in told["drivers"] if one["name"] == driver), "") or reason
        except SpaceError as other:
            log.warning("driver-not-explained", code=other.code)
        return HostError(
            f"The machine was started, but the system in it {what}. {reason}",
            code="guest-not-ready",
            driver=driver,
        )

    async def _is_up(self, machine: Machine, phases: Phases) -> bool:
        """Whether a machine that was asked for before runs already, in whichever way it came up."""
        seen = await self._broker.call("inspect", timeout_s=CLAIM_S, machine=machine.id)
        phases.mark("inspect")
        machine.inhabit(seen)
        machine.driver = seen.get("driver") or machine.driver
        return seen.get("state") == "running"

    async def _bring_up(self, machine: Machine, phases: Phases, fields: dict[str, Any]) -> None:
        try:
            answer = await self._broker.call("boot", timeout_s=BOOT_S, machine=machine.id, **fields)
        except HostFull:
            # Spares are there for this, not instead of it.
            if not await self._pool.make_way():
                raise
            answer = await self._broker.call("boot", timeout_s=BOOT_S, machine=machine.id, **fields)
        machine.inhabit(answer)
        phases.add(answer)
        phases.mark("boot")
        await self._make_ready(machine, phases, restored=answer.get("restored") is True)

    async def _claim(self, machine: Machine, phases: Phases, spare: Spare, fields: dict[str, Any]) -> bool:
        """Make a spare the machine, at the broker and in its guest at once. False: nothing is left of either."""
        guest = spare.guest
        guest.hand_over(machine.id, self._owner)
        known = self._records.load(machine.id) or {}
        claimed, configured = await asyncio.gather(
            self._broker.call(
                "claim",
                timeout_s=CLAIM_S,
                machine=machine.id,
                spare=spare.id,
                resources=fields["resources"],
                hostname=fields["hostname"],
            ),
            configure(guest, known, timeout_s=CLAIM_S),
            return_exceptions=True,
        )
        errors = [one for one in (claimed, configured) if isinstance(one, BaseException)]
        machine.inhabit(claimed)
        if not errors and machine.body == spare.id and guest.connected:
            phases.add(claimed)
            phases.mark("claim")
            machine.guest = guest
            self._introductions.done(machine)
            return True
        codes = [error.code if isinstance(error, SpaceError) else repr(error) for error in errors]
        log.warning("claim-failed", machine=machine.id, spare=spare.id, codes=codes)
        # First the spare: once that is gone, no claim that is late makes it the machine.
        await self._pool.end(spare)
        await self._give_up(machine)
        for error in errors:
            if not isinstance(error, SpaceError):
                raise error
        return False

    async def _give_up(self, machine: Machine) -> None:
        """Leave nothing of what did not become the machine."""
        machine.part(OutcomeUnknown("The machine was given up."))
        machine.body = machine.id
        await self._broker.call("destroy", timeout_s=BOOT_S, machine=machine.id)

"""Machines whose disks the host had no more room for: they stand still where they were writing, and lose nothing. Here
they are let go on again and again, until there is room for what they write.
"""

import asyncio

import structlog

from space import tracing
from space.broker.journal import Entry, Phase
from space.broker.machines import Machines
from space.drivers.base import MachineState, Need
from space.errors import SpaceError

EVERY_S = 5.0
TRY_S = 30.0
AT_ONCE = 8

log = structlog.get_logger()


async def watch(machines: Machines) -> None:
    """Look again and again, without end."""
    while True:
        await asyncio.sleep(EVERY_S)
        tracing.begin()
        await look(machines)


async def look(machines: Machines) -> None:
    """Look once at each machine that runs and writes its own disk, and let go on what stands still."""
    turns = asyncio.Semaphore(AT_ONCE)
    watched = [entry for entry in machines.entries.values() if _may_stall(machines, entry)]
    machines.stalled &= {entry.body for entry in watched}

    async def one(entry: Entry) -> None:
        async with turns:
            try:
                await _look_at(machines, entry)
            except (SpaceError, OSError) as error:
                log.warning("not-looked-at", machine=entry.machine, reason=str(error))

    await asyncio.gather(*(one(entry) for entry in watched))


async def _look_at(machines: Machines, entry: Entry) -> None:
    if machines.is_locked(entry.machine):
        return  # a request is at work on it: the next time will do
    async with machines.locked(entry.machine, TRY_S):
        now = machines.entries.get(entry.machine)
        if now is None or now.body != entry.body or not _may_stall(machines, now):
            return
        driver = machines.driver(now.driver)
        stands = (await driver.inspect(now.body)).state is MachineState.STALLED
        known = now.body in machines.stalled
        if stands:
            machines.stalled.add(now.body)
            await machines.host.resume(now.body, driver)
        else:
            machines.stalled.discard(now.body)
        if stands and not known:
            log.error("machine-stalled", machine=now.machine, reason="there is no room for what it writes to its disk")
        elif known and not stands:
            log.info("machine-goes-on", machine=now.machine)


def _may_stall(machines: Machines, entry: Entry) -> bool:
    driver = machines.drivers.get(entry.driver)
    return entry.phase is Phase.RUNNING and driver is not None and Need.BLOCKS in driver.capabilities.needs

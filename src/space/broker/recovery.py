"""What a broker does first: believe the journals, look at the host, and make both tell the same story.

`settle` brings one machine that a crash or a failure left between two phases to rest; `recover` does so for all, and
then removes whatever carries the installation's names but belongs to no machine.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from space.broker.journal import RESIDENT, Entry, Phase
from space.broker.machines import Machines
from space.drivers import processes
from space.drivers.base import Driver, MachineState, Need
from space.errors import HostError, SpaceError
from space.model import ids

SETTLE_S = 120.0
AT_ONCE = 8
_AT_REST = frozenset({Phase.SUSPENDED, Phase.STOPPED, Phase.EXITED})

log = structlog.get_logger()


async def recover(machines: Machines, drivers: dict[str, Driver]) -> None:
    """Adopt what runs, finish or undo what was under way, remove strays. One machine's trouble does not stop the
    others'.
    """
    for driver in drivers.values():
        await driver.end_strays()
    found = machines.journal.read_all()
    machines.entries.update(found.entries)
    await machines.host.open({entry.link for entry in found.entries.values() if entry.link is not None})
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(entry: Entry) -> None:
        async with turns:
            try:
                async with machines.locked(entry.machine, SETTLE_S):
                    await settle(machines, entry)
            except SpaceError as error:
                log.warning("machine-not-settled", machine=entry.machine, code=error.code, message=error.message)

    async with asyncio.TaskGroup() as group:
        for entry in found.entries.values():
            group.create_task(one(entry))
    if found.damaged:
        log.error("journals-damaged", machines=sorted(found.damaged))
    await sweep(machines, drivers, found.damaged)


async def settle(machines: Machines, entry: Entry) -> None:
    """Bring one machine to a resting phase, under its lock."""
    await _HOW[entry.phase](machines, entry)


async def sweep(machines: Machines, drivers: dict[str, Driver], damaged: frozenset[str]) -> None:
    """Remove what carries our names and belongs to no machine. Only names that are ids are touched."""
    host = machines.host
    entries = machines.entries
    at_rest = {name for name, entry in entries.items() if entry.phase in _AT_REST}
    resident = set(entries) - at_rest | damaged
    for driver in drivers.values():
        for name in _strays(await driver.known(), resident):
            await driver.destroy(name, None)
    for name in _strays(host.channels.known(), resident):
        host.channels.remove(name)
    for name in _strays(host.cgroups.known(), resident):
        await host.cgroups.remove(name)
    for name in _strays(host.links.known(), resident):
        await host.links.delete(name, None)
    if not damaged:
        await host.links.sweep({entry.link for entry in entries.values() if entry.link is not None})
    await _sweep_storage(machines, drivers, damaged)


async def _sweep_storage(machines: Machines, drivers: dict[str, Driver], damaged: frozenset[str]) -> None:
    host = machines.host
    if any(Need.DISK in driver.capabilities.needs for driver in drivers.values()):
        for name in _strays(host.disks.known(), set(machines.entries) | damaged):
            await host.disks.delete(name)
        await host.templates.sweep()
    imageless = _AT_REST - {Phase.SUSPENDED} | RESIDENT
    may_have_image = {name for name, entry in machines.entries.items() if entry.phase not in imageless} | damaged
    for name in _strays({path.name.removesuffix(".tmp") for path in host.snapshots.iterdir()}, may_have_image):
        await host.drop_image(name)


def _strays(names: set[str] | frozenset[str], owned: set[str]) -> list[str]:
    return sorted(name for name in names if ids.is_id("sbx", name) and name not in owned)


async def _adopt_or_note_exit(machines: Machines, entry: Entry) -> None:
    if entry.process and processes.is_alive(entry.process):
        machines.watch(entry.machine, entry.process)
    else:
        await machines.note_exit(entry)


async def _look_again(machines: Machines, entry: Entry) -> None:
    """The request was under way: only the machine knows whether it got through."""
    driver = machines.driver(entry.driver)
    paused = await machines.host.is_paused(entry, driver)
    if paused is None:
        await machines.note_exit(entry)
        return
    if not paused:
        await machines.host.resume(entry.machine, driver)  # it may stand still in part
    machines.write(entry.to(Phase.PAUSED if paused else Phase.RUNNING))
    if entry.process:
        machines.watch(entry.machine, entry.process)


async def _came_up(machines: Machines, entry: Entry) -> bool:
    seen = await machines.driver(entry.driver).inspect(entry.machine)
    if seen.state is not MachineState.RUNNING or seen.process is None:
        return False
    machines.write(entry.to(Phase.RUNNING, process=seen.process, cause=None))
    machines.watch(entry.machine, seen.process)
    return True


async def _finish_or_undo_suspend(machines: Machines, entry: Entry) -> None:
    """The image's final name is the point of no return."""
    if await _has_image(machines, entry):
        await machines.finish_suspend(entry)
    else:
        await machines.continue_unsuspended(entry)
        if (now := machines.entries[entry.machine]).phase in RESIDENT and now.process:
            machines.watch(entry.machine, now.process)


async def _has_image(machines: Machines, entry: Entry) -> bool:
    try:
        await machines.driver(entry.driver).check_image(machines.host.image(entry.machine))
    except HostError:
        return False
    return True


async def _boot_or_erase(machines: Machines, entry: Entry) -> None:
    if not await _came_up(machines, entry):
        await machines.erase(entry.machine)


async def _start_or_stop(machines: Machines, entry: Entry) -> None:
    if not await _came_up(machines, entry):
        await machines.rest_without_process(entry, Phase.STOPPED)


async def _wake_or_stay(machines: Machines, entry: Entry) -> None:
    if await _came_up(machines, entry):
        await machines.host.drop_image(entry.machine)
    else:
        await machines.rest_without_process(entry, Phase.SUSPENDED)


async def _finish_stop(machines: Machines, entry: Entry) -> None:
    await machines.rest_without_process(entry, Phase.STOPPED)


async def _finish_destroy(machines: Machines, entry: Entry) -> None:
    await machines.erase(entry.machine)


async def _stay(machines: Machines, entry: Entry) -> None:
    """At rest: what it had of the host was released before the phase was written."""


_HOW: dict[Phase, Callable[[Machines, Entry], Awaitable[None]]] = {
    Phase.RUNNING: _adopt_or_note_exit,
    Phase.PAUSED: _adopt_or_note_exit,
    Phase.PAUSING: _look_again,
    Phase.RESUMING: _look_again,
    Phase.BOOTING: _boot_or_erase,
    Phase.STARTING: _start_or_stop,
    Phase.WAKING: _wake_or_stay,
    Phase.SUSPENDING: _finish_or_undo_suspend,
    Phase.STOPPING: _finish_stop,
    Phase.DESTROYING: _finish_destroy,
    Phase.SUSPENDED: _stay,
    Phase.STOPPED: _stay,
    Phase.EXITED: _stay,
}

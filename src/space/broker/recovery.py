"""What a broker does first: believe the journals, look at the host, and make both tell the same story.

`settle` brings one machine that a crash or a failure left between two phases to rest; `recover` does so for all, and
then has removed what belongs to no machine.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from space.broker.journal import RESIDENT, Entry, Phase
from space.broker.machines import Machines
from space.broker.sweep import Stray, sweep
from space.drivers import processes
from space.drivers.base import MachineState
from space.errors import HostError, SpaceError

SETTLE_S = 120.0
AT_ONCE = 8

log = structlog.get_logger()


async def recover(machines: Machines) -> list[Stray]:
    """Adopt what runs, finish or undo what was under way, remove strays. One machine's trouble does not stop the
    others'.
    """
    for driver in machines.drivers.values():
        await driver.end_strays()
    found = machines.journal.read_all()
    machines.entries.update(found.entries)
    machines.damaged = found.damaged
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
    for entry in machines.entries.values():
        if entry.phase in RESIDENT and entry.link is not None:
            machines.host.links.enter(entry.link, entry.machine)
    if found.damaged:
        log.error("journals-damaged", machines=sorted(found.damaged))
    return await sweep(machines)


async def settle(machines: Machines, entry: Entry) -> None:
    """Bring one machine to a resting phase, under its lock."""
    await _HOW[entry.phase](machines, entry)


async def _adopt_or_note_exit(machines: Machines, entry: Entry) -> None:
    if entry.process and processes.is_alive(entry.process):
        machines.watch(entry.body, entry.process)
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
        await machines.host.resume(entry.body, driver)  # it may stand still in part
    machines.write(entry.to(Phase.PAUSED if paused else Phase.RUNNING))
    if entry.process:
        machines.watch(entry.body, entry.process)


async def _came_up(machines: Machines, entry: Entry) -> bool:
    seen = await machines.driver(entry.driver).inspect(entry.body)
    if seen.state not in {MachineState.RUNNING, MachineState.STALLED} or seen.process is None:
        return False
    machines.write(entry.to(Phase.RUNNING, process=seen.process, cause=None))
    machines.watch(entry.body, seen.process)
    return True


async def _finish_or_undo_suspend(machines: Machines, entry: Entry) -> None:
    """The image's final name is the point of no return."""
    if await _has_image(machines, entry):
        await machines.finish_suspend(entry)
    else:
        await machines.continue_unsuspended(entry)
        _watch_if_resident(machines, entry)


async def _go_on_from_snapshot(machines: Machines, entry: Entry) -> None:
    """Whether the snapshot is whole is another matter; the machine is as it was before."""
    await machines.continue_as_before(entry)
    _watch_if_resident(machines, entry)


def _watch_if_resident(machines: Machines, entry: Entry) -> None:
    if (now := machines.entries[entry.machine]).phase in RESIDENT and now.process:
        machines.watch(entry.body, now.process)


async def _has_image(machines: Machines, entry: Entry) -> bool:
    try:
        await machines.driver(entry.driver).check_image(machines.host.image(entry.body))
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
        await machines.host.drop_image(entry.body)
    else:
        await machines.rest_without_process(entry, Phase.SUSPENDED)


async def _finish_stop(machines: Machines, entry: Entry) -> None:
    await machines.rest_without_process(entry, Phase.STOPPED)


async def _finish_destroy(machines: Machines, entry: Entry) -> None:
    await machines.erase(entry.machine)


async def _stay(machines: Machines, entry: Entry) -> None:
    """At rest. What a suspended machine had of the host is given back after that is written."""
    if entry.process:
        await machines.rest_without_process(entry, entry.phase)


_HOW: dict[Phase, Callable[[Machines, Entry], Awaitable[None]]] = {
    Phase.RUNNING: _adopt_or_note_exit,
    Phase.PAUSED: _adopt_or_note_exit,
    Phase.PAUSING: _look_again,
    Phase.RESUMING: _look_again,
    Phase.BOOTING: _boot_or_erase,
    Phase.STARTING: _start_or_stop,
    Phase.WAKING: _wake_or_stay,
    Phase.SUSPENDING: _finish_or_undo_suspend,
    Phase.SNAPSHOTTING: _go_on_from_snapshot,
    Phase.STOPPING: _finish_stop,
    Phase.DESTROYING: _finish_destroy,
    Phase.SUSPENDED: _stay,
    Phase.STOPPED: _stay,
    Phase.EXITED: _stay,
}

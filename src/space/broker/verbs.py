"""Which verb is carried out by what, and under which locks."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from space.broker import doctor, keeping, lifecycle, publishing, recovery, reports, spares, volumes
from space.broker.journal import RESIDENT, Entry, Phase
from space.broker.machines import VERB_S, VERB_S_DEFAULT, Machines
from space.broker.requests import (
    Boot,
    Claim,
    Gc,
    Keep,
    MakeVolume,
    OfHost,
    OfMachine,
    OfSnapshot,
    OfTemplate,
    OfVolume,
    Publish,
    Request,
)
from space.broker.sweep import sweep
from space.drivers import processes

HOST_S = 600.0
PUBLISH_MORE_S = 300.0
"""What publishing may take beside reading the files: waiting for its turn, copying."""
_PASSING = frozenset(
    {
        *(Phase.BOOTING, Phase.STARTING, Phase.WAKING, Phase.PAUSING, Phase.RESUMING),
        *(Phase.SUSPENDING, Phase.SNAPSHOTTING, Phase.STOPPING, Phase.DESTROYING),
    }
)
_OF_MACHINE = {
    "pause": lifecycle.pause,
    "resume": lifecycle.resume,
    "suspend": lifecycle.suspend,
    "wake": lifecycle.wake,
    "stop": lifecycle.stop,
    "start": lifecycle.start,
}


async def carry_out(machines: Machines, request: Request, goes_on: Callable[[], Awaitable[None]]) -> Any:
    """Do what is asked and return the result. `goes_on` tells beforehand that the machine no longer stands still."""
    match request:
        case Boot() | Claim():
            return await _make(machines, request)
        case Keep() | OfSnapshot():
            return await _of_snapshot(machines, request, goes_on)
        case Publish() | OfTemplate():
            return await _of_template(machines, request)
        case MakeVolume() | OfVolume():
            async with machines.locked(request.volume, VERB_S_DEFAULT):
                return await volumes.carry_out(machines, request)
        case OfMachine():
            return await _of_machine(machines, request)
        case OfHost() | Gc():
            return await _of_host(machines, request)


async def _make(machines: Machines, request: Boot | Claim) -> dict[str, Any]:
    if isinstance(request, Boot):
        async with _at_rest(machines, request.machine, VERB_S_DEFAULT):
            return await lifecycle.boot(machines, request)
    async with (
        machines.locked(request.machine, VERB_S_DEFAULT),
        _at_rest(machines, request.spare, VERB_S_DEFAULT),
    ):
        return await spares.claim(machines, request)


async def _of_snapshot(
    machines: Machines, request: Keep | OfSnapshot, goes_on: Callable[[], Awaitable[None]]
) -> dict[str, Any]:
    if isinstance(request, OfSnapshot):
        async with machines.locked(request.snapshot, VERB_S_DEFAULT):
            return await keeping.drop(machines, request.snapshot)
    async with (
        machines.locked(request.snapshot, VERB_S["snapshot"]),
        _at_rest(machines, request.machine, VERB_S["snapshot"]),
    ):
        return await keeping.snapshot(machines, request, goes_on)


async def _of_template(machines: Machines, request: Publish | OfTemplate) -> dict[str, Any]:
    if isinstance(request, OfTemplate):
        async with machines.locked(request.template, VERB_S_DEFAULT):
            return await publishing.drop(machines, request)
    async with _at_rest(machines, request.machine, machines.settings.template_publish_s + PUBLISH_MORE_S):
        return await publishing.publish(machines, request)


async def _of_machine(machines: Machines, request: OfMachine) -> dict[str, Any]:
    machine = request.machine
    if request.verb == "inspect":
        return await reports.inspect(machines, machine)
    if request.verb == "destroy":  # legal in every state, so nothing needs settling first
        async with machines.locked(machine, VERB_S_DEFAULT):
            return await lifecycle.destroy(machines, machine)
    async with _at_rest(machines, machine, VERB_S.get(request.verb, VERB_S_DEFAULT)):
        return await _OF_MACHINE[request.verb](machines, machine)


async def _of_host(machines: Machines, request: OfHost | Gc) -> Any:
    async with asyncio.timeout(HOST_S):
        match request:
            case Gc():
                strays = await sweep(machines, dry_run=request.dry_run)
                return {"strays": [asdict(stray) for stray in strays]}
            case OfHost(verb="machines"):
                return await reports.all_of(machines)
            case OfHost(verb="templates"):
                return await asyncio.to_thread(machines.host.templates.listed)
            case OfHost(verb="volumes"):
                return [{"volume": name} for name in sorted(machines.host.disks.known_volumes())]
            case OfHost(verb="snapshots"):
                return [snapshot.told() for snapshot in machines.host.snapshots.all()]
            case OfHost():
                return [asdict(check) for check in await doctor.examine(machines.settings)]


@asynccontextmanager
async def _at_rest(machines: Machines, machine_id: str, timeout_s: float) -> AsyncGenerator[None]:
    """Hold the machine's lock, and first bring to rest what an earlier request left, or what has just ended."""
    async with machines.locked(machine_id, timeout_s):
        entry = machines.entries.get(machine_id)
        if entry and (entry.phase in _PASSING or _has_ended(entry)):
            await recovery.settle(machines, entry)
        yield


def _has_ended(entry: Entry) -> bool:
    """Whether the machine's process is gone although that has not been noted yet."""
    return entry.phase in RESIDENT and not (entry.process and processes.is_alive(entry.process))

"""The verbs about snapshots: keeping a machine's disk and memory as they are now, and giving that up again."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from space.broker import images
from space.broker.files import sync_tree
from space.broker.host import Timings
from space.broker.journal import FORMER_LINKS_MAX, RESIDENT, Entry, Phase
from space.broker.lifecycle import check_checkpoint
from space.broker.machines import Machines, conflict
from space.broker.requests import Keep
from space.broker.snapshots import Snapshot
from space.errors import Conflict, MachineLost

_RESTING = {"full": {Phase.SUSPENDED}, "disk": {Phase.SUSPENDED, Phase.STOPPED, Phase.EXITED}}


GoesOn = Callable[[], Awaitable[None]]
"""Told as soon as a machine that runs is as before, while its snapshot is being made safe."""


async def snapshot(machines: Machines, request: Keep, goes_on: GoesOn) -> dict[str, Any]:
    """Keep the machine as it is now; afterwards it is as before. Under the locks of both."""
    entry = machines.entry(request.machine)
    snapshots = machines.host.snapshots
    if present := snapshots.find(request.snapshot):
        if (present.machine, present.kind) != (request.machine, request.kind):
            raise Conflict("There is another snapshot of that id.", snapshot=request.snapshot)
        return {"timings": {}, "bytes": present.bytes}
    if entry.phase not in RESIDENT | _RESTING[request.kind]:
        raise conflict("snapshotted", entry)
    if request.kind == "full":
        check_checkpoint(machines.driver(entry.driver))
    timings = Timings()
    try:
        with images.full_told():
            kept = await _keep(machines, entry, request, timings, goes_on)
            await timings.of("keep", snapshots.keep(kept))
    except BaseException:
        await machines.undo(snapshots.drop(request.snapshot))
        raise
    return {"timings": timings, "bytes": kept.bytes}


async def drop(machines: Machines, name: str) -> dict[str, Any]:
    """Leave nothing of a snapshot. Unknown: success."""
    timings = Timings()
    await timings.of("drop", machines.host.snapshots.drop(name))
    return {"timings": timings}


async def _keep(machines: Machines, entry: Entry, request: Keep, timings: Timings, goes_on: GoesOn) -> Snapshot:
    memory = machines.host.snapshots.begin(request.snapshot)
    if entry.phase in RESIDENT:
        disk_bytes = await _of_running(machines, entry, request, memory, timings)
        await goes_on()
        if request.kind == "full":
            await timings.of("sync", asyncio.to_thread(sync_tree, memory))
    else:
        if request.kind == "full":
            await asyncio.to_thread(_share, machines.host.image(entry.body), memory)
        disk_bytes = await timings.of("disk", _keep_disk(machines, entry, request.snapshot))
    driver = machines.driver(entry.driver)
    if request.kind == "full":
        await driver.check_image(memory)
    links = (*(() if entry.link is None else (entry.link,)), *entry.former_links)[:FORMER_LINKS_MAX]
    return Snapshot(
        snapshot=request.snapshot,
        machine=entry.machine,
        kind=request.kind,
        template=entry.template,
        driver=entry.driver,
        memory_mib=entry.resources.memory_mib,
        template_bytes=machines.host.template_bytes(entry) if machines.host.store(driver) else 0,
        disk_bytes=disk_bytes,
        memory_bytes=sum(path.stat().st_size for path in memory.iterdir()),
        links=links if request.kind == "full" else (),
    )


async def _of_running(machines: Machines, entry: Entry, request: Keep, memory: Path, timings: Timings) -> int:
    """Write the machine's memory, and keep its disk before the guest goes on; return the disk's bytes."""
    driver, host = machines.driver(entry.driver), machines.host
    going = entry.to(Phase.SNAPSHOTTING, was_paused=entry.phase is Phase.PAUSED)
    if request.kind == "full":
        images.check_room(host, entry.body)
    machines.write(going, durable=False)  # nothing that a power cut would leave undone
    try:
        if request.kind == "full":
            if going.was_paused:
                await host.resume(entry.body, driver)
            with host.room_to_write(entry, driver, machines.admission.spare_mib()):
                await timings.of("checkpoint", driver.checkpoint(entry.body, memory))
        # Memory and disk belong together: the guest goes on from both or from neither.
        await host.pause(entry.body, driver)
        disk_bytes = await timings.of("disk", _keep_disk(machines, entry, request.snapshot))
    except MachineLost:
        await machines.undo(machines.note_exit(going))
        raise
    except BaseException:
        await machines.undo(machines.continue_as_before(going))
        raise
    await timings.of("resume", machines.continue_as_before(going))
    return disk_bytes


async def _keep_disk(machines: Machines, entry: Entry, name: str) -> int:
    store = machines.host.store(machines.driver(entry.driver))
    if store is None:
        return 0
    return await store.save(entry.body, name, machines.host.template_bytes(entry), entry.resources.disk_mib)


def _share(image: Path, memory: Path) -> None:
    """Let the files of an image, which are never written again, have a second name."""
    for path in image.iterdir():
        os.link(path, memory / path.name)

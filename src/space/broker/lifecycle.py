"""The verbs about one machine, from boot to destroy. The machine's lock is held and the machine is at rest.

A verb asked again finds its work done or does the rest.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from space.broker import channels, images, volumes
from space.broker.files import sync
from space.broker.host import Timings, check_disk
from space.broker.journal import FORMER_LINKS_MAX, RESIDENT, Entry, Phase
from space.broker.machines import Machines, conflict
from space.broker.requests import Boot
from space.broker.snapshots import Snapshot
from space.drivers.base import Driver, Machine
from space.drivers.processes import Process
from space.errors import Conflict, HostError, InvalidRequest

log = structlog.get_logger()


async def boot(machines: Machines, request: Boot) -> dict[str, Any]:
    """Make the machine's disk, link, cgroup and channel, and start it, or restore it where a snapshot has memory."""
    present = machines.entries.get(request.machine)
    if present:
        wanted = (request.template, request.driver, request.snapshot, request.spare, request.mounts())
        same = (present.template, present.driver, present.snapshot, present.spare, present.volumes) == wanted
        if present.phase in RESIDENT and same:
            return _booted(present, Timings())
        raise conflict("booted", present)
    if claimed := machines.of_body(request.machine):
        # A spare's id goes on as the name of its body: what was made for another machine would be taken for this one's.
        raise conflict("booted", claimed)
    driver = machines.driver(request.driver)
    if request.volumes and not driver.capabilities.volumes:
        raise volumes.not_supported(driver.name)
    machines.admission.check_limits(request.resources.resources())
    if not request.spare:
        machines.admission.check_count(machines.entries.values())
    timings = Timings()
    with _origin(machines, request) as snapshot:
        full = snapshot is not None and snapshot.kind == "full"
        with machines.admission.memory(machines.entries.values(), snapshot.memory_bytes if snapshot else 0):
            entry = Entry(
                machine=request.machine,
                driver=request.driver,
                template=request.template,
                hostname=request.hostname,
                resources=request.resources.resources(),
                phase=Phase.BOOTING,
                link=await machines.reserve(driver),
                spare=request.spare,
                snapshot=request.snapshot,
                restored=full,
                former_links=snapshot.links if snapshot and full else (),
                template_bytes=_template_bytes(machines, request, driver, snapshot),
                volumes=request.mounts(),
            )
            machines.write(entry)
            memory = machines.host.snapshots.memory(snapshot.snapshot) if snapshot and full else None
            try:
                await _start(machines, entry, timings, memory, new_disk=True)
            except BaseException:
                await machines.undo(machines.erase(request.machine))
                raise
    return _booted(machines.entry(request.machine), timings)


async def pause(machines: Machines, machine_id: str) -> dict[str, Any]:
    entry = machines.entry(machine_id)
    if entry.phase is Phase.PAUSED:
        return {"timings": {}}
    if entry.phase is not Phase.RUNNING:
        raise conflict("paused", entry)
    return await _toggle(machines, entry, Phase.PAUSING, Phase.PAUSED)


async def resume(machines: Machines, machine_id: str) -> dict[str, Any]:
    entry = machines.entry(machine_id)
    if entry.phase is Phase.RUNNING:
        return {"timings": {}}
    if entry.phase is not Phase.PAUSED:
        raise conflict("resumed", entry)
    return await _toggle(machines, entry, Phase.RESUMING, Phase.RUNNING)


async def suspend(machines: Machines, machine_id: str) -> dict[str, Any]:
    """Write the memory image, verified and synced, then end the machine. A failure leaves the machine as it was.

    Link, cgroup and channel are given back after the answer.
    """
    entry = machines.entry(machine_id)
    if entry.phase is Phase.SUSPENDED:
        return {"timings": {}}
    if entry.phase not in RESIDENT:
        raise conflict("suspended", entry)
    driver = machines.driver(entry.driver)
    check_checkpoint(driver)
    timings = Timings()
    images.check_room(machines.host, entry.body)
    going = entry.to(Phase.SUSPENDING, was_paused=entry.phase is Phase.PAUSED)
    machines.write(going, durable=False)
    spare_mib = machines.admission.spare_mib()
    try:
        # Of what is written down about a suspend, this decides after a power cut, and the image's name.
        announced = asyncio.to_thread(machines.journal.sync, entry.body)
        await images.both(announced, images.write(machines.host, driver, going, timings, spare_mib))
    except BaseException:
        await machines.undo(machines.continue_unsuspended(going))
        raise
    named = asyncio.to_thread(sync, machines.host.images)
    await timings.of("end", images.both(named, machines.finish_suspend(going)))
    return {"timings": timings}


async def wake(machines: Machines, machine_id: str) -> dict[str, Any]:
    """Restore the machine from its image. A failure keeps the image; the machine stays suspended."""
    entry = machines.entry(machine_id)
    if entry.phase is Phase.RUNNING:
        return {"timings": {}}
    if entry.phase is not Phase.SUSPENDED:
        raise conflict("woken", entry)
    driver = machines.driver(entry.driver)
    image = machines.host.image(entry.body)
    await driver.check_image(image)
    timings = Timings()
    entry = await machines.released(entry)
    with machines.admission.memory(machines.entries.values(), _size(image)):
        going = (await _with_link(machines, entry, driver)).to(Phase.WAKING)
        machines.write(going)
        try:
            await _start(machines, going, timings, image, new_disk=False)
        except BaseException as error:
            await machines.undo(machines.rest_without_process(going, Phase.SUSPENDED))
            if isinstance(error, HostError) and error.code == "start-failed" and entry.volumes:
                raise volumes.changed() from error
            raise
    machines.drop_image_soon(entry)
    return {"timings": timings}


async def stop(machines: Machines, machine_id: str) -> dict[str, Any]:
    entry = machines.entry(machine_id)
    if entry.phase is Phase.STOPPED:
        return {"timings": {}}
    if entry.phase not in RESIDENT | {Phase.EXITED}:
        raise conflict("stopped", entry)
    timings = Timings()
    going = entry.to(Phase.STOPPING)
    machines.write(going)
    if store := machines.host.store(machines.driver(entry.driver)):
        await timings.of("sync", store.sync(entry.body))
    await timings.of("release", machines.rest_without_process(going, Phase.STOPPED))
    return {"timings": timings}


async def start(machines: Machines, machine_id: str) -> dict[str, Any]:
    """Boot afresh on the kept disk. A memory image, if there is one, is given up."""
    entry = machines.entry(machine_id)
    if entry.phase is Phase.RUNNING:
        return {"timings": {}}
    if entry.phase not in {Phase.STOPPED, Phase.EXITED, Phase.SUSPENDED}:
        raise conflict("started", entry)
    driver = machines.driver(entry.driver)
    timings = Timings()
    entry = await machines.released(entry)
    with machines.admission.memory(machines.entries.values()):
        going = await _with_link(machines, entry, driver)
        going = going.to(Phase.STARTING, cause=None, restored=False, former_links=())
        machines.write(going)
        await machines.host.drop_image(entry.body)
        try:
            await _start(machines, going, timings, None, new_disk=False)
        except BaseException:
            await machines.undo(machines.rest_without_process(going, Phase.STOPPED))
            raise
    return {"timings": timings}


async def destroy(machines: Machines, machine_id: str) -> dict[str, Any]:
    """Leave nothing. An unknown machine: success."""
    timings = Timings()
    if machine_id in machines.entries:
        await timings.of("erase", machines.erase(machine_id))
    return {"timings": timings}


def check_checkpoint(driver: Driver) -> None:
    if not driver.capabilities.checkpoint:
        raise Conflict("This driver cannot keep a machine's memory.", code="not-supported", driver=driver.name)


def _booted(entry: Entry, timings: Timings) -> dict[str, Any]:
    return {"timings": timings, "restored": entry.restored, "body": entry.body}


@contextmanager
def _origin(machines: Machines, request: Boot) -> Generator[Snapshot | None]:
    """Return the snapshot that is to be booted from, held, and checked to be one that this request can have."""
    if request.snapshot is None:
        yield None
        return
    with machines.host.snapshots.used(request.snapshot) as found:
        for name in ("template", "driver"):
            if getattr(found, name) != getattr(request, name):
                raise InvalidRequest(f"The snapshot is of another {name}.", field=name, snapshot=found.snapshot)
        if found.kind == "full" and request.resources.memory_mib < found.memory_mib:
            raise InvalidRequest(
                "A machine with a snapshot's memory may not have less than it had.",
                field="resources.memory_mib",
                min=found.memory_mib,
            )
        check_disk(found, request.resources.resources())
        yield found


def _template_bytes(machines: Machines, request: Boot, driver: Driver, snapshot: Snapshot | None) -> int | None:
    if machines.host.store(driver) is None:
        return None
    return snapshot.template_bytes if snapshot else machines.host.templates.get(request.template).bytes


async def _with_link(machines: Machines, entry: Entry, driver: Driver) -> Entry:
    """Give a machine that is to run again the link that it had, or another if that is not to be had any more."""
    if entry.link is None:
        return entry.to(entry.phase, link=await machines.reserve(driver))
    if machines.host.links.hold(entry.link):
        return entry
    machines.host.links.free(entry.link)
    former = (entry.link, *entry.former_links)[:FORMER_LINKS_MAX]
    return entry.to(entry.phase, link=await machines.reserve(driver), former_links=former)


async def _start(machines: Machines, entry: Entry, timings: Timings, memory: Path | None, *, new_disk: bool) -> None:
    """Let the machine run, afresh or from `memory`, and write that down."""
    driver = machines.driver(entry.driver)
    machine = await machines.host.acquire(entry, driver, timings, new_disk=new_disk)
    try:
        process = await timings.of("machine", _run(machines, entry, machine, memory))
    except HostError as error:
        if memory is None and entry.volumes and error.code == "start-failed":
            raise volumes.not_mounted() from error
        if memory is None or not entry.former_links or error.code != "start-failed":
            raise
        # Perhaps a socket in that memory has an address from before. Mostly none has, and then a machine need not
        # be seen with addresses that are not its own.
        log.info("restored-with-former-addresses", machine=entry.machine, reason=error.message)
        await driver.destroy(entry.body, None)
        await machines.host.link(entry, entry.former_links)
        process = await timings.of("machine-again", _run(machines, entry, machine, memory))
    machines.write(entry.to(Phase.RUNNING, process=process, cause=None))
    machines.watch(entry.body, process)


async def _run(machines: Machines, entry: Entry, machine: Machine, memory: Path | None) -> Process:
    driver = machines.driver(entry.driver)
    channel = machines.host.channels.create(entry.body)
    try:
        await driver.prepare(machine)
        if memory is None:
            return await driver.start(machine, channel)
        return await driver.restore(machine, channel, memory)
    finally:
        channels.close(channel)


async def _toggle(machines: Machines, entry: Entry, passing: Phase, target: Phase) -> dict[str, Any]:
    driver = machines.driver(entry.driver)
    timings = Timings()
    machines.write(entry.to(passing), durable=False)
    act = machines.host.pause if target is Phase.PAUSED else machines.host.resume
    # A failure leaves the passing phase: whoever comes next asks the machine itself how far it got.
    await timings.of("machine", act(entry.body, driver))
    machines.write(entry.to(target), durable=False)
    return {"timings": timings}


def _size(image: Path) -> int:
    return sum(path.stat().st_size for path in image.iterdir())

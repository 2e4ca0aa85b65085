"""What is in volumes, for who has no sandbox: read and written by a sandbox that SPACE makes for that.

It mounts the one volume, reaches nothing outside, is made when somebody asks and deleted when nobody does for a while.
Links, names and owners in the volume are its kernel's to resolve, and lead nowhere but into it. It is one of the
project's sandboxes, with the volume's name in its metadata.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from space.control import operations, sandboxes, verbs, volumes
from space.control.control import Control
from space.control.creation import NewSandbox, request_create
from space.control.readiness import wait_ready
from space.control.volumes import WantedVolume
from space.errors import NotFound, Unavailable
from space.model.operation import OperationState
from space.model.sandbox import Sandbox, State
from space.model.volume import Volume
from space.store import volumes as rows

PLACE = "/volume"
TEMPLATE = "base"
METADATA = "space.volume"
IDLE_S = 60.0
LOOKING_MAX = 4
"""So many programs look at one volume at a time, as its sandbox has little memory; others wait."""
LOOK_S = 60.0
"""How long."""
READY_S = 60.0
GONE_S = 60.0
RESOURCES = {"cpus": 1.0, "memory_mib": 256, "disk_mib": 64, "pids": 128}
_MARK = "volume_content"


async def opened(control: Control, volume: Volume) -> Sandbox:
    """Return a sandbox that runs and has the volume at ``PLACE``; of those who ask at once one makes it."""
    async with control.opening.setdefault(volume.id, asyncio.Lock()):
        found = await _made_for(control, volume)
        for one in found:
            if one.state == State.FAILED:
                await verbs.request(control, volume.project_id, one.id, "delete")
        running = next((one for one in found if one.state == State.RUNNING and one.ready), None)
        return running or await _make(control, volume)


@contextlib.asynccontextmanager
async def looking(control: Control, volume: Volume) -> AsyncGenerator[None]:
    """Have one of the places for programs that look at a volume. Raises ``Unavailable`` when none gets free in time."""
    places = control.looking.setdefault(volume.id, asyncio.Semaphore(LOOKING_MAX))
    try:
        async with asyncio.timeout(LOOK_S):
            await places.acquire()
    except TimeoutError as error:
        raise Unavailable("Too many look at the volume. Ask again later.", code="not-ready") from error
    try:
        yield
    finally:
        places.release()


async def delete_volume(control: Control, project_id: str, name: str) -> None:
    """Delete a volume, see `volumes.delete`, and before it the sandbox that reads and writes what is in it."""
    volume = (await volumes.get(control, project_id, name)).volume
    async with control.opening.setdefault(volume.id, asyncio.Lock()):
        users = await control.store.read(lambda connection: rows.users(connection, volume.id))
        # What others keep is not taken from who is writing to it.
        volumes.check_unused([one for one in users if not is_one(one)])
        for one in await _made_for(control, volume):
            _, operation = await verbs.request(control, project_id, one.id, "delete")
            await operations.wait(control, project_id, operation.id, GONE_S)
        await volumes.delete(control, project_id, name)


def is_one(sandbox: Sandbox) -> bool:
    """Whether SPACE has made a sandbox for what is in a volume."""
    made = sandbox.forked_from is None and sandbox.snapshot_id is None
    return made and _MARK in (sandbox.details.get("extras") or {})


async def _made_for(control: Control, volume: Volume) -> list[Sandbox]:
    users = await control.store.read(lambda connection: rows.users(connection, volume.id))
    return [one for one in users if is_one(one) and one.state != State.DELETING]


async def _make(control: Control, volume: Volume) -> Sandbox:
    wanted = NewSandbox(
        template=TEMPLATE,
        driver="auto",  # one that mounts volumes, whichever sandboxes usually have
        resources=RESOURCES,
        metadata={METADATA: volume.name},
        idle_timeout_s=IDLE_S,
        on_idle="delete",
        policy="none",
        volumes=(WantedVolume(volume.name, PLACE),),
        extras={_MARK: volume.id},
    )
    made, operation = await request_create(control, volume.project_id, wanted)
    operation = await operations.wait(control, volume.project_id, operation.id, READY_S)
    if operation.state in {OperationState.FAILED, OperationState.CANCELLED}:
        raise operations.error_of(operation)
    try:
        now = await sandboxes.get(control, volume.project_id, made.id)
    except NotFound as error:
        raise Unavailable("What reads the volume was deleted. Ask again.", code="not-ready") from error
    return await wait_ready(control, now, operation, READY_S)

"""Volumes as their owners see them, the making of new ones, and dropping those that nobody wants.

A row is there before the host has anything of a volume and until it has nothing any more, so that whatever the host has
without a row is nobody's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import structlog
from sqlalchemy import Connection

from space.control import once, quotas
from space.control.control import Control
from space.control.once import Once
from space.errors import Conflict, InvalidRequest, LimitExceeded, NotFound, SpaceError
from space.model.ids import is_id, new_id
from space.model.project import Used
from space.model.sandbox import Sandbox
from space.model.volume import SIZE_MIB, Mount, Volume, VolumeState
from space.store import projects, volumes
from space.store.paging import Position

log = structlog.get_logger(__name__)

VOLUMES_MAX = 100
"""Of one project."""
MAKING = timedelta(minutes=5)
"""After so long nobody makes a volume any more that is said to be in the making."""
AT_ONCE = 50
NAMED_MAX = 5
RETRY_S = 1


@dataclass(frozen=True, slots=True)
class Shown:
    """A volume, and how many sandboxes mount it."""

    volume: Volume
    sandboxes: int = 0


@dataclass(frozen=True, slots=True)
class WantedVolume:
    """A volume of the project by its name, and where a new sandbox is to have it."""

    name: str
    path: str


async def request_volume(
    control: Control, project_id: str, name: str, size_mib: int | None = None, asked_once: Once | None = None
) -> Volume:
    """Make a volume and return it when it can be mounted.

    Raises ``InvalidRequest``, ``LimitExceeded``, ``Conflict`` when the name is taken or there can be none on the host.
    """
    now, most = control.now(), control.settings.disk_mib_max
    size_mib = min(SIZE_MIB, most) if size_mib is None else size_mib
    if size_mib > most:
        raise InvalidRequest(f"size_mib may be at most {most} here.", field="size_mib", maximum=most)
    wanted = Volume(new_id("vol"), project_id, name, size_mib, VolumeState.CREATING, now, now)

    def record(connection: Connection) -> Volume:
        earlier = once.first(connection, asked_once, project_id, subject_id=wanted.id, now=now)
        if earlier is not None:
            return _owned(volumes.get(connection, earlier.subject_id), project_id)
        quotas.admit(connection, project_id, Used(disk_mib=size_mib))
        if volumes.by_name(connection, project_id, name) is not None:
            raise Conflict("There is a volume of that name.", code="name-taken", field="name")
        if volumes.count(connection, project_id) >= VOLUMES_MAX:
            raise LimitExceeded(
                f"A project may have {VOLUMES_MAX} volumes. Delete one first.", code="volumes-max", limit=VOLUMES_MAX
            )
        volumes.add(connection, wanted)
        return wanted

    made = await control.store.write(record)
    if made.state == VolumeState.READY:
        return made
    try:
        await control.node.make_volume(made.id, made.size_mib)
    except SpaceError:
        await _give_up(control, made)
        raise
    if not await _move(control, made, VolumeState.READY):
        raise _not_found()
    return replace(made, state=VolumeState.READY)


async def get(control: Control, project_id: str, name: str) -> Shown:
    """Return one of the project's volumes, or raise ``NotFound``."""
    return await control.store.read(lambda connection: _named(connection, project_id, name))


async def by_id(control: Control, project_id: str, volume_id: str) -> Volume:
    """Return one of the project's volumes by its id, or raise ``NotFound``."""
    found = None
    if is_id("vol", volume_id):
        found = await control.store.read(lambda connection: volumes.get(connection, volume_id))
    return _owned(found, project_id)


async def page(control: Control, project_id: str, *, after: Position | None, limit: int) -> list[Shown]:
    def look(connection: Connection) -> list[Shown]:
        found = volumes.page(connection, project_id, after=after, limit=limit)
        users = volumes.count_users(connection, [one.id for one in found])
        return [Shown(one, users.get(one.id, 0)) for one in found]

    return await control.store.read(look)


async def delete(control: Control, project_id: str, name: str) -> None:
    """Delete a volume with all that is in it; when this returns, nothing of it is left.

    Raises ``NotFound``, or ``Conflict`` (``volume-in-use``) while a sandbox, in whatever state, mounts it.
    """
    now = control.now()

    def record(connection: Connection) -> Volume:
        projects.lock(connection, project_id)  # no sandbox that mounts it is made meanwhile
        found = _named(connection, project_id, name).volume
        check_unused(volumes.users(connection, found.id))
        volumes.move(connection, found, VolumeState.DELETING, now)
        return replace(found, state=VolumeState.DELETING)

    await _drop(control, await control.store.write(record))


def check_unused(users: Sequence[Sandbox]) -> None:
    if users:
        named = ", ".join(one.id for one in users[:NAMED_MAX]) + (", …" if len(users) > NAMED_MAX else "")
        raise Conflict(
            f"Sandboxes mount the volume: {named}. Delete them first.",
            code="volume-in-use",
            sandboxes=[one.id for one in users[:NAMED_MAX]],
            count=len(users),
        )


def resolve(connection: Connection, project_id: str, wanted: Sequence[WantedVolume]) -> list[dict[str, str]]:
    """Return what a new sandbox's details say of the volumes that it names; call it under the project's lock."""
    found: list[dict[str, str]] = []
    for number, one in enumerate(wanted):
        volume = volumes.by_name(connection, project_id, one.name)
        if volume is None or volume.state != VolumeState.READY:
            raise InvalidRequest(
                f"There is no volume {one.name!r}. `space volume create`, or `POST /v1/volumes`, makes one.",
                code="unknown-volume",
                field=f"volumes.{number}.name",
            )
        found.append({"volume": volume.id, "name": volume.name, "path": one.path})
    return found


def mount(connection: Connection, sandbox: Sandbox) -> None:
    """Note what a new sandbox's details say that it mounts. Raises ``Conflict`` when a volume is there no more."""
    mounts = mounts_of(sandbox)
    for one in mounts:
        volume = volumes.get(connection, one.volume)
        if volume is None or volume.project_id != sandbox.project_id or volume.state != VolumeState.READY:
            raise Conflict("A volume that the snapshot had mounted is deleted.", code="volume-gone", path=one.path)
    volumes.mount(connection, sandbox.id, mounts)


def mounts_of(sandbox: Sandbox) -> list[Mount]:
    """Return what a sandbox mounts."""
    return [Mount(one["volume"], one["path"]) for one in sandbox.volumes]


async def drop_unwanted(control: Control) -> None:
    """Have the node drop the volumes that are deleted, or whose making was given up. What fails comes again."""
    before = control.now() - MAKING
    for one in await control.store.read(lambda connection: volumes.unfinished(connection, before, AT_ONCE)):
        if one.state == VolumeState.DELETING or await _move(control, one, VolumeState.DELETING):
            await _give_up(control, replace(one, state=VolumeState.DELETING))


async def compare(control: Control, *, dry_run: bool = False) -> list[tuple[str, str]]:
    """Drop the node's volumes that are nobody's, and return them.

    The node's list is read before the store: a volume is in the store before it is made.
    """
    at_node = {str(shown.get("volume")) for shown in await control.node.volumes()}
    known = await control.store.read(volumes.ids)
    strays = sorted(one for one in at_node - known if is_id("vol", one))
    for nobodys in () if dry_run else strays:
        log.warning("stray-volume", volume=nobodys)
        await control.node.drop_volume(nobodys)
    return [("volume", nobodys) for nobodys in strays]


async def _drop(control: Control, volume: Volume) -> None:
    await control.node.drop_volume(volume.id)
    await control.store.write(lambda connection: volumes.remove(connection, volume.id))


async def _give_up(control: Control, volume: Volume) -> None:
    """Leave nothing of a volume, if that can be done now; else `drop_unwanted` does it later."""
    try:
        if volume.state == VolumeState.DELETING or await _move(control, volume, VolumeState.DELETING):
            await _drop(control, volume)
    except SpaceError as error:
        log.warning("volume-not-dropped", volume=volume.id, code=error.code)


async def _move(control: Control, volume: Volume, state: VolumeState) -> bool:
    now = control.now()
    return await control.store.write(lambda connection: volumes.move(connection, volume, state, now))


def _named(connection: Connection, project_id: str, name: str) -> Shown:
    found = _owned(volumes.by_name(connection, project_id, name), project_id)
    return Shown(found, volumes.count_users(connection, [found.id]).get(found.id, 0))


def _owned(found: Volume | None, project_id: str) -> Volume:
    if found is None or found.project_id != project_id or found.state == VolumeState.DELETING:
        raise _not_found()
    if found.state == VolumeState.CREATING:
        raise Conflict("The volume is still being made.", code="busy", retry_after_s=RETRY_S)
    return found


def _not_found() -> NotFound:
    return NotFound("There is no such volume.")

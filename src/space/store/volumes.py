"""Rows of volumes, and of which sandboxes mount them."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from space.model.sandbox import Sandbox, State
from space.model.volume import Mount, Volume, VolumeState
from space.store import sandboxes as sandbox_rows
from space.store.paging import Position, newest_first
from space.store.rows import arguments, plain
from space.store.tables import mounts, sandboxes, volumes

_COLUMNS = [volumes.c[field.name] for field in fields(Volume)]
_READY = volumes.c.state == VolumeState.READY


def add(connection: Connection, volume: Volume) -> None:
    """Add a volume. Whether its name is free is looked at before, under the project's lock."""
    connection.execute(insert(volumes).values(asdict(volume)))


def get(connection: Connection, volume_id: str) -> Volume | None:
    """Return a volume of any project in any state."""
    return _one(connection, volumes.c.id == volume_id)


def by_name(connection: Connection, project_id: str, name: str) -> Volume | None:
    """Return a project's volume of that name, in any state: it has the name until nothing of it is left."""
    return _one(connection, volumes.c.project_id == project_id, volumes.c.name == name)


def page(connection: Connection, project_id: str, *, after: Position | None, limit: int) -> list[Volume]:
    """Return a project's volumes that are ready, newest first."""
    query = select(*_COLUMNS).where(volumes.c.project_id == project_id, _READY)
    return [_volume(row) for row in connection.execute(newest_first(query, volumes, after, limit)).mappings()]


def count(connection: Connection, project_id: str) -> int:
    """Return how many a project has, in any state; call it under the project's lock."""
    query = select(func.count()).select_from(volumes).where(volumes.c.project_id == project_id)
    return connection.execute(query).scalar_one()


def ids(connection: Connection) -> set[str]:
    """Return every volume that the node may have something of."""
    return {row[0] for row in connection.execute(select(volumes.c.id))}


def move(connection: Connection, seen: Volume, state: VolumeState, now: datetime) -> bool:
    """Change a volume's state if it still is as ``seen`` is; False when it is not."""
    changed = connection.execute(
        update(volumes)
        .where(volumes.c.id == seen.id, volumes.c.state == seen.state)
        .values(plain({"state": state, "updated_at": now}))
    )
    return changed.rowcount == 1


def unfinished(connection: Connection, before: datetime, limit: int) -> list[Volume]:
    """Return those that are to be deleted, and those whose making was given up before that time."""
    abandoned = (volumes.c.state == VolumeState.CREATING) & (volumes.c.updated_at < before)
    query = select(*_COLUMNS).where((volumes.c.state == VolumeState.DELETING) | abandoned).limit(limit)
    return [_volume(row) for row in connection.execute(query).mappings()]


def remove(connection: Connection, volume_id: str) -> None:
    connection.execute(delete(volumes).where(volumes.c.id == volume_id))


def mount(connection: Connection, sandbox_id: str, wanted: Sequence[Mount]) -> None:
    """Note what a new sandbox mounts."""
    if wanted:
        rows = [{"sandbox_id": sandbox_id, "volume_id": one.volume, "path": one.path} for one in wanted]
        connection.execute(insert(mounts), rows)


def users(connection: Connection, volume_id: str) -> list[Sandbox]:
    """Return the sandboxes that mount a volume and are not deleted, the newest last."""
    query = select(mounts.c.sandbox_id).where(mounts.c.volume_id == volume_id).distinct()
    found = sandbox_rows.among(connection, [row[0] for row in connection.execute(query)])
    return sorted(found.values(), key=lambda one: (one.created_at, one.id))


def count_users(connection: Connection, volume_ids: Collection[str]) -> dict[str, int]:
    """Return by how many sandboxes each of the volumes is mounted; those by none are left out."""
    rows = connection.execute(
        select(mounts.c.volume_id, func.count(mounts.c.sandbox_id.distinct()))
        .join(sandboxes, sandboxes.c.id == mounts.c.sandbox_id)
        .where(mounts.c.volume_id.in_(sorted(volume_ids)), sandboxes.c.state != State.DELETED)
        .group_by(mounts.c.volume_id)
    )
    return {row[0]: row[1] for row in rows}


def _one(connection: Connection, *of: Any) -> Volume | None:
    row = connection.execute(select(*_COLUMNS).where(*of)).mappings().one_or_none()
    return None if row is None else _volume(row)


def _volume(row: RowMapping) -> Volume:
    read = Volume(**arguments(row))
    return replace(read, state=VolumeState(row["state"]))

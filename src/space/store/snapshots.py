"""Rows of snapshots."""

from collections.abc import Collection
from dataclasses import fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, exists, func, insert, or_, select, update

from space.model.build import OPEN
from space.model.operation import FINISHED
from space.model.sandbox import Failure, Resources, State
from space.model.snapshot import Snapshot, SnapshotKind, SnapshotState
from space.store.paging import Position, newest_first
from space.store.rows import arguments, plain
from space.store.tables import builds, operations, sandboxes, snapshots

_NAMES = tuple(field.name for field in fields(Snapshot))
_COLUMNS = [snapshots.c[name] for name in _NAMES]
# A sandbox in one of these may have been told to begin from its snapshot.
_BEGINNING = (State.CREATING, State.STARTING, State.WAKING)


def add(connection: Connection, snapshot: Snapshot) -> None:
    connection.execute(insert(snapshots), plain({name: getattr(snapshot, name) for name in _NAMES}))


def get(connection: Connection, snapshot_id: str, *, lock: bool = False) -> Snapshot | None:
    """Return one snapshot of any project, deleted ones included; with ``lock`` nobody else changes it meanwhile."""
    query = select(*_COLUMNS).where(snapshots.c.id == snapshot_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
    return None if row is None else _snapshot(row)


def page(
    connection: Connection,
    project_id: str,
    *,
    sandbox_id: str | None,
    name: str | None,
    states: Collection[SnapshotState],
    after: Position | None,
    limit: int,
) -> list[Snapshot]:
    """Return a project's own snapshots, newest first; no ``states`` means all but deleted ones."""
    query = select(*_COLUMNS).where(snapshots.c.project_id == project_id, snapshots.c.hidden.is_(False))
    if states:
        query = query.where(snapshots.c.state.in_(sorted(states)))
    else:
        query = query.where(snapshots.c.state != SnapshotState.DELETED)
    if sandbox_id is not None:
        query = query.where(snapshots.c.sandbox_id == sandbox_id)
    if name is not None:
        query = query.where(snapshots.c.name == name)
    rows = connection.execute(newest_first(query, snapshots, after, limit))
    return [_snapshot(row) for row in rows.mappings()]


def count(connection: Connection, project_id: str) -> int:
    """Return how many of a project's own the node may have something of; call it under the project's lock."""
    mine = (snapshots.c.project_id == project_id, snapshots.c.hidden.is_(False), snapshots.c.dropped.is_(False))
    return connection.execute(select(func.count()).select_from(snapshots).where(*mine)).scalar_one()


def kept(connection: Connection) -> dict[str, Snapshot]:
    """Return every snapshot that the node may have something of, by id."""
    rows = connection.execute(select(*_COLUMNS).where(snapshots.c.dropped.is_(False)))
    return {row["id"]: _snapshot(row) for row in rows.mappings()}


def change(connection: Connection, seen: Snapshot, **values: Any) -> Snapshot | None:
    """Change a snapshot if it still is in ``seen.state``; None when it is not."""
    row = (
        connection.execute(
            update(snapshots)
            .where(snapshots.c.id == seen.id, snapshots.c.state == seen.state)
            .values(plain(values))
            .returning(*_COLUMNS)
        )
        .mappings()
        .one_or_none()
    )
    return None if row is None else _snapshot(row)


def unwanted(connection: Connection, limit: int, snapshot_id: str | None = None) -> list[str]:
    """Return snapshots that are deleted or failed, that the node may still have, and that nobody uses any more.

    The operation that makes one uses it, and so does a sandbox or a build that is just beginning from it.
    """
    used = or_(
        exists().where(operations.c.id == snapshots.c.operation_id, operations.c.state.not_in(sorted(FINISHED))),
        exists().where(sandboxes.c.snapshot_id == snapshots.c.id, sandboxes.c.state.in_(sorted(_BEGINNING))),
        exists().where(builds.c.snapshot_id == snapshots.c.id, builds.c.state.in_(sorted(OPEN))),
    )
    query = select(snapshots.c.id).where(
        snapshots.c.dropped.is_(False),
        or_(
            snapshots.c.state.in_((SnapshotState.DELETED, SnapshotState.FAILED)),
            # A fork's own, whose fork is over however it ended.
            snapshots.c.hidden.is_(True),
        ),
        ~used,
    )
    if snapshot_id is not None:
        query = query.where(snapshots.c.id == snapshot_id)
    return [row[0] for row in connection.execute(query.order_by(snapshots.c.updated_at).limit(limit))]


def note_dropped(connection: Connection, snapshot_id: str, now: datetime) -> None:
    """Note that the node has nothing of a snapshot any more; a fork's own is deleted with that."""
    mine = snapshots.c.id == snapshot_id
    connection.execute(update(snapshots).where(mine).values(dropped=True, bytes=0, updated_at=now))
    connection.execute(update(snapshots).where(mine, snapshots.c.hidden.is_(True)).values(state=SnapshotState.DELETED))


def sweep(connection: Connection, before: datetime) -> None:
    """Remove the tombstones of snapshots that were dropped before ``before``."""
    connection.execute(
        delete(snapshots).where(
            snapshots.c.state == SnapshotState.DELETED,
            snapshots.c.dropped.is_(True),
            snapshots.c.updated_at < before,
        )
    )


def _snapshot(row: RowMapping) -> Snapshot:
    read = Snapshot(**arguments(row))
    return replace(
        read,
        kind=SnapshotKind(row["kind"]),
        state=SnapshotState(row["state"]),
        resources=Resources(**row["resources"]),
        failure=None if row["failure"] is None else Failure(**row["failure"]),
    )

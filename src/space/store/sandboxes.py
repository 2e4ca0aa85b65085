"""Rows of sandboxes. ``move`` is the only way a state changes: a compare-and-set."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Connection,
    RowMapping,
    and_,
    bindparam,
    delete,
    exists,
    false,
    func,
    insert,
    not_,
    or_,
    select,
    update,
)

from space.model.sandbox import Failure, Resources, Sandbox, State
from space.store.paging import Position, newest_first
from space.store.rows import arguments, plain
from space.store.tables import sandbox_metadata, sandboxes

_NAMES = tuple(field.name for field in fields(Sandbox))
_COLUMNS = [sandboxes.c[name] for name in _NAMES]
# Statements are built once: building one takes longer than SQLite takes to carry it out.
_ADD = insert(sandboxes)
_GET = select(*_COLUMNS).where(sandboxes.c.id == bindparam("wanted"))
_GET_LOCKED = _GET.with_for_update()
_MOVE = (
    update(sandboxes)
    .where(
        sandboxes.c.id == bindparam("seen_id"),
        sandboxes.c.state == bindparam("seen_state"),
        sandboxes.c.operation_id.is_not_distinct_from(bindparam("seen_operation")),
    )
    .returning(*_COLUMNS)
)
_COUNT = select(sandboxes.c.state, func.count()).where(sandboxes.c.state != State.DELETED).group_by(sandboxes.c.state)
NEVER_RAN = and_(
    sandboxes.c.state == State.FAILED, func.coalesce(sandboxes.c.details["ran"].as_boolean(), false()).is_(false())
)
"""Failed before there was a machine: nothing of the host is theirs."""
_TAKING = select(func.count()).where(sandboxes.c.state != State.DELETED, not_(NEVER_RAN))
DEADLINE_STATES = (State.RUNNING, State.PAUSED)


def add(connection: Connection, sandbox: Sandbox) -> None:
    connection.execute(_ADD, plain({name: getattr(sandbox, name) for name in _NAMES}))
    _add_metadata(connection, sandbox.id, sandbox.metadata)


def get(connection: Connection, sandbox_id: str, *, lock: bool = False) -> Sandbox | None:
    """Return one sandbox of any project, deleted ones included as long as their tombstone is kept.

    With ``lock`` nobody else changes the row before this transaction ends (in SQLite a writer is alone anyway).
    """
    query = _GET_LOCKED if lock else _GET
    row = connection.execute(query, {"wanted": sandbox_id}).mappings().one_or_none()
    return None if row is None else _sandbox(row)


def page(
    connection: Connection,
    project_id: str,
    *,
    states: Collection[State],
    metadata: Mapping[str, str],
    after: Position | None,
    limit: int,
) -> list[Sandbox]:
    """Return a project's sandboxes, newest first, without deleted ones; no ``states`` means all others."""
    query = select(*_COLUMNS).where(sandboxes.c.project_id == project_id, sandboxes.c.state != State.DELETED)
    if states:
        query = query.where(sandboxes.c.state.in_(sorted(states)))
    for key, value in metadata.items():
        query = query.where(
            exists().where(
                sandbox_metadata.c.sandbox_id == sandboxes.c.id,
                sandbox_metadata.c.key == key,
                sandbox_metadata.c.value == value,
            )
        )
    rows = connection.execute(newest_first(query, sandboxes, after, limit))
    return [_sandbox(row) for row in rows.mappings()]


def all_present(connection: Connection) -> dict[str, Sandbox]:
    """Return every sandbox that is not deleted, by id."""
    rows = connection.execute(select(*_COLUMNS).where(sandboxes.c.state != State.DELETED))
    return {row["id"]: _sandbox(row) for row in rows.mappings()}


def count_by_state(connection: Connection) -> dict[str, int]:
    return {row[0]: row[1] for row in connection.execute(_COUNT)}


def count_taking(connection: Connection) -> int:
    """Count the sandboxes that take something of the host."""
    return int(connection.execute(_TAKING).scalar_one())


def never_ran(connection: Connection, before: datetime, limit: int) -> list[Sandbox]:
    """Return sandboxes that failed to come up, before that time."""
    rows = connection.execute(
        select(*_COLUMNS)
        .where(NEVER_RAN, sandboxes.c.updated_at <= before)
        .order_by(sandboxes.c.updated_at)
        .limit(limit)
    )
    return [_sandbox(row) for row in rows.mappings()]


def due(connection: Connection, now: datetime, limit: int) -> list[Sandbox]:
    """Return sandboxes whose deadline has passed and that it can still end; a failed one only by deletion."""
    rows = connection.execute(
        select(*_COLUMNS)
        .where(
            sandboxes.c.deadline_at <= now,
            or_(
                sandboxes.c.state.in_(DEADLINE_STATES),
                and_(sandboxes.c.state == State.FAILED, sandboxes.c.on_timeout == "delete"),
            ),
        )
        .order_by(sandboxes.c.deadline_at)
        .limit(limit)
    )
    return [_sandbox(row) for row in rows.mappings()]


def among(connection: Connection, ids: Collection[str]) -> dict[str, Sandbox]:
    """Return those of the sandboxes that are there and not deleted, by id."""
    rows = connection.execute(
        select(*_COLUMNS).where(sandboxes.c.id.in_(sorted(ids)), sandboxes.c.state != State.DELETED)
    )
    return {row["id"]: _sandbox(row) for row in rows.mappings()}


def may_go_idle(connection: Connection) -> list[Sandbox]:
    """Return the running sandboxes that do something when they are idle."""
    rows = connection.execute(
        select(*_COLUMNS).where(sandboxes.c.state == State.RUNNING, sandboxes.c.idle_timeout_s.is_not(None))
    )
    return [_sandbox(row) for row in rows.mappings()]


def move(connection: Connection, seen: Sandbox, **values: Any) -> Sandbox | None:
    """Change a sandbox if it still is in the state and under the operation that ``seen`` has; None when it is not."""
    found = {"seen_id": seen.id, "seen_state": seen.state, "seen_operation": seen.operation_id}
    row = connection.execute(_MOVE, found | plain(values)).mappings().one_or_none()
    return None if row is None else _sandbox(row)


def change(connection: Connection, seen: Sandbox, **values: Any) -> Sandbox | None:
    """Change fields that are not part of the lifecycle, if the sandbox still is in ``seen.state``."""
    row = (
        (
            connection.execute(
                update(sandboxes)
                .where(sandboxes.c.id == seen.id, sandboxes.c.state == seen.state)
                .values(plain(values))
                .returning(*_COLUMNS)
            )
        )
        .mappings()
        .one_or_none()
    )
    if row is not None and "metadata" in values:
        connection.execute(delete(sandbox_metadata).where(sandbox_metadata.c.sandbox_id == seen.id))
        _add_metadata(connection, seen.id, values["metadata"])
    return None if row is None else _sandbox(row)


def sweep(connection: Connection, before: datetime) -> None:
    """Remove the tombstones of sandboxes deleted before ``before``, with their operations and commands."""
    connection.execute(delete(sandboxes).where(sandboxes.c.state == State.DELETED, sandboxes.c.updated_at < before))


def _add_metadata(connection: Connection, sandbox_id: str, pairs: Mapping[str, str]) -> None:
    if pairs:
        connection.execute(
            insert(sandbox_metadata),
            [{"sandbox_id": sandbox_id, "key": key, "value": value} for key, value in pairs.items()],
        )


def _sandbox(row: RowMapping) -> Sandbox:
    read = Sandbox(**arguments(row))
    return replace(
        read,
        state=State(row["state"]),
        resources=Resources(**row["resources"]),
        failure=None if row["failure"] is None else Failure(**row["failure"]),
    )

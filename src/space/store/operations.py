"""Rows of operations, and the leases by which one runner at a time carries each out."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    bindparam,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from space.model.operation import FINISHED, Operation, OperationState
from space.model.sandbox import Failure, State
from space.store.paging import Position, newest_first
from space.store.rows import arguments
from space.store.tables import Time, operations, sandboxes

_NAMES = tuple(field.name for field in fields(Operation))
_COLUMNS = [operations.c[name] for name in _NAMES]
# Statements are built once: building one takes longer than SQLite takes to carry it out.
_ADD = insert(operations)
_GET = select(*_COLUMNS).where(operations.c.id == bindparam("wanted"))
_FINISH = (
    update(operations)
    .where(
        operations.c.id == bindparam("seen_id"),
        operations.c.state == bindparam("seen_state"),
        operations.c.lease_owner.is_not_distinct_from(bindparam("seen_owner")),
    )
    .returning(*_COLUMNS)
)


def add(connection: Connection, operation: Operation) -> None:
    row = {name: getattr(operation, name) for name in _NAMES}
    connection.execute(_ADD, row | {"error": None if operation.error is None else asdict(operation.error)})


def get(connection: Connection, operation_id: str) -> Operation | None:
    row = connection.execute(_GET, {"wanted": operation_id}).mappings().one_or_none()
    return None if row is None else _operation(row)


def page(
    connection: Connection,
    project_id: str,
    *,
    sandbox_id: str | None,
    states: Collection[OperationState],
    after: Position | None,
    limit: int,
) -> list[Operation]:
    """Return a project's operations, newest first; no ``states`` means all."""
    query = select(*_COLUMNS).where(operations.c.project_id == project_id)
    if sandbox_id is not None:
        query = query.where(operations.c.sandbox_id == sandbox_id)
    if states:
        query = query.where(operations.c.state.in_(sorted(states)))
    rows = connection.execute(newest_first(query, operations, after, limit))
    return [_operation(row) for row in rows.mappings()]


def owners(connection: Connection) -> set[str]:
    """Return who holds leases on running operations."""
    rows = connection.execute(
        select(operations.c.lease_owner)
        .distinct()
        .where(operations.c.state == OperationState.RUNNING, operations.c.lease_owner.is_not(None))
    )
    return {row[0] for row in rows}


def claim(
    connection: Connection,
    owner: str,
    *,
    now: datetime,
    until: datetime,
    dead_owners: Collection[str],
    besides: Collection[str],
    limit: int,
) -> list[Operation]:
    """Lease up to ``limit`` operations to ``owner``: new ones, and those with a lapsed lease or a dead owner.

    ``besides`` are left alone: they run already, whatever their lease says.
    """
    wanted = operations.c.id.not_in(sorted(besides))
    return _lease(connection, and_(wanted, _free(now, dead_owners)), owner=owner, now=now, until=until, limit=limit)


def take_over(
    connection: Connection,
    owner: str,
    *,
    now: datetime,
    until: datetime,
    dead_owners: Collection[str],
    among: Collection[str],
) -> list[Operation]:
    """As ``claim``, of the operations ``among`` alone."""
    wanted = and_(operations.c.id.in_(sorted(among)), _free(now, dead_owners))
    return _lease(connection, wanted, owner=owner, now=now, until=until, limit=len(among))


def _free(now: datetime, dead_owners: Collection[str]) -> ColumnElement[bool]:
    return or_(
        operations.c.state == OperationState.PENDING,
        and_(
            operations.c.state == OperationState.RUNNING,
            or_(operations.c.lease_until < now, operations.c.lease_owner.in_(sorted(dead_owners))),
        ),
    )


def _lease(
    connection: Connection, wanted: ColumnElement[bool], *, owner: str, now: datetime, until: datetime, limit: int
) -> list[Operation]:
    free = (
        select(operations.c.id)
        .where(wanted)
        .order_by(operations.c.created_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    rows = connection.execute(
        update(operations)
        .where(operations.c.id.in_(free))
        .values(
            state=OperationState.RUNNING,
            lease_owner=owner,
            lease_until=until,
            started_at=func.coalesce(operations.c.started_at, literal(now, Time())),
        )
        .returning(*_COLUMNS)
    )
    return [_operation(row) for row in rows.mappings()]


def renew(connection: Connection, owner: str, ids: Collection[str], until: datetime) -> set[str]:
    """Prolong the owner's leases; return the ids it still holds."""
    rows = connection.execute(
        update(operations)
        .where(
            operations.c.id.in_(sorted(ids)),
            operations.c.lease_owner == owner,
            operations.c.state == OperationState.RUNNING,
        )
        .values(lease_until=until)
        .returning(operations.c.id)
    )
    return {row[0] for row in rows}


def release(connection: Connection, owner: str) -> None:
    """Give back everything the owner holds, for the next runner to carry on."""
    connection.execute(
        update(operations)
        .where(operations.c.lease_owner == owner, operations.c.state == OperationState.RUNNING)
        .values(state=OperationState.PENDING, lease_owner=None, lease_until=None)
    )


def finish(
    connection: Connection,
    operation: Operation,
    state: OperationState,
    *,
    now: datetime,
    error: Failure | None = None,
    timings: Mapping[str, float] | None = None,
) -> Operation | None:
    """End an operation if it has not ended and its lease still is ``operation``'s; None when that is not so."""
    found = {"seen_id": operation.id, "seen_state": operation.state, "seen_owner": operation.lease_owner}
    values = {
        "state": state,
        "error": None if error is None else asdict(error),
        "timings": dict(timings or {}),
        "finished_at": now,
        "lease_owner": None,
        "lease_until": None,
    }
    row = connection.execute(_FINISH, found | values).mappings().one_or_none()
    return None if row is None else _operation(row)


def note(connection: Connection, operation: Operation, **progress: Any) -> Operation | None:
    """Add to what is written down of an operation, if it runs under the lease that ``operation`` has; else None."""
    row = (
        connection.execute(
            update(operations)
            .where(
                operations.c.id == operation.id,
                operations.c.state == operation.state,
                operations.c.lease_owner.is_not_distinct_from(operation.lease_owner),
            )
            .values(request={**operation.request, **progress})
            .returning(*_COLUMNS)
        )
        .mappings()
        .one_or_none()
    )
    return None if row is None else _operation(row)


def unfinished(connection: Connection, ids: Collection[str]) -> dict[str, Operation]:
    """Return those of the operations that have not ended, by id."""
    rows = connection.execute(
        select(*_COLUMNS).where(operations.c.state.not_in(sorted(FINISHED)), operations.c.id.in_(sorted(ids)))
    )
    return {row["id"]: _operation(row) for row in rows.mappings()}


def creates_of(connection: Connection, sandbox_ids: Collection[str]) -> dict[str, Operation]:
    """Return the operation that makes or made each of the sandboxes, by sandbox, where it was begun."""
    rows = connection.execute(
        select(*_COLUMNS).where(operations.c.sandbox_id.in_(sorted(sandbox_ids)), operations.c.kind == "create")
    )
    return {row["sandbox_id"]: _operation(row) for row in rows.mappings()}


def sweep(connection: Connection, before: datetime, each_max: int) -> None:
    """Remove operations that ended before ``before``, and of each sandbox all that have ended but its newest.

    The last operation of a sandbox stays as long as the sandbox, and all of a deleted one until it is swept itself.
    """
    place = func.row_number().over(
        partition_by=operations.c.sandbox_id, order_by=(operations.c.created_at.desc(), operations.c.id.desc())
    )
    ended = (
        select(operations.c.id, operations.c.finished_at, place.label("place"))
        .join(sandboxes, sandboxes.c.id == operations.c.sandbox_id)
        .where(
            operations.c.state.in_(sorted(FINISHED)),
            sandboxes.c.state != State.DELETED,
            sandboxes.c.operation_id.is_distinct_from(operations.c.id),
        )
        .subquery()
    )
    old = select(ended.c.id).where(or_(ended.c.finished_at < before, ended.c.place > each_max))
    connection.execute(delete(operations).where(operations.c.id.in_(old)))


def _operation(row: RowMapping) -> Operation:
    return replace(
        Operation(**arguments(row)),
        state=OperationState(row["state"]),
        error=None if row["error"] is None else Failure(**row["error"]),
    )

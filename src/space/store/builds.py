"""Rows of builds, and the leases by which one process at a time follows each."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, func, insert, or_, select, update

from space.model.build import OPEN, Build, BuildState
from space.model.sandbox import Failure, Resources
from space.store.paging import Position, newest_first
from space.store.rows import arguments, plain
from space.store.tables import builds

_NAMES = tuple(field.name for field in fields(Build))
_COLUMNS = [builds.c[name] for name in _NAMES]
_TUPLES = ("uploads", "digests", "more_tags")
_OPEN = builds.c.state.in_(sorted(OPEN))


def add(connection: Connection, build: Build) -> None:
    connection.execute(insert(builds), _plain({name: getattr(build, name) for name in _NAMES}))


def get(connection: Connection, build_id: str, *, lock: bool = False) -> Build | None:
    """Return one of any project; with ``lock`` nobody else changes it meanwhile."""
    query = select(*_COLUMNS).where(builds.c.id == build_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
    return None if row is None else _build(row)


def page(
    connection: Connection,
    project_id: str,
    *,
    name: str | None,
    states: Collection[BuildState],
    after: Position | None,
    limit: int,
) -> list[Build]:
    """Return a project's builds, newest first; no ``states`` means all."""
    query = select(*_COLUMNS).where(builds.c.project_id == project_id)
    if name is not None:
        query = query.where(builds.c.name == name)
    if states:
        query = query.where(builds.c.state.in_(sorted(states)))
    return [_build(row) for row in connection.execute(newest_first(query, builds, after, limit)).mappings()]


def count_open(connection: Connection, project_id: str | None = None) -> int:
    """Return how many builds go on, of a project or of everybody."""
    query = select(func.count()).select_from(builds).where(_OPEN)
    if project_id is not None:
        query = query.where(builds.c.project_id == project_id)
    return connection.execute(query).scalar_one()


def owners(connection: Connection) -> set[str]:
    """Return who holds leases."""
    rows = connection.execute(select(builds.c.lease_owner).distinct().where(_OPEN, builds.c.lease_owner.is_not(None)))
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
) -> list[Build]:
    """Lease to ``owner`` builds that go on and that nobody alive follows, the oldest first.

    Its own are among them, but for those that it follows already (``besides``).
    """
    free = or_(
        builds.c.lease_until.is_(None),
        builds.c.lease_until < now,
        builds.c.lease_owner == owner,
        builds.c.lease_owner.in_(sorted(dead_owners)),
    )
    wanted = select(builds.c.id).where(_OPEN, free, builds.c.id.not_in(sorted(besides)))
    wanted = wanted.order_by(builds.c.created_at).limit(limit)
    rows = connection.execute(
        update(builds)
        .where(builds.c.id.in_(wanted.with_for_update(skip_locked=True)))
        .values(lease_owner=owner, lease_until=until)
        .returning(*_COLUMNS)
    )
    return [_build(row) for row in rows.mappings()]


def renew(connection: Connection, owner: str, ids: Collection[str], until: datetime) -> set[str]:
    """Prolong the owner's leases; return the ids it still holds."""
    mine = (builds.c.id.in_(sorted(ids)), builds.c.lease_owner == owner, _OPEN)
    rows = connection.execute(update(builds).where(*mine).values(lease_until=until).returning(builds.c.id))
    return {row[0] for row in rows}


def release(connection: Connection, owner: str) -> None:
    """Give back everything the owner holds, for another to follow."""
    mine = (builds.c.lease_owner == owner, _OPEN)
    connection.execute(update(builds).where(*mine).values(lease_owner=None, lease_until=None))


def change(connection: Connection, seen: Build, **values: Any) -> Build | None:
    """Change a build that goes on and whose lease still is ``seen``'s; None when it is not so."""
    found = connection.execute(
        update(builds)
        .where(builds.c.id == seen.id, _OPEN, builds.c.lease_owner.is_not_distinct_from(seen.lease_owner))
        .values(_plain(values))
        .returning(*_COLUMNS)
    )
    row = found.mappings().one_or_none()
    return None if row is None else _build(row)


def all_open(connection: Connection) -> list[Build]:
    """Return all that go on."""
    return [_build(row) for row in connection.execute(select(*_COLUMNS).where(_OPEN)).mappings()]


def ask_to_end(connection: Connection, build_id: str, now: datetime) -> None:
    """Note that somebody wants a build to end, if it has not."""
    connection.execute(update(builds).where(builds.c.id == build_id, _OPEN).values(cancelling=True, updated_at=now))


def abandoned(connection: Connection, limit: int) -> list[str]:
    """Return builds that are over for us while the node may still be at them."""
    rows = connection.execute(select(builds.c.id).where(builds.c.abandoned.is_(True), ~_OPEN).limit(limit))
    return [row[0] for row in rows]


def note_ended(connection: Connection, build_id: str) -> None:
    """Note that the node is not at it any more."""
    connection.execute(update(builds).where(builds.c.id == build_id).values(abandoned=False))


def old(connection: Connection, before: datetime, each_max: int, limit: int) -> list[str]:
    """Return builds that ended before ``before``, and of each project all ended ones but the newest ``each_max``."""
    newest = (builds.c.created_at.desc(), builds.c.id.desc())
    place = func.row_number().over(partition_by=builds.c.project_id, order_by=newest)
    ended = select(builds.c.id, builds.c.finished_at, place.label("place")).where(~_OPEN).subquery()
    over = or_(ended.c.finished_at < before, ended.c.place > each_max)
    rows = connection.execute(select(ended.c.id).where(over).order_by(ended.c.finished_at).limit(limit))
    return [row[0] for row in rows]


def remove(connection: Connection, build_id: str) -> None:
    connection.execute(delete(builds).where(builds.c.id == build_id, ~_OPEN))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return plain({name: [*value] if name in _TUPLES else value for name, value in values.items()})


def _build(row: RowMapping) -> Build:
    return replace(
        Build(**arguments(row)),
        state=BuildState(row["state"]),
        resources=Resources(**row["resources"]),
        failure=None if row["failure"] is None else Failure(**row["failure"]),
        uploads=tuple(row["uploads"]),
        digests=tuple(row["digests"]),
        more_tags=tuple(row["more_tags"]),
    )

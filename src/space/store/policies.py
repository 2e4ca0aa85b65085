"""Rows of named policies, and which sandboxes have which policy."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, bindparam, delete, func, select, update

from space.model.sandbox import State
from space.store.dialect import insert_new
from space.store.paging import Position, newest_first
from space.store.rows import arguments
from space.store.tables import policies, projects, sandboxes

Reference = str | dict[str, Any] | None
"""How a policy is given: a document, a preset's or a named policy's name, or none."""


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy that sandboxes can follow by its name. ``generation`` counts its documents."""

    id: str
    project_id: str
    name: str
    document: dict[str, Any]
    created_at: datetime
    updated_at: datetime
    generation: int = 1


@dataclass(frozen=True, slots=True)
class Followed:
    """What a sandbox's policy is found by. ``details`` has the one that its template had when it was made."""

    id: str
    project_id: str
    state: State
    own: Reference
    details: dict[str, Any]
    generation: int
    of_project: Reference


_COLUMNS = [policies.c[field.name] for field in fields(NamedPolicy)]
_FOLLOWED = select(
    sandboxes.c.id,
    sandboxes.c.project_id,
    sandboxes.c.state,
    sandboxes.c.policy,
    sandboxes.c.details,
    sandboxes.c.egress_generation,
    projects.c.policy,
).join_from(sandboxes, projects, projects.c.id == sandboxes.c.project_id)
_ONE_FOLLOWED = _FOLLOWED.where(sandboxes.c.id == bindparam("wanted"))
_NAMED = select(*_COLUMNS).where(policies.c.project_id == bindparam("project"), policies.c.name == bindparam("named"))


def add(connection: Connection, policy: NamedPolicy) -> bool:
    """Add a policy; False when the name is taken."""
    return insert_new(connection, policies, **asdict(policy))


def get(connection: Connection, project_id: str, name: str) -> NamedPolicy | None:
    row = connection.execute(_NAMED, {"project": project_id, "named": name}).mappings().one_or_none()
    return None if row is None else _policy(row)


def by_id(connection: Connection, policy_id: str) -> NamedPolicy | None:
    row = connection.execute(select(*_COLUMNS).where(policies.c.id == policy_id)).mappings().one_or_none()
    return None if row is None else _policy(row)


def page(connection: Connection, project_id: str, *, after: Position | None, limit: int) -> list[NamedPolicy]:
    query = select(*_COLUMNS).where(policies.c.project_id == project_id)
    return [_policy(row) for row in connection.execute(newest_first(query, policies, after, limit)).mappings()]


def count(connection: Connection, project_id: str) -> int:
    """Return how many a project has; call it under the project's lock where that must not change."""
    mine = policies.c.project_id == project_id
    return connection.execute(select(func.count()).select_from(policies).where(mine)).scalar_one()


def replace(
    connection: Connection, project_id: str, name: str, document: dict[str, Any], now: datetime
) -> NamedPolicy | None:
    """Give a policy its next document; None when there is no such policy."""
    row = connection.execute(
        update(policies)
        .where(policies.c.project_id == project_id, policies.c.name == name)
        .values(document=document, generation=policies.c.generation + 1, updated_at=now)
        .returning(*_COLUMNS)
    )
    found = row.mappings().one_or_none()
    return None if found is None else _policy(found)


def remove(connection: Connection, project_id: str, name: str) -> bool:
    mine = (policies.c.project_id == project_id, policies.c.name == name)
    return connection.execute(delete(policies).where(*mine)).rowcount == 1


def of_project(connection: Connection, project_id: str) -> Reference:
    """Return the policy of sandboxes of a project that have none of their own, nor their template."""
    return connection.execute(select(projects.c.policy).where(projects.c.id == project_id)).scalar_one()


def set_of_project(connection: Connection, project_id: str, policy: Reference) -> None:
    connection.execute(update(projects).where(projects.c.id == project_id).values(policy=policy))


def followed_by(connection: Connection, sandbox_id: str) -> Followed | None:
    """Return what says which policy a sandbox has, as long as its row is there."""
    row = connection.execute(_ONE_FOLLOWED, {"wanted": sandbox_id}).one_or_none()
    return None if row is None else Followed(*row[:2], State(row[2]), *row[3:])


def followers(connection: Connection, project_id: str | None = None) -> list[Followed]:
    """Return that of all sandboxes, of one project or of everybody, that are not deleted."""
    query = _FOLLOWED.where(sandboxes.c.state != State.DELETED)
    if project_id is not None:
        query = query.where(sandboxes.c.project_id == project_id)
    return [Followed(*row[:2], State(row[2]), *row[3:]) for row in connection.execute(query)]


def changed(connection: Connection, ids: Collection[str]) -> None:
    """Count a change of what may leave these sandboxes."""
    if ids:
        connection.execute(
            update(sandboxes)
            .where(sandboxes.c.id.in_(sorted(ids)))
            .values(egress_generation=sandboxes.c.egress_generation + 1)
        )


def _policy(row: RowMapping) -> NamedPolicy:
    return NamedPolicy(**arguments(row))

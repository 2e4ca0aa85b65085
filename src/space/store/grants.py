"""Rows of grants: which secret may be placed into which requests of which sandbox."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, and_, bindparam, delete, func, insert, or_, select, update

from space.model.sandbox import State
from space.store.paging import Position, newest_first
from space.store.secrets import Secret
from space.store.tables import grants, sandboxes, secrets


@dataclass(frozen=True, slots=True)
class GrantRow:
    """One grant. ``terms`` say where and how the secret is placed; ``env`` which variable has the placeholder."""

    id: str
    project_id: str
    sandbox_id: str
    secret_id: str
    secret: str
    created_at: datetime
    terms: dict[str, Any] = field(default_factory=dict[str, Any])
    placeholder: str | None = None
    env: str | None = None
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


_NAMES = tuple(field.name for field in fields(GrantRow))
_COLUMNS = [grants.c[name] for name in _NAMES]
_IN_FORCE = and_(
    grants.c.revoked_at.is_(None), or_(grants.c.expires_at.is_(None), grants.c.expires_at > bindparam("at"))
)
_WITH_SECRETS = (
    select(*_COLUMNS, *(secrets.c[field.name].label(f"sealed_{field.name}") for field in fields(Secret)))
    .join_from(grants, secrets, secrets.c.id == grants.c.secret_id)
    .where(_IN_FORCE)
    .order_by(grants.c.created_at, grants.c.id)
)
_OF_ONE = _WITH_SECRETS.where(grants.c.sandbox_id == bindparam("wanted"))


def add(connection: Connection, grant: GrantRow) -> None:
    connection.execute(insert(grants).values(asdict(grant)))


def get(connection: Connection, grant_id: str) -> GrantRow | None:
    row = connection.execute(select(*_COLUMNS).where(grants.c.id == grant_id)).mappings().one_or_none()
    return None if row is None else _grant(row)


def page(
    connection: Connection, sandbox_id: str, now: datetime, *, after: Position | None, limit: int
) -> list[GrantRow]:
    """Return a sandbox's grants that are in force, newest first."""
    query = newest_first(select(*_COLUMNS).where(grants.c.sandbox_id == sandbox_id, _IN_FORCE), grants, after, limit)
    return [_grant(row) for row in connection.execute(query, {"at": now}).mappings()]


def count(connection: Connection, sandbox_id: str, now: datetime) -> int:
    """Return how many of a sandbox are in force; call it with the sandbox locked where that must not change."""
    query = select(func.count()).select_from(grants).where(grants.c.sandbox_id == sandbox_id, _IN_FORCE)
    return connection.execute(query, {"at": now}).scalar_one()


def in_force(connection: Connection, sandbox_id: str, now: datetime) -> list[tuple[GrantRow, Secret]]:
    """Return a sandbox's grants that are in force, each with its secret, oldest first."""
    rows = connection.execute(_OF_ONE, {"wanted": sandbox_id, "at": now}).mappings()
    return [_with_secret(row) for row in rows]


def all_in_force(connection: Connection, now: datetime) -> dict[str, list[tuple[GrantRow, Secret]]]:
    """Return the same of every sandbox that has any."""
    found: dict[str, list[tuple[GrantRow, Secret]]] = {}
    for row in connection.execute(_WITH_SECRETS, {"at": now}).mappings():
        grant, secret = _with_secret(row)
        found.setdefault(grant.sandbox_id, []).append((grant, secret))
    return found


def revoke(connection: Connection, now: datetime, *of: ColumnElement[bool]) -> list[str]:
    """Revoke those grants that are not yet; return the sandboxes that had them."""
    rows = connection.execute(
        update(grants).where(grants.c.revoked_at.is_(None), *of).values(revoked_at=now).returning(grants.c.sandbox_id)
    )
    return sorted({row[0] for row in rows})


def revoke_one(connection: Connection, grant_id: str, now: datetime) -> None:
    revoke(connection, now, grants.c.id == grant_id)


def revoke_of_secret(connection: Connection, secret_id: str, now: datetime) -> list[str]:
    """Revoke all grants of a secret; return the sandboxes that had them."""
    return revoke(connection, now, grants.c.secret_id == secret_id)


def holders(connection: Connection, secret_id: str, now: datetime) -> list[str]:
    """Return the sandboxes that a secret is granted to."""
    query = select(grants.c.sandbox_id).distinct().where(grants.c.secret_id == secret_id, _IN_FORCE)
    return sorted(row[0] for row in connection.execute(query, {"at": now}))


def counts(connection: Connection, secret_ids: Collection[str], now: datetime) -> dict[str, int]:
    """Return how many grants of each secret are in force, without those of deleted sandboxes."""
    query = (
        select(grants.c.secret_id, func.count())
        .join_from(grants, sandboxes, sandboxes.c.id == grants.c.sandbox_id)
        .where(grants.c.secret_id.in_(sorted(secret_ids)), _IN_FORCE, sandboxes.c.state != State.DELETED)
        .group_by(grants.c.secret_id)
    )
    return {row[0]: row[1] for row in connection.execute(query, {"at": now})}


def sweep(connection: Connection, before: datetime) -> None:
    """Forget grants that were revoked, or had expired, before ``before``."""
    connection.execute(delete(grants).where(or_(grants.c.revoked_at < before, grants.c.expires_at < before)))


def _grant(row: RowMapping) -> GrantRow:
    return GrantRow(**{name: row[name] for name in _NAMES})


def _with_secret(row: RowMapping) -> tuple[GrantRow, Secret]:
    sealed: dict[str, Any] = {name: row[f"sealed_{name}"] for name in _OF_SECRET}
    return _grant(row), Secret(**sealed)


_OF_SECRET = [field.name for field in fields(Secret) if field.name != "failure"]

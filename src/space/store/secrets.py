"""Rows of secrets. A value is here only as sealed bytes; the key is not in the store."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from space.model.sandbox import Failure, State
from space.store.paging import Position, newest_first
from space.store.rows import arguments, plain
from space.store.tables import grants, sandboxes, secrets


@dataclass(frozen=True, slots=True)
class Secret:
    """One secret. ``version`` counts its values, ``key_id`` says which key ``sealed`` is sealed with.

    ``refresh_at`` is when a token is to be fetched next, ``failure`` why the last attempt at that failed.
    """

    id: str
    project_id: str
    name: str
    kind: str
    created_at: datetime
    updated_at: datetime
    version: int = 1
    key_id: str = ""
    sealed: bytes = field(default=b"", repr=False)
    refresh_at: datetime | None = None
    token_expires_at: datetime | None = None
    failures: int = 0
    failure: Failure | None = None
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


_COLUMNS = [secrets.c[field.name] for field in fields(Secret)]


def add(connection: Connection, secret: Secret) -> None:
    """Add a secret. Whether its name is free is looked at before, under the project's lock."""
    connection.execute(insert(secrets).values(asdict(secret)))


def get(connection: Connection, project_id: str, name: str) -> Secret | None:
    mine = (secrets.c.project_id == project_id, secrets.c.name == name)
    return _one(connection, *mine)


def by_id(connection: Connection, secret_id: str) -> Secret | None:
    return _one(connection, secrets.c.id == secret_id)


def page(connection: Connection, project_id: str, *, after: Position | None, limit: int) -> list[Secret]:
    query = select(*_COLUMNS).where(secrets.c.project_id == project_id)
    return [_secret(row) for row in connection.execute(newest_first(query, secrets, after, limit)).mappings()]


def count(connection: Connection, project_id: str | None = None) -> int:
    """Return how many a project has, or everybody; call it under a lock where that must not change."""
    query = select(func.count()).select_from(secrets)
    if project_id is not None:
        query = query.where(secrets.c.project_id == project_id)
    return connection.execute(query).scalar_one()


def change(connection: Connection, seen: Secret, **values: Any) -> Secret | None:
    """Change a secret that still holds the sealed value that ``seen`` has; None when it does not."""
    row = connection.execute(
        update(secrets)
        .where(secrets.c.id == seen.id, secrets.c.version == seen.version, secrets.c.sealed == seen.sealed)
        .values(plain(values))
        .returning(*_COLUMNS)
    )
    found = row.mappings().one_or_none()
    return None if found is None else _secret(found)


def remove(connection: Connection, secret_id: str) -> None:
    connection.execute(delete(secrets).where(secrets.c.id == secret_id))


def touch(connection: Connection, project_id: str, name: str, now: datetime) -> None:
    """Note that a secret is about to be used."""
    mine = (secrets.c.project_id == project_id, secrets.c.name == name)
    connection.execute(update(secrets).where(*mine).values(updated_at=now))


def remove_unused(connection: Connection, prefix: str, before: datetime) -> None:
    """Delete those of such names that were last used before ``before``, and that no sandbox is granted."""
    granted = (
        select(grants.c.id)
        .join_from(grants, sandboxes, sandboxes.c.id == grants.c.sandbox_id)
        .where(grants.c.secret_id == secrets.c.id, grants.c.revoked_at.is_(None), sandboxes.c.state != State.DELETED)
    )
    unused = (secrets.c.name.startswith(prefix, autoescape=True), secrets.c.updated_at < before, ~granted.exists())
    connection.execute(delete(secrets).where(*unused))


def due(connection: Connection, now: datetime, limit: int, of_a_project: int) -> list[Secret]:
    """Return those whose token is to be fetched now, those waiting longest first, and few of any one project."""
    place = func.row_number().over(partition_by=secrets.c.project_id, order_by=secrets.c.refresh_at)
    waiting = select(secrets.c.id, place.label("place")).where(secrets.c.refresh_at <= now).subquery()
    query = (
        select(*_COLUMNS)
        .join(waiting, waiting.c.id == secrets.c.id)
        .where(waiting.c.place <= of_a_project)
        .order_by(waiting.c.place, secrets.c.refresh_at)
        .limit(limit)
    )
    return [_secret(row) for row in connection.execute(query).mappings()]


def claim(connection: Connection, seen: Secret, until: datetime) -> bool:
    """Let nobody else fetch a token before ``until``; False when somebody has claimed that meanwhile."""
    result = connection.execute(
        update(secrets)
        .where(secrets.c.id == seen.id, secrets.c.version == seen.version, secrets.c.refresh_at == seen.refresh_at)
        .values(refresh_at=until)
    )
    return result.rowcount == 1


def sealed_otherwise(connection: Connection, key_id: str, limit: int) -> list[Secret]:
    """Return some that are sealed with another key than this."""
    query = select(*_COLUMNS).where(secrets.c.key_id != key_id).order_by(secrets.c.id).limit(limit)
    return [_secret(row) for row in connection.execute(query).mappings()]


def keys_in_use(connection: Connection) -> set[str]:
    return {row[0] for row in connection.execute(select(secrets.c.key_id).distinct())}


def _one(connection: Connection, *of: Any) -> Secret | None:
    row = connection.execute(select(*_COLUMNS).where(*of)).mappings().one_or_none()
    return None if row is None else _secret(row)


def _secret(row: RowMapping) -> Secret:
    read = Secret(**arguments(row))
    return replace(read, failure=None if row["failure"] is None else Failure(**row["failure"]))

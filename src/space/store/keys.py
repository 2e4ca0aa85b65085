"""Rows of API keys."""

from dataclasses import asdict, replace
from datetime import datetime

from sqlalchemy import Connection, RowMapping, bindparam, insert, or_, select, update

from space.model.project import Key, Role
from space.store.paging import Position, newest_first
from space.store.rows import arguments
from space.store.tables import keys

_BY_HASH = select(keys).where(keys.c.hash == bindparam("digest"))


def add(connection: Connection, key: Key) -> None:
    connection.execute(insert(keys).values(asdict(key)))


def get(connection: Connection, key_id: str) -> Key | None:
    row = connection.execute(select(keys).where(keys.c.id == key_id)).mappings().one_or_none()
    return None if row is None else _key(row)


def by_hash(connection: Connection, digest: str) -> Key | None:
    """Return the key with that SHA-256, revoked ones included."""
    row = connection.execute(_BY_HASH, {"digest": digest}).mappings().one_or_none()
    return None if row is None else _key(row)


def page(connection: Connection, project_id: str, *, after: Position | None, limit: int) -> list[Key]:
    """Return a project's keys that are not revoked, newest first."""
    query = select(keys).where(keys.c.project_id == project_id, keys.c.revoked_at.is_(None))
    rows = connection.execute(newest_first(query, keys, after, limit))
    return [_key(row) for row in rows.mappings()]


def revoke(connection: Connection, key: Key, now: datetime) -> bool:
    """Revoke a key for good; False when it already is."""
    result = connection.execute(
        update(keys).where(keys.c.id == key.id, keys.c.revoked_at.is_(None)).values(revoked_at=now)
    )
    return result.rowcount == 1


def touch(connection: Connection, key_id: str, now: datetime, older_than: datetime) -> None:
    """Note that a key was used, unless a note younger than ``older_than`` is there."""
    connection.execute(
        update(keys)
        .where(keys.c.id == key_id, or_(keys.c.last_used_at.is_(None), keys.c.last_used_at < older_than))
        .values(last_used_at=now)
    )


def _key(row: RowMapping) -> Key:
    return replace(Key(**arguments(row)), role=Role(row["role"]))

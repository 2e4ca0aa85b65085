"""Rows of idempotency keys: which request a key stood for, and what that made."""

from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import Connection, delete, select, update

from space.store.dialect import insert_new
from space.store.tables import idempotency


@dataclass(frozen=True, slots=True)
class Record:
    """``subject_id`` and ``operation_id`` are what the request with this key made."""

    project_id: str
    key: str
    fingerprint: str
    subject_id: str
    operation_id: str | None
    created_at: datetime


def claim(connection: Connection, record: Record, expired_before: datetime) -> Record | None:
    """Take the key for ``record``; None when that worked, else the record that has it.

    Of many transactions that claim one key, the first to commit has it and the others see its record.
    """
    mine = (idempotency.c.project_id == record.project_id, idempotency.c.key == record.key)
    connection.execute(delete(idempotency).where(*mine, idempotency.c.created_at < expired_before))
    if insert_new(connection, idempotency, **asdict(record)):
        return None
    row = connection.execute(select(idempotency).where(*mine)).mappings().one()
    return Record(**row)


def get(connection: Connection, project_id: str, key: str) -> Record | None:
    """Return what a key stands for."""
    query = select(idempotency).where(idempotency.c.project_id == project_id, idempotency.c.key == key)
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else Record(**row)


def point_to(connection: Connection, project_id: str, key: str, operation_id: str) -> None:
    """Let a key that was just claimed stand for another operation: one that was under way already."""
    connection.execute(
        update(idempotency)
        .where(idempotency.c.project_id == project_id, idempotency.c.key == key)
        .values(operation_id=operation_id)
    )


def remove(connection: Connection, project_id: str, subject_id: str) -> None:
    """Forget the key whose request came to nothing."""
    connection.execute(
        delete(idempotency).where(idempotency.c.project_id == project_id, idempotency.c.subject_id == subject_id)
    )


def sweep(connection: Connection, before: datetime) -> None:
    connection.execute(delete(idempotency).where(idempotency.c.created_at < before))

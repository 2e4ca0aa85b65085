"""Rows of uploads. How much of one has come, the node knows."""

from dataclasses import asdict, fields
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Connection, cast, delete, func, insert, or_, select, update

from space.model.build import OPEN
from space.model.upload import Upload
from space.store.rows import arguments
from space.store.tables import builds, uploads

_COLUMNS = [uploads.c[field.name] for field in fields(Upload)]


def add(connection: Connection, upload: Upload) -> None:
    connection.execute(insert(uploads).values(asdict(upload)))


def get(connection: Connection, upload_id: str, *, lock: bool = False) -> Upload | None:
    """Return one of any project; with ``lock`` nobody else changes or removes it meanwhile."""
    query = select(*_COLUMNS).where(uploads.c.id == upload_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
    return None if row is None else Upload(**arguments(row))


def taken(connection: Connection, project_id: str) -> tuple[int, int]:
    """Return how many a project has and what they may take together; call it under the project's lock."""
    total = cast(func.coalesce(func.sum(uploads.c.size), 0), BigInteger)
    row = connection.execute(select(func.count(), total).where(uploads.c.project_id == project_id)).one()
    return int(row[0]), int(row[1])


def of_files(connection: Connection, project_id: str, files_hash: str) -> list[Upload]:
    """Return a project's uploads of that content, the newest first."""
    query = select(*_COLUMNS).where(uploads.c.project_id == project_id, uploads.c.files_hash == files_hash)
    query = query.where(uploads.c.deleted.is_(False)).order_by(uploads.c.created_at.desc(), uploads.c.id.desc())
    return [Upload(**arguments(row)) for row in connection.execute(query).mappings()]


def longest_unused(connection: Connection, project_id: str) -> str | None:
    """Return the one of a project's uploads of known content that no build reads and that was used longest ago."""
    rows = connection.execute(select(builds.c.uploads).where(builds.c.state.in_(sorted(OPEN))))
    read = {upload_id for row in rows for upload_id in row[0]}
    mine = (uploads.c.project_id == project_id, uploads.c.files_hash.is_not(None), uploads.c.deleted.is_(False))
    query = select(uploads.c.id).where(*mine, uploads.c.id.not_in(sorted(read))).order_by(uploads.c.expires_at)
    return connection.execute(query.limit(1)).scalar_one_or_none()


def change(connection: Connection, upload_id: str, **values: Any) -> None:
    connection.execute(update(uploads).where(uploads.c.id == upload_id).values(**values))


def unwanted(connection: Connection, now: datetime, limit: int) -> list[str]:
    """Return those that are deleted or have expired and that no build reads, and mark them as deleted."""
    rows = connection.execute(select(builds.c.uploads).where(builds.c.state.in_(sorted(OPEN))))
    read = {upload_id for row in rows for upload_id in row[0]}
    over = or_(uploads.c.deleted.is_(True), uploads.c.expires_at < now)
    query = select(uploads.c.id).where(over, uploads.c.id.not_in(sorted(read))).order_by(uploads.c.expires_at)
    found = [row[0] for row in connection.execute(query.limit(limit))]
    connection.execute(update(uploads).where(uploads.c.id.in_(found)).values(deleted=True))
    return found


def remove(connection: Connection, upload_id: str) -> None:
    connection.execute(delete(uploads).where(uploads.c.id == upload_id))

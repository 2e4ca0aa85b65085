"""Rows of builds that were asked for and may not have been begun; each is forgotten some days later."""

from dataclasses import asdict, fields
from datetime import datetime

from sqlalchemy import Connection, delete, func, insert, select, update

from space.model.build import AskedBuild
from space.store.rows import arguments
from space.store.tables import asked_builds

_COLUMNS = [asked_builds.c[field.name] for field in fields(AskedBuild)]


def add(connection: Connection, asked: AskedBuild) -> None:
    connection.execute(insert(asked_builds).values(asdict(asked)))


def get(connection: Connection, build_id: str) -> AskedBuild | None:
    """Return one of any project."""
    row = connection.execute(select(*_COLUMNS).where(asked_builds.c.id == build_id)).mappings().one_or_none()
    return None if row is None else AskedBuild(**arguments(row))


def count(connection: Connection, project_id: str) -> int:
    """Return how many a project has; call it under the project's lock where that must not change."""
    query = select(func.count()).select_from(asked_builds).where(asked_builds.c.project_id == project_id)
    return connection.execute(query).scalar_one()


def has_name(connection: Connection, project_id: str, name: str) -> bool:
    query = select(asked_builds.c.id).where(asked_builds.c.project_id == project_id, asked_builds.c.name == name)
    return connection.execute(query.limit(1)).first() is not None


def note_numbers(connection: Connection, build_id: str, numbers: list[int]) -> None:
    connection.execute(update(asked_builds).where(asked_builds.c.id == build_id).values(numbers=numbers))


def forget(connection: Connection, before: datetime) -> None:
    """Remove those of everybody that were asked for before then."""
    connection.execute(delete(asked_builds).where(asked_builds.c.created_at < before))

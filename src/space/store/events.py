"""Rows of events: what happened in a project, numbered in the order of commits."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from space.model.event import Event
from space.store.tables import events, projects

# Statements are built once: building one takes longer than SQLite takes to carry it out.
_ADD = insert(events)
_NEXT = (
    update(projects)
    .where(projects.c.id == bindparam("project"))
    .values(last_event=projects.c.last_event + 1)
    .returning(projects.c.last_event)
)


def add(connection: Connection, project_id: str, kind: str, data: dict[str, Any], now: datetime) -> int:
    """Add an event with the project's next number, and return that. Call it last: it locks the project's row."""
    number: int = connection.execute(_NEXT, {"project": project_id}).scalar_one()
    row = {"project_id": project_id, "number": number, "kind": kind, "data": data, "created_at": now}
    connection.execute(_ADD, row)
    return number


def after(connection: Connection, project_id: str, number: int, limit: int) -> list[Event]:
    """Return a project's events with a number above ``number``, in order."""
    rows = connection.execute(
        select(events.c.project_id, events.c.number, events.c.kind, events.c.data, events.c.created_at)
        .where(events.c.project_id == project_id, events.c.number > number)
        .order_by(events.c.number)
        .limit(limit)
    )
    return [Event(*row) for row in rows]


def span(connection: Connection, project_id: str) -> tuple[int, int]:
    """Return the numbers of the oldest event kept and of the latest one; (latest + 1, latest) when none is kept."""
    latest = (
        connection.execute(select(projects.c.last_event).where(projects.c.id == project_id))
    ).scalar_one_or_none() or 0
    oldest = (
        connection.execute(select(func.min(events.c.number)).where(events.c.project_id == project_id))
    ).scalar_one()
    return (latest + 1 if oldest is None else oldest), latest


def sweep(connection: Connection, before: datetime) -> None:
    connection.execute(delete(events).where(events.c.created_at < before))

"""Rows of events: what happened in a project, numbered in the order of commits."""

from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from space.model.project import Event
from space.store.tables import events, projects


async def add(connection: AsyncConnection, project_id: str, kind: str, data: dict[str, Any], now: datetime) -> int:
    """Add an event with the project's next number, and return that. Call it last: it locks the project's row."""
    number = (
        await connection.execute(
            update(projects)
            .where(projects.c.id == project_id)
            .values(last_event=projects.c.last_event + 1)
            .returning(projects.c.last_event)
        )
    ).scalar_one()
    await connection.execute(
        insert(events).values(project_id=project_id, number=number, kind=kind, data=data, created_at=now)
    )
    return number


async def after(connection: AsyncConnection, project_id: str, number: int, limit: int) -> list[Event]:
    """Return a project's events with a number above ``number``, in order."""
    rows = await connection.execute(
        select(events.c.project_id, events.c.number, events.c.kind, events.c.data, events.c.created_at)
        .where(events.c.project_id == project_id, events.c.number > number)
        .order_by(events.c.number)
        .limit(limit)
    )
    return [Event(*row) for row in rows]


async def span(connection: AsyncConnection, project_id: str) -> tuple[int, int]:
    """Return the numbers of the oldest event kept and of the latest one; (latest + 1, latest) when none is kept."""
    latest = (
        await connection.execute(select(projects.c.last_event).where(projects.c.id == project_id))
    ).scalar_one_or_none() or 0
    oldest = (
        await connection.execute(select(func.min(events.c.number)).where(events.c.project_id == project_id))
    ).scalar_one()
    return (latest + 1 if oldest is None else oldest), latest


async def sweep(connection: AsyncConnection, before: datetime) -> None:
    await connection.execute(delete(events).where(events.c.created_at < before))

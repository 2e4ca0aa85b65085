"""Rows of commands: whose they are, and how the node described them last."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, func, or_, select, update

from space.model.sandbox import State
from space.store.dialect import insert_new
from space.store.paging import Position, newest_first
from space.store.rows import arguments
from space.store.tables import commands, sandboxes


@dataclass(frozen=True, slots=True)
class CommandRow:
    """One command. ``shown`` is the node's description of it: program, state, and exit once it has ended."""

    id: str
    project_id: str
    sandbox_id: str
    shown: dict[str, Any]
    created_at: datetime


def add(connection: Connection, command: CommandRow) -> None:
    """Add a command; one that is there already stays as it is."""
    insert_new(connection, commands, **asdict(command))


def get(connection: Connection, command_id: str) -> CommandRow | None:
    """Return a command of any project whose sandbox is not deleted."""
    query = (
        select(commands)
        .join(sandboxes, sandboxes.c.id == commands.c.sandbox_id)
        .where(commands.c.id == command_id, sandboxes.c.state != State.DELETED)
    )
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else CommandRow(**arguments(row))


def page(connection: Connection, sandbox_id: str, *, after: Position | None, limit: int) -> list[CommandRow]:
    """Return a sandbox's commands, newest first."""
    query = select(commands).where(commands.c.sandbox_id == sandbox_id)
    rows = connection.execute(newest_first(query, commands, after, limit))
    return [CommandRow(**arguments(row)) for row in rows.mappings()]


def to_be_swept(connection: Connection, before: datetime, each_max: int) -> set[str]:
    """Return the sandboxes that have commands from before ``before``, or more than ``each_max`` of them."""
    rows = connection.execute(
        select(commands.c.sandbox_id)
        .group_by(commands.c.sandbox_id)
        .having(or_(func.min(commands.c.created_at) < before, func.count() > each_max))
    )
    return {row[0] for row in rows}


def sweep(
    connection: Connection, sandbox_id: str, before: datetime, each_max: int, *, besides: Collection[str] = ()
) -> None:
    """Remove a sandbox's commands from before ``before``, and all but its newest; those in ``besides`` stay."""
    of_sandbox = commands.c.sandbox_id == sandbox_id
    newest = newest_first(select(commands.c.id).where(of_sandbox), commands, None, each_max)
    connection.execute(
        delete(commands).where(
            of_sandbox,
            commands.c.id.not_in(sorted(besides)),
            or_(commands.c.created_at < before, commands.c.id.not_in(newest)),
        )
    )


def note(connection: Connection, command_id: str, shown: dict[str, Any]) -> None:
    """Keep how the node describes a command now."""
    connection.execute(update(commands).where(commands.c.id == command_id).values(shown=shown))

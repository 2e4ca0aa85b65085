"""Rows of commands: whose they are, and how the node described them last."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select, update

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


def note(connection: Connection, command_id: str, shown: dict[str, Any]) -> None:
    """Keep how the node describes a command now."""
    connection.execute(update(commands).where(commands.c.id == command_id).values(shown=shown))

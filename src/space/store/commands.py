"""Rows of commands: whose they are, what was asked for, and how they ended once somebody looked."""

from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, insert, select, update

from space.model.command import Command, CommandSpec, Exit, ExitKind, Tty
from space.store.paging import Position, newest_first
from space.store.tables import commands


def add(connection: Connection, command: Command) -> None:
    connection.execute(insert(commands).values(asdict(command)))


def get(connection: Connection, command_id: str) -> tuple[Command, Exit | None] | None:
    row = connection.execute(select(commands).where(commands.c.id == command_id)).mappings().one_or_none()
    return None if row is None else _command(row)


def page(
    connection: Connection, sandbox_id: str, *, after: Position | None, limit: int
) -> list[tuple[Command, Exit | None]]:
    """Return a sandbox's commands, newest first, each with its exit where that is recorded."""
    query = select(commands).where(commands.c.sandbox_id == sandbox_id)
    rows = connection.execute(newest_first(query, commands, after, limit))
    return [_command(row) for row in rows.mappings()]


def record_exit(connection: Connection, command_id: str, exit_: Exit) -> None:
    """Keep how a command ended; the first record stays."""
    connection.execute(
        update(commands).where(commands.c.id == command_id, commands.c.exit.is_(None)).values(exit=asdict(exit_))
    )


def remove(connection: Connection, command_id: str) -> None:
    connection.execute(delete(commands).where(commands.c.id == command_id))


def _command(row: RowMapping) -> tuple[Command, Exit | None]:
    spec = CommandSpec(**row["spec"])
    tty: dict[str, int] | None = row["spec"]["tty"]
    ended: dict[str, Any] | None = row["exit"]
    command = Command(
        id=row["id"],
        project_id=row["project_id"],
        sandbox_id=row["sandbox_id"],
        spec=replace(spec, argv=tuple(spec.argv), tty=None if tty is None else Tty(**tty)),
        created_at=row["created_at"],
    )
    return command, None if ended is None else Exit(ExitKind(ended["kind"]), ended["code"], ended["signal"])

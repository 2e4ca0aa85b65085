"""Commands: whose they are and where to attach. What they do and how they end is the node's to tell."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from space import tracing
from space.control import once
from space.control.control import Control
from space.control.once import Once
from space.control.readiness import rouser
from space.control.tokens import Token
from space.errors import Conflict, NotFound, SpaceError
from space.model.ids import is_id, new_id
from space.model.sandbox import Sandbox
from space.store import commands, idempotency
from space.store.commands import CommandRow
from space.store.paging import Position


async def create(
    control: Control, sandbox: Sandbox, body: bytes, asked_once: Once | None = None
) -> tuple[dict[str, Any], Token]:
    """Reserve a command on the node, and return its description and a token to attach with; nothing runs yet.

    The node checks ``body``. A repeated request gets the same command with a fresh token.
    """
    now = control.now()
    command_id = await _claim(control, sandbox, asked_once)
    try:
        shown = await _reserve(control, sandbox, command_id, body)
    except SpaceError:
        if asked_once is not None:
            await control.store.write(lambda connection: idempotency.remove(connection, sandbox.project_id, command_id))
        raise
    row = CommandRow(command_id, sandbox.project_id, sandbox.id, shown, now)
    await control.store.write(lambda connection: commands.add(connection, row))
    return shown, grant_access(control, row)


async def get(control: Control, project_id: str, command_id: str) -> CommandRow:
    """Return one of the project's commands as it was described last, or raise ``NotFound``."""
    row = None
    if is_id("cmd", command_id):
        row = await control.store.read(lambda connection: commands.get(connection, command_id))
    if row is None or row.project_id != project_id:
        raise NotFound("There is no such command.")
    tracing.note(sandbox=row.sandbox_id, command=row.id)
    return row


async def describe(control: Control, row: CommandRow) -> dict[str, Any]:
    """Return what the node says of a command now, or its last word when it has forgotten it."""
    if row.shown.get("state") == "ended":
        return row.shown
    try:
        shown = await control.node.command(row.id)
    except NotFound:
        shown = _lost(row)
    if shown.get("state") == "ended":
        await control.store.write(lambda connection: commands.note(connection, row.id, shown))
    return shown


async def page(control: Control, sandbox: Sandbox, *, after: Position | None, limit: int) -> Sequence[CommandRow]:
    """Return the sandbox's commands as they were described last."""
    return await control.store.read(lambda connection: commands.page(connection, sandbox.id, after=after, limit=limit))


async def describe_all(control: Control, sandbox: Sandbox, rows: Sequence[CommandRow]) -> list[dict[str, Any]]:
    """Describe many at once; as they were described last when the node cannot be asked now."""
    if all(row.shown.get("state") == "ended" for row in rows):
        return [row.shown for row in rows]
    try:
        known = {str(shown.get("id")): shown for shown in await control.node.commands(sandbox.id)}
    except SpaceError:
        return [row.shown for row in rows]
    return [known.get(row.id) or _lost(row) for row in rows]


def _lost(row: CommandRow) -> dict[str, Any]:
    """Describe a command that the node has forgotten: nobody can say how it ended unless somebody had looked."""
    if row.shown.get("state") == "ended":
        return row.shown
    return {**row.shown, "state": "ended", "exit": {"kind": "lost", "code": None, "signal": None}}


def grant_access(control: Control, row: CommandRow) -> Token:
    """Return a token to attach to one command."""
    return control.signer.for_command(row.sandbox_id, row.id, control.now())


async def _reserve(control: Control, sandbox: Sandbox, command_id: str, body: bytes) -> dict[str, Any]:
    try:
        return await control.node.create_command(sandbox.id, command_id, body)
    except Conflict as error:
        rouse = rouser(control, sandbox)
        if error.code != "wrong-state" or rouse is None:
            raise
        # It fell asleep after it was seen running.
        await rouse()
    return await control.node.create_command(sandbox.id, command_id, body)


async def _claim(control: Control, sandbox: Sandbox, asked_once: Once | None) -> str:
    """Return the id for a new command: the earlier request's when this one repeats it."""
    command_id = new_id("cmd")
    if asked_once is None:
        return command_id

    def record(connection: Connection) -> str:
        earlier = once.first(connection, asked_once, sandbox.project_id, subject_id=command_id, now=control.now())
        return command_id if earlier is None else earlier.subject_id

    return await control.store.write(record)

"""Sandboxes as their owners see them, and what can be changed of one without a lifecycle operation."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from space.control import transitions
from space.control.control import Control
from space.control.tokens import Token
from space.errors import Conflict, NotFound
from space.model.ids import is_id
from space.model.operation import Operation
from space.model.sandbox import RESTING, Sandbox, State
from space.store import operations, sandboxes
from space.store.idempotency import Record
from space.store.paging import Position

BUSY_RETRY_S = 1


async def get(control: Control, project_id: str, sandbox_id: str) -> Sandbox:
    """Return one of the project's sandboxes. Another project's, a deleted and an unknown one are ``NotFound`` alike."""
    found = None
    if is_id("sbx", sandbox_id):
        found = await control.store.read(lambda connection: sandboxes.get(connection, sandbox_id))
    return owned(found, project_id)


async def page(
    control: Control,
    project_id: str,
    *,
    states: Collection[State],
    metadata: Mapping[str, str],
    after: Position | None,
    limit: int,
) -> list[Sandbox]:
    return await control.store.read(
        lambda connection: sandboxes.page(
            connection, project_id, states=states, metadata=metadata, after=after, limit=limit
        )
    )


async def change(control: Control, project_id: str, sandbox_id: str, wanted: Mapping[str, Any]) -> Sandbox:
    """Change name, metadata, deadline or idle policy.

    ``timeout_s`` sets the deadline anew, counted from now; None means never. What is recorded before the deadline is
    acted upon counts, however late that is.
    """
    now = control.now()

    def record(connection: Connection) -> Sandbox:
        seen = owned(sandboxes.get(connection, sandbox_id, lock=True), project_id)
        values = dict(wanted)
        if "timeout_s" in values:
            fresh = replace(seen, timeout_s=values["timeout_s"], deadline_at=None)
            values["deadline_at"] = transitions.deadline(fresh, now, seen.state)
        changed = None
        if seen.state != State.DELETING:
            changed = sandboxes.change(connection, seen, updated_at=now, **values)
        if changed is None:
            raise wrong_state(seen, "changed")
        return changed

    if not is_id("sbx", sandbox_id):
        raise not_found()
    return await control.store.write(record)


def grant_access(control: Control, sandbox: Sandbox) -> Token:
    """Return a token for the sandbox's data plane."""
    return control.signer.for_sandbox(sandbox.id, control.now())


def wrong_state(sandbox: Sandbox, participle: str) -> Conflict:
    """Say that a sandbox cannot be ``participle`` now; retrying helps only while it is between two states."""
    if sandbox.state in RESTING:
        return Conflict(
            f"A sandbox that is {sandbox.state} cannot be {participle}.", code="wrong-state", state=str(sandbox.state)
        )
    return Conflict(
        f"The sandbox is {sandbox.state}: it cannot be {participle} until that has ended.",
        code="busy",
        state=str(sandbox.state),
        operation_id=sandbox.operation_id,
        retry_after_s=BUSY_RETRY_S,
    )


def owned(found: Sandbox | None, project_id: str) -> Sandbox:
    """Return ``found`` if it is the project's and not deleted, or raise ``NotFound``."""
    if found is None or found.project_id != project_id or found.state == State.DELETED:
        raise not_found()
    return found


def not_found() -> NotFound:
    return NotFound("There is no such sandbox.")


def earlier_answer(connection: Connection, record: Record) -> tuple[Sandbox, Operation]:
    """Return what the first request with an idempotency key made, as it is now."""
    sandbox = sandboxes.get(connection, record.subject_id)
    operation = None if record.operation_id is None else operations.get(connection, record.operation_id)
    if sandbox is None or operation is None:
        raise not_found()
    return sandbox, operation

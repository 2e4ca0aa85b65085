"""How a sandbox's row changes: one compare-and-set, and the event that tells of it, in one transaction."""

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from space.model.sandbox import Sandbox, State
from space.store import events, sandboxes


def move(
    connection: Connection,
    seen: Sandbox,
    now: datetime,
    **values: Any,
) -> Sandbox | None:
    """Change a sandbox that still is as ``seen`` (state and operation), and tell it; None when it is not.

    Lock order, the same everywhere: sandbox, operations, project. So this comes last in a transaction.
    """
    moved = sandboxes.move(connection, seen, updated_at=now, **values)
    if moved is not None and (moved.state, moved.ready) != (seen.state, seen.ready):
        tell(connection, moved, now)
    return moved


def tell(connection: Connection, sandbox: Sandbox, now: datetime) -> None:
    """Record the event that ``sandbox`` is in its state since now."""
    failure = sandbox.failure
    data = {
        "sandbox_id": sandbox.id,
        "state": str(sandbox.state),
        "ready": sandbox.ready,
        "failure": None if failure is None else asdict(failure),
        "operation_id": sandbox.operation_id,
    }
    events.add(connection, sandbox.project_id, "sandbox", data, now)


def deadline(sandbox: Sandbox, now: datetime, state: State) -> datetime | None:
    """Return the deadline of a sandbox that comes into ``state`` now.

    It runs while the machine holds resources of the host. Suspended and stopped sandboxes have none, and get a whole
    new one when they run again; pausing neither stops nor renews it.
    """
    if state in {State.SUSPENDED, State.STOPPED, State.DELETED}:
        return None
    if sandbox.deadline_at is not None or sandbox.timeout_s is None:
        return sandbox.deadline_at
    return now + timedelta(seconds=sandbox.timeout_s)

"""What an operation was to make and did not, a snapshot or forks: marked so in the transaction that ends it."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from space.control import transitions
from space.errors import Conflict
from space.model.operation import Operation
from space.model.sandbox import Failure, State
from space.model.snapshot import SnapshotState
from space.store import sandboxes, snapshots

CANCELLED = Failure("cancelled", "The sandbox was deleted before this was done.", Conflict.__name__)


def give_up(connection: Connection, operation: Operation, failure: Failure, now: datetime) -> None:
    """Mark as failed what ``operation`` was to make and has not.

    Lock order: the operation's sandbox, then its forks. A fork never waits for the sandbox it comes from.
    """
    snapshot_id: Any = operation.request.get("snapshot")
    if snapshot_id is not None:
        snapshot = snapshots.get(connection, snapshot_id, lock=True)
        if snapshot is not None and snapshot.state == SnapshotState.CREATING:
            values = {"state": SnapshotState.FAILED, "failure": failure, "bytes": 0, "updated_at": now}
            snapshots.change(connection, snapshot, **values)
    forks: list[str] = operation.request.get("forks", [])
    for sandbox_id in sorted(forks):
        fork = sandboxes.get(connection, sandbox_id, lock=True)
        if fork is not None and fork.state == State.CREATING and fork.operation_id == operation.id:
            transitions.move(connection, fork, now, state=State.FAILED, failure=failure)

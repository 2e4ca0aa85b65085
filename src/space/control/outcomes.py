"""What becomes of an operation and its sandbox: told from what the node did and has, and written down.

A failure never guesses: the node is asked what has become of the machine, and the sandbox's state follows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import structlog
from sqlalchemy import Connection

from space.control import transitions, unmade
from space.control.control import Control
from space.error_wire import kind_of
from space.errors import MachineLost, SpaceError
from space.model.operation import Operation, OperationState
from space.model.sandbox import TRANSITIONS, Failure, Resources, Sandbox, State
from space.store import operations, sandboxes

log = structlog.get_logger(__name__)

NOT_IDLE = "not-idle"
"""The node's answer when a sandbox that was to be idle is not; nothing was done then."""
STATE_OF_MACHINE = {
    "running": State.RUNNING,
    "paused": State.PAUSED,
    "suspended": State.SUSPENDED,
    "stopped": State.STOPPED,
}
EXPECTED = {
    State.RUNNING: {"running", "paused"},
    State.PAUSED: {"running", "paused"},
    State.SUSPENDED: {"suspended"},
    State.STOPPED: {"stopped", "exited"},
}
"""Where a sandbox rests, and the states its machine may be in then."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an operation and in which state its sandbox comes to rest; None: in the one it is in.

    ``also`` is done in the same transaction, once the operation has been ended as this says.
    """

    operation: OperationState
    state: State | None = None
    ready: bool = False
    error: Failure | None = None
    failure: Failure | None = None
    timings: Mapping[str, float] | None = None
    values: Mapping[str, Any] | None = None
    also: Callable[[Connection], object] | None = None


def succeeded(
    control: Control,
    operation: Operation,
    answer: Mapping[str, Any],
    also: Callable[[Connection], object] | None = None,
) -> Outcome:
    """Return the outcome of an operation that the node has carried out."""
    target = TRANSITIONS[operation.request["verb"]].target
    driver = answer.get("driver")
    return Outcome(
        operation=OperationState.SUCCEEDED,
        state=target,
        # `ready` is a fact: the guest has answered, and the node says so.
        ready=target == State.RUNNING and answer.get("ready") is True,
        timings=timings_of(control, operation, answer.get("timings")),
        values={"driver": driver} if isinstance(driver, str) else {},
        also=also,
    )


async def failed(control: Control, sandbox: Sandbox, operation: Operation, error: SpaceError) -> Outcome:
    """Return the outcome of an operation that came to nothing: where the sandbox is now says its machine."""
    verb: str = operation.request["verb"]
    failure = failure_of(error)
    timings = timings_of(control, operation, error.details.get("timings"))
    outcome = Outcome(OperationState.FAILED, State.FAILED, error=failure, failure=failure, timings=timings)
    if failure.code == NOT_IDLE and "if_idle_s" in operation.request:
        # Nothing was done, and nobody has asked for it.
        back, ready = State(operation.request["from"]), operation.request["ready"]
        return replace(outcome, operation=OperationState.CANCELLED, state=back, failure=None, ready=ready)
    log.warning("operation-failed", operation=operation.id, sandbox=sandbox.id, kind=operation.kind, code=failure.code)
    return outcome if verb in {"create", "delete"} else await _as_it_is(control, sandbox, operation, outcome)


async def _as_it_is(control: Control, sandbox: Sandbox, operation: Operation, outcome: Outcome) -> Outcome:
    """Return a failed operation's outcome with the state that the sandbox's machine is in."""
    stays = TRANSITIONS[operation.request["verb"]].stays
    try:
        machine = await control.node.inspect(sandbox.id)
    except SpaceError:
        if stays:
            return replace(outcome, state=None, failure=None)
        lost = Failure("host-lost", "The host that runs the sandbox's machine does not answer.", _LOST)
        return replace(outcome, failure=lost)
    if stays and machine.get("state") in EXPECTED.get(sandbox.state, ()):
        return replace(outcome, state=None, failure=None)
    state = STATE_OF_MACHINE.get(str(machine.get("state")))
    if state is None:
        return replace(
            outcome, failure=cause_of(machine, sandbox.resources) if machine.get("state") == "exited" else outcome.error
        )
    ready = state == State.RUNNING and bool(machine.get("ready", operation.request.get("ready", False)))
    return replace(outcome, state=state, failure=None, ready=ready)


def failure_of(error: SpaceError) -> Failure:
    return Failure(str(error.code), error.message, kind_of(error))


def cause_of(machine: Mapping[str, Any], resources: Resources) -> Failure:
    """Say why a machine is no longer there that had these resources."""
    cause = machine.get("cause")
    code = cause if isinstance(cause, str) and cause in CAUSES else "machine-exited"
    return Failure(code, CAUSES[code].format(resources), _LOST)


_LOST = MachineLost.__name__

CAUSES = {
    "oom-killed": "The machine was killed because it used more than its {0.memory_mib} MiB of memory.",
    "disk-full": "The machine ended because its disk, or the host's, was full.",
    "machine-exited": "The machine ended by itself.",
    "host-lost": "The host that ran the machine was lost.",
    "timed-out": "The machine did not answer in time.",
}


async def apply(control: Control, operation: Operation, outcome: Outcome | None) -> Operation | None:
    """Write down what became of the operation and its sandbox; without an outcome it had nothing left to do.

    None when the operation is another runner's by now: that one carries on, and will find what this one has done.
    """
    now = control.now()
    stays = TRANSITIONS[operation.request["verb"]].stays

    def record(connection: Connection) -> tuple[Operation | None, Sandbox | None]:
        # Read again: what is no part of the lifecycle, the deadline above all, may have been changed meanwhile.
        sandbox = sandboxes.get(connection, operation.sandbox_id, lock=True)
        held = sandbox is not None and sandbox.operation_id == operation.id
        if outcome is None or not (held or stays):
            # Somebody's delete has taken the sandbox over.
            cancelled = operations.finish(connection, operation, OperationState.CANCELLED, now=now)
            if cancelled is not None:
                unmade.give_up(connection, operation, unmade.CANCELLED, now)
            return cancelled, sandbox
        finished = operations.finish(
            connection, operation, outcome.operation, now=now, error=outcome.error, timings=outcome.timings
        )
        if finished is None:
            raise _LeaseLostError
        if outcome.error is not None:
            unmade.give_up(connection, operation, outcome.error, now)
        if outcome.also is not None:
            outcome.also(connection)
        if sandbox is None or not held or outcome.state is None:
            return finished, sandbox
        moved = transitions.move(connection, sandbox, now, **_row(sandbox, outcome, outcome.state, now))
        if moved is None:
            raise _LeaseLostError
        return finished, moved

    try:
        finished, moved = await control.store.write(record)
    except _LeaseLostError:
        return None
    control.changes.notify(operation.id, news=(finished, moved))
    control.changes.notify(operation.project_id)
    return finished


class _LeaseLostError(Exception):
    """Rolls the transaction back: the operation is another runner's by now."""


def _row(sandbox: Sandbox, outcome: Outcome, state: State, now: datetime) -> dict[str, Any]:
    details = dict(sandbox.details)
    if state == State.RUNNING:
        details["ran"] = True
    details["deleting"] = state == State.FAILED and sandbox.state == State.DELETING
    row: dict[str, Any] = {
        "state": state,
        "ready": outcome.ready,
        "failure": outcome.failure,
        "deadline_at": transitions.deadline(sandbox, now, state),
        "details": details,
        **(outcome.values or {}),
    }
    if state == State.DELETED:
        row |= {"env": {}, "details": {}}
    return row


def timings_of(control: Control, operation: Operation, of_node: Any) -> dict[str, float]:
    """Merge the node's phases with the time before the start and the whole."""
    timings: dict[str, float] = {}
    if isinstance(of_node, dict):
        timings = {str(phase): float(value) for phase, value in of_node.items() if isinstance(value, int | float)}
    started = operation.started_at or operation.created_at
    timings["queued"] = (started - operation.created_at).total_seconds()
    timings["total"] = (control.now() - operation.created_at).total_seconds()
    return timings

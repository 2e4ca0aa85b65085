"""Carrying out one operation: load, act on the node, apply by compare-and-set. In the end both rows are at rest.

Every call to the node is idempotent, so that a step may be repeated after a crash, after a lost answer, and by another
runner. A failure never guesses: the node is asked what has become of the machine, and the sandbox's state follows.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import structlog
from sqlalchemy import Connection

from space.control import transitions
from space.control.control import Control
from space.error_wire import kind_of
from space.errors import HostError, MachineLost, OutcomeUnknown, SpaceError, Unavailable
from space.model.operation import FINISHED, Operation, OperationState
from space.model.sandbox import TRANSITIONS, Failure, Sandbox, State
from space.store import operations, sandboxes

log = structlog.get_logger(__name__)

# How long one operation may take in all, repeated calls included. Writing memory to disk takes its time.
BUDGET_S = {
    "create": 180,
    "pause": 60,
    "resume": 60,
    "suspend": 900,
    "wake": 900,
    "stop": 180,
    "start": 180,
    "delete": 180,
}
UNDO_S = 30.0
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
PREDECESSOR_WAIT_S = 15.0
PREDECESSOR_POLL_S = 0.5

STATE_OF_MACHINE = {
    "running": State.RUNNING,
    "paused": State.PAUSED,
    "suspended": State.SUSPENDED,
    "stopped": State.STOPPED,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an operation and in which state its sandbox comes to rest."""

    operation: OperationState
    state: State
    ready: bool = False
    error: Failure | None = None
    failure: Failure | None = None
    timings: Mapping[str, float] | None = None
    values: Mapping[str, Any] | None = None


async def carry_out(control: Control, operation: Operation, sandbox: Sandbox | None = None) -> Operation | None:
    """Bring an operation that is leased to this process to its end; None when the lease was lost meanwhile.

    ``sandbox`` is its sandbox where the caller has just written both; else it is read.
    """
    if sandbox is None:
        sandbox = await control.store.read(lambda connection: sandboxes.get(connection, operation.sandbox_id))
    verb: str = operation.request["verb"]
    if sandbox is None or sandbox.operation_id != operation.id or sandbox.state != TRANSITIONS[verb].passing:
        return await _apply(control, operation, None)
    try:
        async with asyncio.timeout(BUDGET_S[verb]):
            answer = await _DO[verb](control, sandbox, operation)
        outcome = _succeeded(control, operation, verb, answer)
    except TimeoutError:
        error = OutcomeUnknown(f"{verb} did not end within {BUDGET_S[verb]} s.", code="timed-out")
        outcome = await _failed(control, sandbox, operation, verb, error)
    except SpaceError as error:
        outcome = await _failed(control, sandbox, operation, verb, error)
    except Exception as error:
        log.exception("operation-broke", operation=operation.id, error=type(error).__name__)
        broke = HostError("SPACE itself failed; its log says where.", code="internal")
        outcome = await _failed(control, sandbox, operation, verb, broke)
    return await _apply(control, operation, outcome)


async def do_create(control: Control, sandbox: Sandbox, operation: Operation) -> dict[str, Any]:
    """Boot a machine of the sandbox's own."""
    return await _repeat(operation, lambda left: control.node.boot(sandbox.id, wanted(sandbox), left))


async def do_act(control: Control, sandbox: Sandbox, operation: Operation) -> dict[str, Any]:
    """Pause, resume, suspend or stop, which the node does in one call."""
    verb: str = operation.request["verb"]
    return await _repeat(operation, lambda left: control.node.act(sandbox.id, verb, wanted(sandbox), left))


async def do_rouse(control: Control, sandbox: Sandbox, operation: Operation) -> dict[str, Any]:
    """Wake or start: by the way that fits what there is of the machine, when the sandbox had failed before."""
    verb: str = operation.request["verb"]
    if operation.request["from"] == State.FAILED:
        machine = await _repeat(operation, lambda _: control.node.inspect(sandbox.id))
        way = _WAY_BACK.get(str(machine.get("state")))
        if way is None:
            return await _reboot(control, sandbox, operation)
        verb = way
    return await _repeat(operation, lambda left: control.node.act(sandbox.id, verb, wanted(sandbox), left))


async def do_delete(control: Control, sandbox: Sandbox, operation: Operation) -> dict[str, Any]:
    """Destroy the machine, after the operation that held it has let go or has been made to."""
    predecessor: str | None = operation.request.get("after")
    if predecessor is not None:
        await _wait_until_let_go(control, predecessor)
    return await _repeat(operation, lambda left: control.node.destroy(sandbox.id, left))


_DO: dict[str, Callable[[Control, Sandbox, Operation], Awaitable[dict[str, Any]]]] = {
    "create": do_create,
    "pause": do_act,
    "resume": do_act,
    "suspend": do_act,
    "stop": do_act,
    "wake": do_rouse,
    "start": do_rouse,
    "delete": do_delete,
}

# From a failed sandbox: what to ask of the node for the machine that there is. To resume a running one is harmless.
_WAY_BACK = {"running": "resume", "paused": "resume", "suspended": "wake", "stopped": "start", "exited": "start"}


def wanted(sandbox: Sandbox) -> dict[str, Any]:
    """Return what the node needs to know of a sandbox to run its machine."""
    resources = sandbox.resources
    return {
        "template_digest": sandbox.template_digest,
        "template_defaults": sandbox.details.get("template_defaults", {}),
        "driver": None if sandbox.driver == "auto" else sandbox.driver,
        "resources": {
            "cpus": resources.cpus,
            "memory_mib": resources.memory_mib,
            "disk_mib": resources.disk_mib,
            "pids": resources.pids,
        },
        "env": sandbox.env,
        "hostname": sandbox.name or sandbox.id,
    }


async def _repeat(operation: Operation, call: Callable[[float], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Make a call to the node until it answers; a node that restarts is given the time to come back."""
    ends = time.monotonic() + BUDGET_S[operation.request["verb"]]
    pause_s = RETRY_FIRST_S
    while True:
        left = ends - time.monotonic()
        try:
            return await call(max(left, 1.0))
        except (Unavailable, OutcomeUnknown, MachineLost) as error:
            if left <= pause_s or (isinstance(error, MachineLost) and error.code not in _MAY_COME_BACK):
                raise
            log.info("node-call-repeated", operation=operation.id, code=error.code)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, RETRY_MAX_S)


# A guest that was too slow is greeted again by the next call.
_MAY_COME_BACK = {"guest-unresponsive"}


async def _reboot(control: Control, sandbox: Sandbox, operation: Operation) -> dict[str, Any]:
    """Boot a sandbox whose machine is gone without trace: only one that never ran has lost nothing by that."""
    if sandbox.details.get("ran"):
        raise HostError("The sandbox's disk is gone.", code="disk-lost")
    return await _repeat(operation, lambda left: control.node.boot(sandbox.id, wanted(sandbox), left))


async def undo_create(control: Control, sandbox: Sandbox) -> None:
    """Destroy a machine that did not come up, as far as the node answers in time; else `watcher.compare` does later."""
    try:
        async with asyncio.timeout(UNDO_S):
            await control.node.destroy(sandbox.id, UNDO_S)
    except (SpaceError, TimeoutError) as error:
        log.warning("create-not-undone", sandbox=sandbox.id, error=type(error).__name__)


async def _wait_until_let_go(control: Control, operation_id: str) -> None:
    """Wait for the end of the operation that held the machine; after a while make its runner stop, if that is ours."""
    ends = time.monotonic() + PREDECESSOR_WAIT_S
    with control.changes.watch(operation_id) as watch:
        while True:
            held = await control.store.read(lambda connection: operations.get(connection, operation_id))
            lapsed = held is not None and held.lease_until is not None and held.lease_until < control.now()
            if held is None or held.state in FINISHED or lapsed:
                return
            if time.monotonic() >= ends:
                await control.leases.interrupt(operation_id)
                return
            await watch.wait(PREDECESSOR_POLL_S)


def _succeeded(control: Control, operation: Operation, verb: str, answer: dict[str, Any]) -> Outcome:
    target = TRANSITIONS[verb].target
    details: dict[str, Any] = {}
    driver = answer.get("driver")
    if isinstance(driver, str):
        details["driver"] = driver
    return Outcome(
        operation=OperationState.SUCCEEDED,
        state=target,
        # `ready` is a fact: the guest has answered, and the node says so.
        ready=target == State.RUNNING and answer.get("ready") is True,
        timings=_timings(control, operation, answer.get("timings")),
        values=details,
    )


async def _failed(control: Control, sandbox: Sandbox, operation: Operation, verb: str, error: SpaceError) -> Outcome:
    failure = Failure(str(error.code), error.message, kind_of(error))
    timings = _timings(control, operation, error.details.get("timings"))
    log.warning("operation-failed", operation=operation.id, sandbox=sandbox.id, kind=operation.kind, code=failure.code)
    failed = Outcome(OperationState.FAILED, State.FAILED, error=failure, failure=failure, timings=timings)
    if verb == "create":
        await undo_create(control, sandbox)
    if verb in {"create", "delete"}:
        return failed
    try:
        machine = await control.node.inspect(sandbox.id)
    except SpaceError:
        lost = Failure("host-lost", "The host that runs the sandbox's machine does not answer.", _LOST)
        return replace(failed, failure=lost)
    state = STATE_OF_MACHINE.get(str(machine.get("state")))
    if state is None:
        return replace(failed, failure=cause_of(machine) if machine.get("state") == "exited" else failure)
    ready = state == State.RUNNING and bool(machine.get("ready", operation.request.get("ready", False)))
    return replace(failed, state=state, failure=None, ready=ready)


def cause_of(machine: Mapping[str, Any]) -> Failure:
    """Say why a machine is no longer there."""
    cause = machine.get("cause")
    code = cause if isinstance(cause, str) and cause in _CAUSES else "machine-exited"
    return Failure(code, _CAUSES[code], _LOST)


_LOST = MachineLost.__name__

_CAUSES = {
    "oom-killed": "The machine was killed because it used more memory than it may.",
    "disk-full": "The machine ended because its disk, or the host's, was full.",
    "machine-exited": "The machine ended by itself.",
    "host-lost": "The host that ran the machine was lost.",
    "timed-out": "The machine did not answer in time.",
}


async def _apply(control: Control, operation: Operation, outcome: Outcome | None) -> Operation | None:
    """Write down what became of the operation and its sandbox; without an outcome it had nothing left to do."""
    now = control.now()

    def record(connection: Connection) -> tuple[Operation | None, Sandbox | None]:
        # Read again: what is no part of the lifecycle, the deadline above all, may have been changed meanwhile.
        sandbox = sandboxes.get(connection, operation.sandbox_id, lock=True)
        if outcome is None or sandbox is None or sandbox.operation_id != operation.id:
            # Somebody's delete has taken the sandbox over.
            return operations.finish(connection, operation, OperationState.CANCELLED, now=now), sandbox
        finished = operations.finish(
            connection, operation, outcome.operation, now=now, error=outcome.error, timings=outcome.timings
        )
        moved = None
        if finished is not None:
            moved = transitions.move(connection, sandbox, now, **_row(sandbox, outcome, now))
        if moved is None:
            raise _LeaseLostError
        return finished, moved

    try:
        finished, moved = await control.store.write(record)
    except _LeaseLostError:
        # Another runner carries on; it will find what this one has done.
        return None
    control.changes.notify(operation.id, news=(finished, moved))
    control.changes.notify(operation.project_id)
    return finished


class _LeaseLostError(Exception):
    """Rolls the transaction back: the operation is another runner's by now."""


def _row(sandbox: Sandbox, outcome: Outcome, now: datetime) -> dict[str, Any]:
    details = dict(sandbox.details)
    if outcome.state == State.RUNNING:
        details["ran"] = True
    details["deleting"] = outcome.state == State.FAILED and sandbox.state == State.DELETING
    row: dict[str, Any] = {
        "state": outcome.state,
        "ready": outcome.ready,
        "failure": outcome.failure,
        "deadline_at": transitions.deadline(sandbox, now, outcome.state),
        "details": details,
        **(outcome.values or {}),
    }
    if outcome.state == State.DELETED:
        row |= {"env": {}, "details": {}}
    return row


def _timings(control: Control, operation: Operation, of_node: Any) -> dict[str, float]:
    """Merge the node's phases with the time before the start and the whole."""
    timings: dict[str, float] = {}
    if isinstance(of_node, dict):
        timings = {str(phase): float(value) for phase, value in of_node.items() if isinstance(value, int | float)}
    started = operation.started_at or operation.created_at
    timings["queued"] = (started - operation.created_at).total_seconds()
    timings["total"] = (control.now() - operation.created_at).total_seconds()
    return timings

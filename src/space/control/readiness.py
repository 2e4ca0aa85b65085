"""Waiting until a sandbox can be used, and waking one that somebody uses."""

import asyncio

from space.control import operations, sandboxes
from space.control.control import Control
from space.errors import Unavailable
from space.model.operation import FINISHED, Operation, OperationState
from space.model.sandbox import RESTING, TRANSITIONS, Sandbox, State
from space.store import sandboxes as rows

WAKE_WAIT_S = 60.0
WAKES_FROM = {State.PAUSED, State.SUSPENDED, State.STOPPED, State.RESUMING, State.WAKING, State.STARTING}


async def get_running(control: Control, project_id: str, sandbox_id: str) -> Sandbox:
    """Return a sandbox that runs; one with ``wake_on_request`` is woken for it. Raises ``Conflict`` with its state."""
    known = control.running.get(sandbox_id, control.store.generation)
    if known is not None and known.project_id == project_id:
        return known
    generation = control.store.generation
    sandbox = await sandboxes.get(control, project_id, sandbox_id)
    if sandbox.state == State.RUNNING:
        control.running.remember(sandbox, generation)
        return sandbox
    if not sandbox.wake_on_request or sandbox.state not in WAKES_FROM:
        raise sandboxes.wrong_state(sandbox, "used")
    _, operation = await sandboxes.request(control, project_id, sandbox_id, "wake")
    operation = await operations.wait(control, project_id, operation.id, WAKE_WAIT_S)
    sandbox = await sandboxes.get(control, project_id, sandbox_id)
    if sandbox.state == State.RUNNING:
        return sandbox
    if operation.state not in FINISHED:
        raise Unavailable("The sandbox is still waking up.", code="not-ready", state=str(sandbox.state))
    raise sandboxes.wrong_state(sandbox, "used")


async def wait_ready(control: Control, sandbox: Sandbox, operation: Operation, timeout_s: float) -> Sandbox:
    """Return the sandbox after ``operation``: once its guest has answered, where that is what the operation is for."""
    ends = asyncio.get_running_loop().time() + timeout_s
    sandbox_id = sandbox.id
    with control.changes.watch(sandbox.project_id) as watch:
        while (
            sandbox.operation_id != operation.id or sandbox.state not in RESTING or _becomes_ready(sandbox, operation)
        ):
            found = await control.store.read(lambda connection: rows.get(connection, sandbox_id))
            if found is not None:
                sandbox = found
            left = ends - asyncio.get_running_loop().time()
            if left <= 0 or not _becomes_ready(sandbox, operation):
                return sandbox
            await watch.wait(left)
        return sandbox


def _becomes_ready(sandbox: Sandbox, operation: Operation) -> bool:
    return (
        operation.state == OperationState.SUCCEEDED
        and TRANSITIONS[operation.request["verb"]].target == State.RUNNING
        and sandbox.state == State.RUNNING
        and not sandbox.ready
    )

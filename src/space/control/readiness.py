"""Waiting until a sandbox can be used, and waking one that somebody uses."""

import asyncio
from collections.abc import Awaitable, Callable

from space.control import operations, sandboxes, verbs
from space.control.control import Control
from space.errors import Conflict, Unavailable
from space.model.operation import Operation, OperationState
from space.model.sandbox import RESTING, TRANSITIONS, Sandbox, State
from space.store import sandboxes as rows

WAKE_WAIT_S = 60.0
WAKES_FROM = {State.PAUSED, State.SUSPENDED, State.STOPPED, State.RESUMING, State.WAKING, State.STARTING}
FALLS_ASLEEP = {State.PAUSING, State.SUSPENDING, State.STOPPING}


async def get_running(control: Control, project_id: str, sandbox_id: str) -> Sandbox:
    """Return a sandbox that runs; one with ``wake_on_request`` is woken for it.

    One that is just falling asleep is let do so first. Many who ask at once share one waking. Raises ``Conflict`` with
    its state, the error that its waking ended with, or ``Unavailable`` when that takes too long.
    """
    known = control.running.get(sandbox_id, control.store.generation)
    if known is not None and known.project_id == project_id:
        return known
    generation = control.store.generation
    sandbox = await sandboxes.get(control, project_id, sandbox_id)
    if sandbox.state == State.RUNNING:
        control.running.remember(sandbox, generation)
        return sandbox
    return await wake_up(control, sandbox)


async def wake_up(control: Control, sandbox: Sandbox) -> Sandbox:
    """Return the sandbox once it runs, if it wakes on request; see ``get_running``."""
    project_id, sandbox_id = sandbox.project_id, sandbox.id
    ends = asyncio.get_running_loop().time() + WAKE_WAIT_S
    while sandbox.state != State.RUNNING:
        if not sandbox.wake_on_request or sandbox.state not in WAKES_FROM | FALLS_ASLEEP:
            raise sandboxes.wrong_state(sandbox, "used")
        left = ends - asyncio.get_running_loop().time()
        if left <= 0:
            raise Unavailable("The sandbox is still waking up.", code="not-ready", state=str(sandbox.state))
        await _one_step(control, sandbox, left)
        sandbox = await sandboxes.get(control, project_id, sandbox_id)
    return sandbox


def rouser(control: Control, sandbox: Sandbox) -> Callable[[], Awaitable[object]] | None:
    """Return how to wake a sandbox that was running when it was looked at; None when it does not wake on request."""
    if not sandbox.wake_on_request:
        return None

    async def rouse() -> Sandbox:
        return await wake_up(control, await sandboxes.get(control, sandbox.project_id, sandbox.id))

    return rouse


async def wake_for(control: Control, project_id: str, sandbox_id: str) -> None:
    """Wake a sandbox that wakes on request, for a use that is not refused when it does not run."""
    sandbox = await sandboxes.get(control, project_id, sandbox_id)
    if sandbox.wake_on_request and sandbox.state in WAKES_FROM | FALLS_ASLEEP:
        await wake_up(control, sandbox)


async def _one_step(control: Control, sandbox: Sandbox, left: float) -> None:
    """Wait for the operation under way, or ask for the waking and wait for that; raise when the waking failed."""
    if sandbox.state in FALLS_ASLEEP and sandbox.operation_id is not None:
        await operations.wait(control, sandbox.project_id, sandbox.operation_id, left)
        return
    try:
        _, waking = await verbs.request(control, sandbox.project_id, sandbox.id, "wake")
    except Conflict as error:
        # It changed since it was read, or is being copied: that passes.
        held_by = error.details.get("operation_id")
        if error.code != "busy" or not isinstance(held_by, str):
            raise
        await operations.wait(control, sandbox.project_id, held_by, left)
        return
    waking = await operations.wait(control, sandbox.project_id, waking.id, left)
    if waking.state == OperationState.FAILED:
        raise operations.error_of(waking)


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

"""Compares what the node has with what the store says, and makes the two agree.

The store decides what should exist, the node what does.

Order matters: the node's list is read first and the store after it. A sandbox is in the store before its machine is
made, so a machine whose sandbox is not there then is nobody's.
"""

import structlog
from sqlalchemy import Connection

from space.control import sandboxes as requests
from space.control import transitions
from space.control.control import Control
from space.control.lifecycle import cause_of
from space.control.usage import sample
from space.errors import Conflict, NotFound, SpaceError
from space.model.ids import is_id
from space.model.sandbox import Failure, Sandbox, State
from space.store import sandboxes

log = structlog.get_logger(__name__)

DESTROY_TIMEOUT_S = 60
# Where a sandbox rests, and the states its machine may be in then.
EXPECTED = {
    State.RUNNING: {"running", "paused"},
    State.PAUSED: {"running", "paused"},
    State.SUSPENDED: {"suspended"},
    State.STOPPED: {"stopped", "exited"},
}
# A sandbox that was given up although its machine goes on.
LOST_SIGHT = {"host-lost", "node-unavailable", "unavailable", "outcome-unknown", "timed-out"}


async def compare(control: Control) -> None:
    """Destroy machines of no sandbox or of one that never came up; mark sandboxes whose machine is gone as failed."""
    machines = {str(machine.get("machine")): machine for machine in await control.node.machines()}
    present = await control.store.read(sandboxes.all_present)
    for machine_id in machines.keys() - present.keys():
        if is_id("sbx", machine_id):
            log.warning("stray-machine", machine=machine_id)
            await control.node.destroy(machine_id, DESTROY_TIMEOUT_S)
    for sandbox in present.values():
        machine = machines.get(sandbox.id, {"state": "absent"})
        if _differs(sandbox, machine.get("state"), ready=machine.get("ready") is True):
            await check(control, sandbox.id)
    note_usage(control, machines)
    control.history.keep_only(present.keys())


async def check(control: Control, sandbox_id: str) -> None:
    """Look at one machine and make its sandbox say what has become of it, if nothing else has meanwhile."""
    sandbox = await control.store.read(lambda connection: sandboxes.get(connection, sandbox_id))
    if sandbox is None:
        return
    if _never_came_up(sandbox):
        await _undo(control, sandbox)
        return
    # After the sandbox was read: if the row still is the same when it is changed, no operation came in between.
    machine = await control.node.inspect(sandbox_id)
    state, ready = machine.get("state"), machine.get("ready") is True
    guest_lost = sandbox.state == State.RUNNING and state == "running" and sandbox.ready and not ready
    if not guest_lost and not _differs(sandbox, state, ready=ready):
        return
    if sandbox.state == State.FAILED:
        await _take_back(control, sandbox)
    elif state in EXPECTED[sandbox.state]:
        await _change(control, sandbox, state=State.RUNNING, ready=ready)
    else:
        failure = _failure(sandbox, machine)
        log.warning("machine-gone", sandbox=sandbox_id, state=sandbox.state, machine=state, code=failure.code)
        await _change(control, sandbox, state=State.FAILED, ready=False, failure=failure)


def note_usage(control: Control, machines: dict[str, dict[str, object]]) -> None:
    """Add one sample to the history of every machine in the list."""
    now = control.now()
    for machine_id, machine in machines.items():
        taken = sample(machine.get("usage"), now)
        if taken is not None and machine.get("state") in {"running", "paused"}:
            control.history.add(machine_id, taken)


async def follow(control: Control) -> None:
    """Follow the node's events until its connection ends; each one is a hint to look at that machine."""
    async for event in control.node.events():
        machine_id = event.get("machine")
        if isinstance(machine_id, str) and is_id("sbx", machine_id):
            await check(control, machine_id)
        elif "machines" in event:
            await control.node.set_token_key(control.signer.public_pem)
            await compare(control)


def _differs(sandbox: Sandbox, state: object, *, ready: bool) -> bool:
    if _never_came_up(sandbox):
        return state != "absent"
    if sandbox.state == State.FAILED:
        failure = sandbox.failure
        return state in {"running", "paused"} and failure is not None and failure.code in LOST_SIGHT
    if sandbox.state not in EXPECTED:
        return False
    becomes_ready = sandbox.state == State.RUNNING and state == "running" and ready and not sandbox.ready
    return state not in EXPECTED[sandbox.state] or becomes_ready


def _never_came_up(sandbox: Sandbox) -> bool:
    """Whether nobody was ever given its machine, so that nothing is lost with it; one being deleted is not meant."""
    return sandbox.state == State.FAILED and not sandbox.details.get("ran") and not sandbox.details.get("deleting")


async def _undo(control: Control, sandbox: Sandbox) -> None:
    """Destroy what a failed create has left. A start that was asked for meanwhile boots the machine anew."""
    log.warning("half-made-machine", sandbox=sandbox.id)
    await control.node.destroy(sandbox.id, DESTROY_TIMEOUT_S)


def _failure(sandbox: Sandbox, machine: dict[str, object]) -> Failure:
    if machine.get("state") == "absent" and sandbox.state in {State.SUSPENDED, State.STOPPED}:
        return Failure("disk-lost", "The host no longer has the sandbox's disk.")
    return cause_of(machine)


async def _change(control: Control, sandbox: Sandbox, **values: object) -> None:
    now = control.now()

    def record(connection: Connection) -> Sandbox | None:
        fresh = sandboxes.get(connection, sandbox.id, lock=True)
        if fresh is None or (fresh.state, fresh.operation_id) != (sandbox.state, sandbox.operation_id):
            return None
        return transitions.move(connection, fresh, now, **values)

    if await control.store.write(record) is not None:
        control.changes.notify(sandbox.project_id)


async def _take_back(control: Control, sandbox: Sandbox) -> None:
    try:
        await requests.request(control, sandbox.project_id, sandbox.id, "wake")
    except (Conflict, NotFound):
        return
    except SpaceError as error:
        log.warning("not-taken-back", sandbox=sandbox.id, code=error.code)

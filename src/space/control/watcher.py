"""Compares what the node has with what the store says, and makes the two agree.

The store decides what should exist, the node what does.

Order matters: the node's list is read first and the store after it. A sandbox is in the store before its machine is
made, so a machine whose sandbox is not there then is nobody's.
"""

from dataclasses import dataclass

import structlog
from sqlalchemy import Connection

from space.control import attachments, snapshots, transitions, usage, verbs, volumes
from space.control.control import Control
from space.control.outcomes import EXPECTED, cause_of
from space.control.ports import Wanted
from space.errors import Conflict, NotFound, SpaceError
from space.model.ids import is_id
from space.model.sandbox import RESTING, Failure, Sandbox, State
from space.store import operations, sandboxes

log = structlog.get_logger(__name__)

DESTROY_TIMEOUT_S = 60
HALF_MADE = "half-made-machine"
# A sandbox that was given up although its machine goes on.
LOST_SIGHT = {"host-lost", "node-unavailable", "unavailable", "outcome-unknown", "timed-out"}


@dataclass(frozen=True, slots=True)
class Stray:
    """Something that only one of node and store knows. ``removed`` says whether it was cleared up."""

    kind: str
    name: str
    removed: bool


async def compare(control: Control, *, dry_run: bool = False) -> list[Stray]:
    """Make node and store agree, and return what had no counterpart; with ``dry_run`` only look.

    Machines of no sandbox, or of one that never came up, are destroyed; so are snapshots and volumes that are nobody's.
    Sandboxes and snapshots that the node has lost are marked as failed. What is found is counted in ``control.found``.
    """
    machines = {str(machine.get("machine")): machine for machine in await control.node.machines()}
    present, held = await control.store.read(_everything)
    strays: list[tuple[str, str]] = []
    for machine_id in sorted(machines.keys() - present.keys()):
        # A spare is the node's own until it is somebody's.
        if is_id("sbx", machine_id) and not machines[machine_id].get("spare"):
            strays.append(("machine", machine_id))
            if not dry_run:
                log.warning("stray-machine", sandbox=machine_id)
                await control.node.destroy(machine_id, DESTROY_TIMEOUT_S)
    for sandbox in present.values():
        machine = machines.get(sandbox.id, {"state": "absent"})
        state, ready = machine.get("state"), machine.get("ready") is True
        if sandbox.operation_id in held or not _differs(sandbox, state, ready=ready):
            continue
        if _never_came_up(sandbox):
            strays.append((HALF_MADE, sandbox.id))
        elif sandbox.state in EXPECTED and state not in EXPECTED[sandbox.state]:
            strays.append(("sandbox-row", sandbox.id))
        if not dry_run:
            await check(control, sandbox.id)
    strays += await snapshots.compare(control, dry_run=dry_run)
    strays += await volumes.compare(control, dry_run=dry_run)
    if not dry_run:
        await usage.note(control, machines)
        control.found.update(kind for kind, _ in strays if kind != HALF_MADE)
    return [Stray(kind, name, not dry_run) for kind, name in strays]


async def check(control: Control, sandbox_id: str) -> None:
    """Look at one machine and make its sandbox say what has become of it, if nothing else has meanwhile."""
    sandbox, held = await control.store.read(lambda connection: _one(connection, sandbox_id))
    if sandbox is None:
        return
    if held or sandbox.state not in RESTING:
        # Its operation decides; what that has not seen is looked at once it is over.
        control.unsettled.add(sandbox_id)
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


async def check_unsettled(control: Control) -> None:
    """Look again at the machines that had news while an operation held their sandboxes."""
    again = sorted(control.unsettled)
    control.unsettled.clear()
    for sandbox_id in again:
        await check(control, sandbox_id)


async def follow(control: Control) -> None:
    """Follow the node's events until its connection ends; each one is a hint to look at that machine, or to wake it."""
    wanted = Wanted(control)
    try:
        async for event in control.node.events():
            machine_id = event.get("machine")
            if isinstance(machine_id, str) and is_id("sbx", machine_id):
                if event.get("event") == "wanted":
                    wanted.take(machine_id)
                else:
                    await check(control, machine_id)
            elif "machines" in event:
                await control.node.set_token_key(control.signer.public_pem)
                await compare(control)
    finally:
        await wanted.close()


def _everything(connection: Connection) -> tuple[dict[str, Sandbox], set[str]]:
    """Return what is present, and the operations that hold any of it."""
    present = sandboxes.all_present(connection)
    named = [sandbox.operation_id for sandbox in present.values() if sandbox.operation_id is not None]
    unfinished = operations.unfinished(connection, named)
    return present, {held.id for held in unfinished.values() if not held.request.get("let_go")}


def _one(connection: Connection, sandbox_id: str) -> tuple[Sandbox | None, bool]:
    sandbox = sandboxes.get(connection, sandbox_id)
    return sandbox, sandbox is not None and verbs.holder(connection, sandbox) is not None


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
    control.found["half-made-machine"] += 1
    log.warning("half-made-machine", sandbox=sandbox.id)
    await control.node.destroy(sandbox.id, DESTROY_TIMEOUT_S)


def _failure(sandbox: Sandbox, machine: dict[str, object]) -> Failure:
    if machine.get("state") == "absent" and sandbox.state in {State.SUSPENDED, State.STOPPED}:
        return Failure("disk-lost", "The host no longer has the sandbox's disk.")
    return cause_of(machine, sandbox.resources)


async def _change(control: Control, sandbox: Sandbox, **values: object) -> None:
    now = control.now()

    def record(connection: Connection) -> Sandbox | None:
        fresh = sandboxes.get(connection, sandbox.id, lock=True)
        if fresh is None or (fresh.state, fresh.operation_id) != (sandbox.state, sandbox.operation_id):
            return None
        return transitions.move(connection, fresh, now, **values)

    moved = await control.store.write(record)
    if moved is None:
        return
    control.changes.notify(sandbox.project_id)
    if moved.state == State.FAILED:
        await attachments.detach(control, sandbox.id)


async def _take_back(control: Control, sandbox: Sandbox) -> None:
    try:
        # Its machine never ended: the project has it already, whatever its quota is by now.
        await verbs.request(control, sandbox.project_id, sandbox.id, "wake", counted=False)
    except (Conflict, NotFound):
        return
    except SpaceError as error:
        log.warning("not-taken-back", sandbox=sandbox.id, code=error.code)

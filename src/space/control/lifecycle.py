"""Carrying out one operation: load, act on the node, apply by compare-and-set. In the end both rows are at rest.

Every call to the node is idempotent, so that a step may be repeated after a crash, after a lost answer, and by another
runner.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import structlog
from sqlalchemy import Connection

from space.control import attachments, outcomes, volumes
from space.control.control import Control
from space.errors import HostError, MachineLost, OutcomeUnknown, SpaceError, Unavailable
from space.model.ids import is_id
from space.model.operation import FINISHED, Operation
from space.model.sandbox import TRANSITIONS, Sandbox, State
from space.model.snapshot import SnapshotState
from space.store import commands, operations, sandboxes, snapshots
from space.store.commands import CommandRow

log = structlog.get_logger(__name__)

# How long one operation may take in all, repeated calls included. Writing memory to disk takes its time. Of a fork it
# is the copying of its source: what is made from that are operations of their own.
BUDGET_S = {
    "create": 180,
    "pause": 60,
    "resume": 60,
    "suspend": 960,
    "wake": 960,
    "stop": 180,
    "start": 180,
    "delete": 180,
    "snapshot": 960,
    "fork": 960,
}
UNDO_S = 30.0
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
PREDECESSOR_WAIT_S = 15.0
PREDECESSOR_POLL_S = 0.5
INHERITED_MAX = 2048

Answer = dict[str, Any]


async def carry_out(control: Control, operation: Operation, sandbox: Sandbox | None = None) -> Operation | None:
    """Bring an operation that is leased to this process to its end; None when the lease was lost meanwhile.

    ``sandbox`` is its sandbox where the caller has just written both; else it is read.
    """
    if sandbox is None:
        sandbox = await control.store.read(lambda connection: sandboxes.get(connection, operation.sandbox_id))
    if sandbox is None or not still_holds(operation, sandbox):
        return await outcomes.apply(control, operation, None)
    verb: str = operation.request["verb"]
    done = await attempt(operation, lambda: _DO[verb](control, sandbox, operation))
    if isinstance(done, SpaceError):
        if verb == "create":
            await undo_create(control, sandbox)
        outcome = await outcomes.failed(control, sandbox, operation, done)
    else:
        outcome = outcomes.succeeded(control, operation, done, _also(control, operation, done))
    return await outcomes.apply(control, operation, outcome)


def still_holds(operation: Operation, sandbox: Sandbox) -> bool:
    """Whether the sandbox is as the operation found or put it, and nobody's delete has taken it over."""
    passing = TRANSITIONS[operation.request["verb"]].passing
    return sandbox.operation_id == operation.id and (passing is None or sandbox.state == passing)


async def attempt(operation: Operation, work: Callable[[], Awaitable[Answer]]) -> Answer | SpaceError:
    """Do ``work`` within its operation's budget; return the node's answer, or the error that it ended with."""
    verb: str = operation.request["verb"]
    try:
        async with asyncio.timeout(BUDGET_S[verb]):
            return await work()
    except TimeoutError:
        return OutcomeUnknown(f"{verb} did not end within {BUDGET_S[verb]} s.", code="timed-out")
    except SpaceError as error:
        return error
    except Exception as error:
        log.exception("operation-broke", operation=operation.id, error=type(error).__name__)
        return HostError("SPACE itself failed; its log says where.", code="internal")


async def do_create(control: Control, sandbox: Sandbox, operation: Operation) -> Answer:
    """Boot a machine of the sandbox's own; meanwhile the gateway is told what may leave it."""
    async with attachments.meanwhile(attachments.attach(control, sandbox.id)):
        return await repeat(operation, lambda left: control.node.boot(sandbox.id, _at_boot(sandbox), left))


async def do_act(control: Control, sandbox: Sandbox, operation: Operation) -> Answer:
    """Pause, resume, suspend or stop, which the node does in one call."""
    verb: str = operation.request["verb"]
    asked = {**wanted(sandbox), **_condition(operation)}
    answer = await repeat(operation, lambda left: control.node.act(sandbox.id, verb, asked, left))
    if verb in {"suspend", "stop"}:
        await attachments.detach(control, sandbox.id)
    return answer


async def do_rouse(control: Control, sandbox: Sandbox, operation: Operation) -> Answer:
    """Wake or start: by the way that fits what there is of the machine, when the sandbox had failed before."""
    verb: str = operation.request["verb"]
    if operation.request["from"] == State.FAILED:
        machine = await repeat(operation, lambda _: control.node.inspect(sandbox.id))
        way = _WAY_BACK.get(str(machine.get("state")))
        if way is None:
            return await _reboot(control, sandbox, operation)
        verb = way
    async with attachments.meanwhile(attachments.attach(control, sandbox.id)):
        return await repeat(operation, lambda left: control.node.act(sandbox.id, verb, wanted(sandbox), left))


async def do_delete(control: Control, sandbox: Sandbox, operation: Operation) -> Answer:
    """Destroy the machine, after the operation that held it has let go or has been made to."""
    predecessor: str | None = operation.request.get("after")
    if predecessor is not None:
        await _wait_until_let_go(control, predecessor)
    condition = _condition(operation)
    answer = await repeat(operation, lambda left: control.node.destroy(sandbox.id, left, condition))
    await attachments.detach(control, sandbox.id)
    return answer


async def do_snapshot(control: Control, sandbox: Sandbox, operation: Operation) -> Answer:
    """Have the node keep a snapshot; the machine is as before."""
    asked = operation.request
    return await repeat(
        operation, lambda left: control.node.snapshot(sandbox.id, asked["snapshot"], asked["kind"], left)
    )


_DO: dict[str, Callable[[Control, Sandbox, Operation], Awaitable[Answer]]] = {
    "create": do_create,
    "pause": do_act,
    "resume": do_act,
    "suspend": do_act,
    "stop": do_act,
    "wake": do_rouse,
    "start": do_rouse,
    "delete": do_delete,
    "snapshot": do_snapshot,
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
            "io_weight": resources.io_weight,
        },
        "volumes": [{"volume": one.volume, "path": one.path} for one in volumes.mounts_of(sandbox)],
        "env": sandbox.env,
        "hostname": sandbox.name or sandbox.id,
    }


def _at_boot(sandbox: Sandbox) -> dict[str, Any]:
    return wanted(sandbox) if sandbox.snapshot_id is None else {**wanted(sandbox), "snapshot": sandbox.snapshot_id}


def _condition(operation: Operation) -> dict[str, Any]:
    return {name: operation.request[name] for name in ("if_idle_s",) if name in operation.request}


async def repeat(operation: Operation, call: Callable[[float], Awaitable[Answer]]) -> Answer:
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


async def _reboot(control: Control, sandbox: Sandbox, operation: Operation) -> Answer:
    """Boot a sandbox whose machine is gone without trace: only one that never ran has lost nothing by that."""
    if sandbox.details.get("ran"):
        raise HostError("The sandbox's disk is gone.", code="disk-lost")
    if sandbox.snapshot_id is not None:
        snapshot_id = sandbox.snapshot_id
        origin = await control.store.read(lambda connection: snapshots.get(connection, snapshot_id))
        if origin is None or origin.state != SnapshotState.READY:
            raise HostError("The snapshot that the sandbox was to begin from is gone. Delete it.", code="disk-lost")
    return await do_create(control, sandbox, operation)


async def undo_create(control: Control, sandbox: Sandbox) -> None:
    """Destroy a machine that did not come up, as far as the node answers in time; else `watcher.compare` does later."""
    try:
        async with asyncio.timeout(UNDO_S):
            await control.node.destroy(sandbox.id, UNDO_S)
    except (SpaceError, TimeoutError) as error:
        log.warning("create-not-undone", sandbox=sandbox.id, error=type(error).__name__)
    await attachments.detach(control, sandbox.id)


async def _wait_until_let_go(control: Control, operation_id: str) -> None:
    """Wait for the end of the operation that held the machine; after a while make its runner stop, if that is ours."""
    ends = time.monotonic() + PREDECESSOR_WAIT_S
    with control.changes.watch(operation_id) as watch:
        while True:
            held = await control.store.read(lambda connection: operations.get(connection, operation_id))
            lapsed = held is not None and held.lease_until is not None and held.lease_until < control.now()
            if held is None or held.state in FINISHED or held.request.get("let_go") or lapsed:
                return
            if time.monotonic() >= ends:
                await control.leases.interrupt(operation_id)
                return
            await watch.wait(PREDECESSOR_POLL_S)


def _also(control: Control, operation: Operation, answer: Answer) -> Callable[[Connection], object] | None:
    """Return what is to be written down beside the sandbox once the operation has succeeded."""
    now, verb = control.now(), operation.request["verb"]
    if verb == "snapshot":
        return lambda connection: note_kept(connection, operation, answer, now)
    rows = _inherited(operation, answer.get("commands"), now) if verb in {"create", "start", "wake"} else []
    return (lambda connection: [commands.add(connection, row) for row in rows]) if rows else None


def note_kept(connection: Connection, operation: Operation, answer: Answer, now: Any) -> None:
    """Write down that the operation's snapshot is there; one that was deleted meanwhile stays so, and is dropped."""
    snapshot = snapshots.get(connection, operation.request["snapshot"], lock=True)
    if snapshot is not None and snapshot.state == SnapshotState.CREATING:
        taken = answer.get("bytes")
        values = {"bytes": taken if isinstance(taken, int) and taken >= 0 else snapshot.bytes, "updated_at": now}
        snapshots.change(connection, snapshot, state=SnapshotState.READY, **values)


def _inherited(operation: Operation, shown: Any, now: Any) -> list[CommandRow]:
    """Return rows for the commands that go on in a machine that was restored, as the node shows them."""
    listed = cast("list[Any]", shown)[:INHERITED_MAX] if isinstance(shown, list) else []
    described = [cast("Mapping[str, Any]", item) for item in listed if isinstance(item, dict)]
    return [
        CommandRow(str(item["id"]), operation.project_id, operation.sandbox_id, dict(item), now)
        for item in described
        if is_id("cmd", str(item.get("id")))
    ]

"""Forks: sandboxes that go on from another one's state. Recording them, and the operation that makes them.

The source is copied once, to a snapshot of the fork's own, and is free again. Each fork then comes up from that by an
operation of its own, so that what becomes of one does not touch the others; until its turn comes it is held by the
fork's operation. That one can be taken up again at any point: what is left to do is told by the rows.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import structlog
from sqlalchemy import Connection

from space.control import grants, lifecycle, once, outcomes, quotas, snapshots, transitions, unmade, volumes
from space.control.control import Control
from space.control.leases import is_dead
from space.control.once import Once
from space.control.operations import new_operation
from space.control.sandboxes import not_found, owned
from space.control.verbs import Recorder
from space.errors import HostError, SpaceError
from space.model.ids import is_id, new_id
from space.model.operation import FINISHED, Operation, OperationState
from space.model.sandbox import Failure, Sandbox, State
from space.model.snapshot import SnapshotKind
from space.store import operations, sandboxes
from space.store import snapshots as rows

log = structlog.get_logger(__name__)

AT_ONCE = 4
WAIT_S = 1.0
NAMED_MAX = 5


@dataclass(frozen=True, slots=True)
class NewForks:
    """What a caller asks for. ``changes`` are fields of a sandbox that differ from the source's."""

    count: int = 1
    name: str | None = None
    changes: dict[str, Any] = field(default_factory=dict[str, Any])


async def request_fork(
    control: Control, project_id: str, sandbox_id: str, wanted: NewForks, asked_once: Once | None = None
) -> tuple[list[Sandbox], Operation]:
    """Record forks and the operation that will make them, in one transaction; the source stays as it is.

    Raises ``NotFound``, ``Conflict`` with the source's state, ``LimitExceeded`` or ``HostFull``.
    """
    if not is_id("sbx", sandbox_id):
        raise not_found()
    now, operation_id = control.now(), new_id("op")
    ids = [new_id("sbx") for _ in range(wanted.count)]
    with control.leases.reserve() as seat:

        def record(connection: Connection) -> tuple[list[Sandbox], Operation, Sandbox | None]:
            earlier = once.first(
                connection, asked_once, project_id, subject_id=sandbox_id, operation_id=operation_id, now=now
            )
            if earlier is not None:
                return (*_earlier(connection, earlier.operation_id), None)
            seen = owned(sandboxes.get(connection, sandbox_id, lock=True), project_id)
            recorder = Recorder(control, connection, seat, now, operation_id)
            asked = {"forks": ids, "snapshot": (snapshot_id := new_id("snp"))}
            source, operation = recorder.record(seen, "fork", asked)
            quotas.check_room(control, connection, wanted.count)
            quotas.admit(connection, project_id, quotas.of_new(seen.resources, wanted.count))
            hidden = replace(snapshots.of(source, SnapshotKind.FULL, operation, now), id=snapshot_id, hidden=True)
            rows.add(connection, hidden)
            given = grants.placeholders(connection, source.id, now)
            made = [_fork_of(source, fork_id, wanted, operation, given) for fork_id in ids]
            for fork in made:
                sandboxes.add(connection, fork)
                volumes.mount(connection, fork)
                transitions.tell(connection, fork, now)
            grants.copy(connection, source, made, now)
            return made, operation, source

        made, operation, source = await control.store.write(record)
        if source is not None:
            seat.start(operation, source)
            control.changes.notify(project_id)
    return made, operation


async def of_operation(control: Control, operation: Operation) -> list[Sandbox]:
    """Return the forks of an operation that are there, as they are now."""
    forks: list[str] = operation.request["forks"]
    return await control.store.read(lambda connection: _present(connection, forks))


async def carry_out(control: Control, operation: Operation, sandbox: Sandbox | None = None) -> Operation | None:
    """Bring a fork that is leased to this process to its end; None when the lease was lost meanwhile."""
    going_on = operation.request.get("let_go") is True
    ended, taken = (None, operation) if going_on else await _take(control, operation, sandbox)
    if taken is None:
        return ended
    await _make(control, taken)
    ended = await _finish(control, taken)
    await snapshots.drop_unwanted(control, taken.request["snapshot"])
    return ended


async def _take(
    control: Control, operation: Operation, source: Sandbox | None
) -> tuple[Operation | None, Operation | None]:
    """Copy the source and let it go. Returns how the fork ended, if it did, and the operation to go on with, if not."""
    if source is None:
        source = await control.store.read(lambda connection: sandboxes.get(connection, operation.sandbox_id))
    if source is None or not lifecycle.still_holds(operation, source):
        return await outcomes.apply(control, operation, None), None
    snapshot_id: str = operation.request["snapshot"]
    kind, machine = str(SnapshotKind.FULL), source.id
    done = await lifecycle.attempt(
        operation,
        lambda: lifecycle.repeat(operation, lambda left: control.node.snapshot(machine, snapshot_id, kind, left)),
    )
    if isinstance(done, SpaceError):
        ended = await outcomes.apply(control, operation, await outcomes.failed(control, source, operation, done))
        await snapshots.drop_unwanted(control, snapshot_id)
        return ended, None
    now = control.now()
    timings = {**outcomes.timings_of(control, operation, done.get("timings"))}
    timings["snapshot"] = timings.pop("total") - timings["queued"]

    def record(connection: Connection) -> Operation | None:
        noted = operations.note(connection, operation, let_go=True, timings=timings)
        if noted is not None:
            lifecycle.note_kept(connection, operation, done, now)
        return noted

    noted = await control.store.write(record)
    control.changes.notify(operation.id)
    control.changes.notify(operation.project_id)
    return None, noted


@dataclass(frozen=True, slots=True)
class _Progress:
    """Where the forks of one operation are: not begun, and those that are coming up."""

    waiting: list[Sandbox]
    coming: list[Operation]


async def _make(control: Control, operation: Operation) -> None:
    """Bring the forks up, a few at a time, whoever carries each one out; return when nothing is left to wait for."""
    with control.changes.watch(operation.project_id) as watch:
        while True:
            progress = await control.store.read(lambda connection: _progress(connection, operation))
            if not progress.waiting and not progress.coming:
                return
            await _take_over(control, progress.coming)
            for fork in progress.waiting[: max(0, AT_ONCE - len(progress.coming))]:
                await _begin(control, operation, fork)
            await watch.wait(WAIT_S)


def _progress(connection: Connection, operation: Operation) -> _Progress:
    forks: list[str] = operation.request["forks"]
    present = _present(connection, forks)
    creates = operations.creates_of(connection, forks)
    waiting = [fork for fork in present if fork.state == State.CREATING and fork.operation_id == operation.id]
    return _Progress(waiting, [create for create in creates.values() if create.state not in FINISHED])


async def _begin(control: Control, operation: Operation, fork: Sandbox) -> None:
    """Give one fork an operation of its own, and that to the runner."""
    create = control.leases.leased(new_operation(control, fork, "create", {"verb": "create"}))
    now = control.now()

    def record(connection: Connection) -> Sandbox | None:
        seen = sandboxes.get(connection, fork.id, lock=True)
        if seen is None or seen.state != State.CREATING or seen.operation_id != operation.id:
            return None
        operations.add(connection, create)
        return transitions.move(connection, seen, now, operation_id=create.id)

    begun = await control.store.write(record)
    if begun is not None:
        control.leases.hand_over(create, begun)


async def _take_over(control: Control, coming: list[Operation]) -> None:
    """Take up operations of forks that a process has left behind, without waiting for a seat."""
    leases, now = control.leases, control.now()
    left = [create for create in coming if create.id not in leases.running and _is_left(create, now)]
    if not left:
        return
    dead = {create.lease_owner for create in left if create.lease_owner is not None and is_dead(create.lease_owner)}
    claimed = await control.store.write(
        lambda connection: operations.take_over(
            connection,
            leases.owner,
            now=now,
            until=leases.until(),
            dead_owners=dead,
            among=[create.id for create in left],
        )
    )
    for create in claimed:
        leases.hand_over(create, None)


def _is_left(create: Operation, now: datetime) -> bool:
    if create.state == OperationState.PENDING or create.lease_owner is None or create.lease_until is None:
        return True
    return create.lease_until < now or is_dead(create.lease_owner)


async def _finish(control: Control, operation: Operation) -> Operation | None:
    """End the fork: it has succeeded when every one of its sandboxes came up."""
    now = control.now()
    forks: list[str] = operation.request["forks"]
    timings: dict[str, float] = dict(operation.request.get("timings", {}))
    timings["total"] = (now - operation.created_at).total_seconds()
    timings["forks"] = max(0.0, timings["total"] - timings.get("queued", 0.0) - timings.get("snapshot", 0.0))

    def record(connection: Connection) -> Operation | None:
        creates = operations.creates_of(connection, forks)
        longest = [create.timings.get("total", 0.0) for create in creates.values()]
        failures = {fork_id: _failure(creates.get(fork_id)) for fork_id in forks}
        failed = {fork_id: failure for fork_id, failure in failures.items() if failure is not None}
        state = OperationState.FAILED if failed else OperationState.SUCCEEDED
        error = _incomplete(failed, len(forks)) if failed else None
        told = {**timings, "fork-longest": max(longest, default=0.0)}
        ended = operations.finish(connection, operation, state, now=now, error=error, timings=told)
        if ended is not None and error is not None:
            unmade.give_up(connection, operation, error, now)
        return ended

    ended = await control.store.write(record)
    if ended is not None:
        control.changes.notify(operation.id)
        control.changes.notify(operation.project_id)
    return ended


def _failure(create: Operation | None) -> Failure | None:
    """Return why a fork did not come up; None when it did."""
    if create is None or create.state == OperationState.CANCELLED:
        return unmade.CANCELLED
    return None if create.state == OperationState.SUCCEEDED else create.error or unmade.CANCELLED


def _incomplete(failed: dict[str, Failure], count: int) -> Failure:
    """Return one failure for all: their own where it is the same for each."""
    some = ", ".join(f"{fork_id} ({failure.code})" for fork_id, failure in list(failed.items())[:NAMED_MAX])
    more = ", …" if len(failed) > NAMED_MAX else ""
    rest = " The others run." if len(failed) < count else ""
    message = f"{len(failed)} of {count} forks did not come up: {some}{more}.{rest}"
    first = next(iter(failed.values()))
    details = {"forks": {fork_id: failure.code for fork_id, failure in failed.items()}}
    if all(failure.code == first.code for failure in failed.values()):
        return Failure(first.code, message, first.kind, details)
    mixed = outcomes.failure_of(HostError(message, code="fork-incomplete"))
    return replace(mixed, details=details)


def _fork_of(
    source: Sandbox, fork_id: str, wanted: NewForks, operation: Operation, placeholders: dict[str, str]
) -> Sandbox:
    """Return a fork as it is to be recorded. Its grants' placeholders are in any environment that it is given."""
    now = operation.created_at
    fork = replace(
        source,
        id=fork_id,
        state=State.CREATING,
        ready=False,
        name=wanted.name,
        deadline_at=None,
        failure=None,
        operation_id=operation.id,
        created_at=now,
        updated_at=now,
        details=snapshots.of_template(source, with_memory=True),
        snapshot_id=operation.request["snapshot"],
        forked_from=source.id,
    )
    changed = replace(fork, **wanted.changes)
    return replace(changed, env={**changed.env, **placeholders})


def _present(connection: Connection, ids: list[str]) -> list[Sandbox]:
    found = sandboxes.among(connection, ids)
    return [found[sandbox_id] for sandbox_id in ids if sandbox_id in found]


def _earlier(connection: Connection, operation_id: str | None) -> tuple[list[Sandbox], Operation]:
    operation = None if operation_id is None else operations.get(connection, operation_id)
    if operation is None:
        raise not_found()
    return _present(connection, operation.request["forks"]), operation

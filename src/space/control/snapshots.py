"""Snapshots as their owners see them, the recording of new ones, and dropping those that nobody wants."""

from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from typing import Any

import structlog
from sqlalchemy import Connection

from space.control import once, quotas
from space.control.control import Control
from space.control.once import Once
from space.control.sandboxes import not_found as no_such_sandbox
from space.control.sandboxes import owned, wrong_state
from space.control.verbs import Recorder
from space.errors import Conflict, InvalidRequest, LimitExceeded, NotFound, SpaceError
from space.model.ids import is_id, new_id
from space.model.operation import Operation
from space.model.project import Used
from space.model.sandbox import WITH_MEMORY, Failure, Sandbox
from space.model.snapshot import Snapshot, SnapshotKind, SnapshotState
from space.store import operations, sandboxes, snapshots
from space.store.paging import Position

log = structlog.get_logger(__name__)

SNAPSHOTS_MAX = 1000
"""Of one project, however little each of them takes: the host lists them all again and again."""
MIB = 1024 * 1024
DROP_TIMEOUT_S = 60
DROPPED_AT_ONCE = 50
NOT_READY_RETRY_S = 1


async def request_snapshot(
    control: Control,
    project_id: str,
    sandbox_id: str,
    kind: SnapshotKind,
    *,
    name: str | None = None,
    asked_once: Once | None = None,
) -> tuple[Snapshot, Operation]:
    """Record a snapshot and the operation that will make it; the sandbox stays as it is.

    Raises ``NotFound``, ``Conflict`` with the sandbox's state, or ``LimitExceeded``.
    """
    if not is_id("sbx", sandbox_id):
        raise no_such_sandbox()
    now, snapshot_id, operation_id = control.now(), new_id("snp"), new_id("op")
    with control.leases.reserve() as seat:

        def record(connection: Connection) -> tuple[Snapshot, Operation, Sandbox | None]:
            earlier = once.first(
                connection, asked_once, project_id, subject_id=snapshot_id, operation_id=operation_id, now=now
            )
            if earlier is not None:
                return (*_earlier(connection, earlier.subject_id, earlier.operation_id), None)
            seen = owned(sandboxes.get(connection, sandbox_id, lock=True), project_id)
            if kind == SnapshotKind.FULL and seen.state not in WITH_MEMORY:
                raise wrong_state(seen, "copied with its memory")
            recorder = Recorder(control, connection, seat, now, operation_id)
            sandbox, operation = recorder.record(seen, "snapshot", {"snapshot": snapshot_id, "kind": str(kind)})
            snapshot = replace(of(sandbox, kind, operation, now), id=snapshot_id, name=name)
            quotas.admit(connection, project_id, Used(disk_mib=snapshot.bytes // MIB))
            if snapshots.count(connection, project_id) >= SNAPSHOTS_MAX:
                raise LimitExceeded(
                    f"A project may have {SNAPSHOTS_MAX} snapshots. Delete one first.",
                    code="snapshots-max",
                    limit=SNAPSHOTS_MAX,
                )
            snapshots.add(connection, snapshot)
            return snapshot, operation, sandbox

        snapshot, operation, sandbox = await control.store.write(record)
        if sandbox is not None:
            seat.start(operation, sandbox)
            control.changes.notify(project_id)
    return snapshot, operation


def of(sandbox: Sandbox, kind: SnapshotKind, operation: Operation, now: datetime) -> Snapshot:
    """Return a snapshot of the sandbox that ``operation`` is to make."""
    resources = sandbox.resources
    most_mib = resources.disk_mib + (resources.memory_mib if kind == SnapshotKind.FULL else 0)
    return Snapshot(
        id=new_id("snp"),
        project_id=sandbox.project_id,
        sandbox_id=sandbox.id,
        kind=kind,
        state=SnapshotState.CREATING,
        template=sandbox.template,
        template_digest=sandbox.template_digest,
        driver=sandbox.driver,
        resources=resources,
        operation_id=operation.id,
        created_at=now,
        updated_at=now,
        bytes=most_mib * MIB,
        details=of_template(sandbox, with_memory=kind == SnapshotKind.FULL),
    )


def of_template(sandbox: Sandbox, *, with_memory: bool) -> dict[str, Any]:
    """Return the details of a sandbox that what begins from it has, too: its template's, extras, and where it begins
    with its memory what is mounted there.
    """
    kept = ("template_defaults", "template_policy", "extras", *(("volumes",) if with_memory else ()))
    return {name: sandbox.details[name] for name in kept if name in sandbox.details}


async def get(control: Control, project_id: str, snapshot_id: str) -> Snapshot:
    """Return one of the project's snapshots; a deleted one as long as its tombstone is kept. Else ``NotFound``."""
    found = None
    if is_id("snp", snapshot_id):
        found = await control.store.read(lambda connection: snapshots.get(connection, snapshot_id))
    return _owned(found, project_id)


async def page(
    control: Control,
    project_id: str,
    *,
    sandbox_id: str | None,
    name: str | None,
    states: Collection[SnapshotState],
    after: Position | None,
    limit: int,
) -> list[Snapshot]:
    return await control.store.read(
        lambda connection: snapshots.page(
            connection, project_id, sandbox_id=sandbox_id, name=name, states=states, after=after, limit=limit
        )
    )


async def delete(control: Control, project_id: str, snapshot_id: str) -> Snapshot:
    """Let nothing begin from the snapshot any more, and drop it once nobody is beginning from it. Idempotent."""
    now = control.now()

    def record(connection: Connection) -> Snapshot:
        found = _owned(snapshots.get(connection, snapshot_id, lock=True), project_id)
        deleted = snapshots.change(connection, found, state=SnapshotState.DELETED, updated_at=now)
        return found if found.state == SnapshotState.DELETED or deleted is None else deleted

    if not is_id("snp", snapshot_id):
        raise _not_found()
    deleted = await control.store.write(record)
    await drop_unwanted(control, snapshot_id)
    return deleted


def usable(connection: Connection, project_id: str, snapshot_id: str) -> Snapshot:
    """Return a snapshot that a sandbox can begin from, locked where the transaction writes; or raise why not."""
    found = snapshots.get(connection, snapshot_id, lock=True) if is_id("snp", snapshot_id) else None
    if found is not None and found.project_id == project_id and not found.hidden:
        if found.state == SnapshotState.READY:
            return found
        if found.state == SnapshotState.CREATING:
            raise Conflict(
                "The snapshot is still being made.",
                code="busy",
                state=str(found.state),
                operation_id=found.operation_id,
                retry_after_s=NOT_READY_RETRY_S,
            )
    raise InvalidRequest(
        "There is no such snapshot to begin from. `GET /v1/snapshots?state=ready` lists those there are.",
        code="unknown-snapshot",
        field="template",
    )


async def drop_unwanted(control: Control, snapshot_id: str | None = None) -> None:
    """Have the node drop what is deleted or failed and used by nobody; all of that, or one. What fails comes again."""
    found = await control.store.read(lambda connection: snapshots.unwanted(connection, DROPPED_AT_ONCE, snapshot_id))
    for unwanted in found:
        try:
            await control.node.drop_snapshot(unwanted, DROP_TIMEOUT_S)
        except SpaceError as error:
            log.warning("snapshot-not-dropped", snapshot=unwanted, code=error.code)
            continue
        now = control.now()
        await control.store.write(
            lambda connection, gone=unwanted, at=now: snapshots.note_dropped(connection, gone, at)
        )


async def compare(control: Control, *, dry_run: bool = False) -> list[tuple[str, str]]:
    """Drop the node's snapshots that are nobody's, and mark as failed those that it has lost; return both.

    The node's list is read first and the store after it: a snapshot is in the store before it is made. One that became
    ready in between is missing from that list, so before any is called lost the node is asked again.
    """
    at_node = await _at_node(control)
    kept = await control.store.read(snapshots.kept)
    found: list[tuple[str, str]] = []
    for nobodys in sorted(at_node - kept.keys()):
        if is_id("snp", nobodys):
            found.append(("snapshot", nobodys))
            if not dry_run:
                log.warning("stray-snapshot", snapshot=nobodys)
                await control.node.drop_snapshot(nobodys, DROP_TIMEOUT_S)
    missing = [row for row in kept.values() if row.state == SnapshotState.READY and row.id not in at_node]
    there_now = await _at_node(control) if missing else set[str]()
    for lost in missing:
        if lost.id not in there_now:
            found.append(("snapshot-row", lost.id))
            if not dry_run:
                log.warning("snapshot-lost", snapshot=lost.id)
                await _note_lost(control, lost)
    return found


async def _at_node(control: Control) -> set[str]:
    return {str(shown.get("snapshot")) for shown in await control.node.snapshots()}


async def _note_lost(control: Control, lost: Snapshot) -> None:
    failure = Failure("snapshot-lost", "The host no longer has the snapshot.")
    values = {"state": SnapshotState.FAILED, "failure": failure, "updated_at": control.now()}
    await control.store.write(lambda connection: snapshots.change(connection, lost, **values))


def _earlier(connection: Connection, snapshot_id: str, operation_id: str | None) -> tuple[Snapshot, Operation]:
    snapshot = snapshots.get(connection, snapshot_id)
    operation = None if operation_id is None else operations.get(connection, operation_id)
    if snapshot is None or operation is None:
        raise _not_found()
    return snapshot, operation


def _owned(found: Snapshot | None, project_id: str) -> Snapshot:
    if found is None or found.project_id != project_id or found.hidden:
        raise _not_found()
    return found


def _not_found() -> NotFound:
    return NotFound("There is no such snapshot.")

"""HTTP for snapshots and forks."""

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response

from space import tracing
from space.api.access import caller
from space.api.answers import (
    IdempotencyKey,
    Prefer,
    accepted,
    control_of,
    once,
    operation_out,
    reply,
    sandbox_out,
    wait_s,
)
from space.api.bodies import SandboxFork, SnapshotCreate
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.api.schemas import Forked, SnapshotAccepted, SnapshotOut, SnapshotPage
from space.control import forks, operations, snapshots
from space.control.forks import NewForks
from space.model.snapshot import Snapshot, SnapshotState

NOT_OF_A_FORK = {"count", "name"}


async def create(
    request: Request,
    sandbox_id: str,
    body: SnapshotCreate,
    prefer: Prefer = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Keep the sandbox's state as a snapshot; the sandbox goes on as it was."""
    control, project_id = control_of(request), caller(request).project_id
    asked_once, seconds = await once(request, idempotency_key), wait_s(prefer)
    snapshot, operation = await snapshots.request_snapshot(
        control, project_id, sandbox_id, body.kind, name=body.name, asked_once=asked_once
    )
    tracing.note(sandbox=sandbox_id, operation=operation.id)
    if seconds > 0:
        operation = await operations.wait(control, project_id, operation.id, seconds)
        snapshot = await snapshots.get(control, project_id, snapshot.id)
    answer = SnapshotAccepted(snapshot=snapshot_out(snapshot), operation=operation_out(operation))
    return accepted(answer, operation, seconds, done=201)


async def fork(
    request: Request,
    sandbox_id: str,
    body: SandboxFork,
    prefer: Prefer = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Make sandboxes that go on from this one's state: memory, processes and files. This one goes on as it was."""
    control, project_id = control_of(request), caller(request).project_id
    asked_once, seconds = await once(request, idempotency_key), wait_s(prefer)
    changes = {name: getattr(body, name) for name in body.model_fields_set - NOT_OF_A_FORK}
    wanted = NewForks(body.count, body.name, changes)
    made, operation = await forks.request_fork(control, project_id, sandbox_id, wanted, asked_once)
    tracing.note(sandbox=sandbox_id, operation=operation.id)
    if seconds > 0:
        operation = await operations.wait(control, project_id, operation.id, seconds)
        made = await forks.of_operation(control, operation)
    answer = Forked(sandboxes=[sandbox_out(each) for each in made], operation=operation_out(operation))
    return accepted(answer, operation, seconds, done=201)


async def page(
    request: Request,
    sandbox_id: Annotated[str | None, Query(max_length=64, description="Only of this sandbox.")] = None,
    name: Annotated[str | None, Query(max_length=64, description="Only of this name.")] = None,
    state: Annotated[list[SnapshotState] | None, Query(description="Only these states; else all but deleted.")] = None,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Response:
    """List snapshots, newest first."""
    found = await snapshots.page(
        control_of(request),
        caller(request).project_id,
        sandbox_id=sandbox_id,
        name=name,
        states=state or (),
        after=position(cursor),
        limit=limit,
    )
    return reply(SnapshotPage(items=[snapshot_out(s) for s in found], next_cursor=next_cursor(found, limit)))


async def get(request: Request, snapshot_id: str) -> Response:
    """One snapshot; a deleted one for a day."""
    return reply(snapshot_out(await snapshots.get(control_of(request), caller(request).project_id, snapshot_id)))


async def delete(request: Request, snapshot_id: str) -> Response:
    """Delete for good. Nothing begins from it any more; sandboxes that did live on."""
    return reply(snapshot_out(await snapshots.delete(control_of(request), caller(request).project_id, snapshot_id)))


def snapshot_out(snapshot: Snapshot) -> SnapshotOut:
    return SnapshotOut.model_validate(snapshot)

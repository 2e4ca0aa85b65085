"""E2B's forks and snapshots on ours, which are used as templates by their ids, or by the names they were given."""

from typing import Any

from space.control import forks, operations, sandboxes, snapshots
from space.control.forks import NewForks
from space.control.operations import error_of
from space.control.readiness import wait_ready
from space.e2b import bodies, errors, listing, shapes
from space.e2b.call import Call
from space.e2b.sandboxes import READY_S, owned, shown
from space.e2b.templates import NAME, bare
from space.errors import InvalidRequest, NotFound, SpaceError, Unavailable
from space.model.operation import FINISHED, OperationState
from space.model.sandbox import Sandbox, State
from space.model.snapshot import Snapshot, SnapshotKind, SnapshotState
from space.store.paging import Position


async def fork(call: Call) -> None:
    """Make sandboxes that go on from this one's state. Each is told of by itself: some may have failed."""
    body, source = await bodies.read(call, bodies.Fork), await owned(call)
    wanted = NewForks(body.count, None, {"timeout_s": float(max(body.timeout, 1)), "metadata": dict(source.metadata)})
    made, operation = await forks.request_fork(call.control, call.project_id, source.id, wanted)
    ended = await operations.wait(call.control, call.project_id, operation.id, READY_S)
    if ended.state not in FINISHED:
        raise Unavailable("The forks take too long.", code="not-ready")
    left = {one.id: one for one in await forks.of_operation(call.control, ended)}
    if ended.state != OperationState.SUCCEEDED and not any(one.state == State.RUNNING for one in left.values()):
        raise error_of(ended)
    await call.answer([await _told(call, left.get(one.id)) for one in made], 201)


async def create(call: Call) -> None:
    """Keep a sandbox's state; it goes on as it was."""
    body, source = await bodies.read(call, bodies.NewSnapshot), await owned(call)
    kind = SnapshotKind.DISK if body.memory is False else SnapshotKind.FULL
    name = None if body.name is None else _name(body.name)
    made, operation = await snapshots.request_snapshot(call.control, call.project_id, source.id, kind, name=name)
    ended = await operations.wait(call.control, call.project_id, operation.id, READY_S)
    if ended.state in {OperationState.FAILED, OperationState.CANCELLED}:
        raise error_of(ended)
    if ended.state != OperationState.SUCCEEDED:
        raise Unavailable("The snapshot takes too long.", code="not-ready")
    await call.answer(shapes.snapshot(await snapshots.get(call.control, call.project_id, made.id)), 201)


async def list_(call: Call) -> None:
    query = call.query
    name = query.get("name")
    wanted = None if name is None else bare(name)

    async def page(after: Position | None) -> list[Snapshot]:
        return await snapshots.page(
            call.control,
            call.project_id,
            sandbox_id=query.get("sandboxID"),
            name=wanted,
            states=(SnapshotState.READY,),
            after=after,
            limit=listing.PAGE,
        )

    await listing.answer(call, await listing.everything(page), shapes.snapshot)


async def _told(call: Call, made: Sandbox | None) -> dict[str, Any]:
    """Return a fork, or why there is none."""
    try:
        if made is None:
            raise NotFound("The fork was deleted.")
        if made.state != State.RUNNING:
            raise _failed(made)
        operation_id = made.operation_id
        if operation_id is not None:
            operation = await operations.get(call.control, call.project_id, operation_id)
            made = await wait_ready(call.control, made, operation, READY_S)
        return {"sandbox": shown(call, await sandboxes.get(call.control, call.project_id, made.id))}
    except SpaceError as error:
        status, body, _ = errors.answer(error)
        return {"error": {"code": status, "message": body["message"]}}


def _failed(made: Sandbox) -> SpaceError:
    failure = made.failure
    return Unavailable(failure.message if failure is not None else f"The fork is {made.state}.")


def _name(text: str) -> str:
    plain = bare(text)
    if NAME.fullmatch(plain) is None:
        raise InvalidRequest("name must be 1 to 63 of the characters `A-Z a-z 0-9 . _ -`, a letter or digit first.")
    return plain

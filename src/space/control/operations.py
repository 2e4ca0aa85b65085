"""Operations as their owners see them: one, many, and waiting for the end of one."""

import asyncio
from collections.abc import Collection
from typing import Any

from space import tracing
from space.control.control import Control
from space.error_wire import class_of_kind
from space.errors import Conflict, HostError, NotFound, SpaceError
from space.model.ids import is_id, new_id
from space.model.operation import FINISHED, Operation, OperationState
from space.model.sandbox import Sandbox
from space.store import operations
from space.store.paging import Position

WAIT_S_MAX = 300.0


def new_operation(control: Control, sandbox: Sandbox, kind: str, request: dict[str, Any]) -> Operation:
    """Return an operation on ``sandbox``, pending and not stored yet."""
    return Operation(
        id=new_id("op"),
        project_id=sandbox.project_id,
        sandbox_id=sandbox.id,
        kind=kind,
        state=OperationState.PENDING,
        created_at=control.now(),
        # Whose request it was, for the log and the trace of carrying it out.
        request={**request, "origin": tracing.carried()},
    )


async def get(control: Control, project_id: str, operation_id: str) -> Operation:
    """Return one of the project's operations, or raise ``NotFound``."""
    found = None
    if is_id("op", operation_id):
        found = await control.store.read(lambda connection: operations.get(connection, operation_id))
    if found is None or found.project_id != project_id:
        raise NotFound("There is no such operation.")
    return found


async def page(
    control: Control,
    project_id: str,
    *,
    sandbox_id: str | None,
    states: Collection[OperationState],
    after: Position | None,
    limit: int,
) -> list[Operation]:
    return await control.store.read(
        lambda connection: operations.page(
            connection, project_id, sandbox_id=sandbox_id, states=states, after=after, limit=limit
        )
    )


async def wait(control: Control, project_id: str, operation_id: str, timeout_s: float) -> Operation:
    """Return the operation once it has ended, or as it is after ``timeout_s``."""
    return (await wait_both(control, project_id, operation_id, timeout_s))[0]


async def wait_both(
    control: Control, project_id: str, operation_id: str, timeout_s: float
) -> tuple[Operation, Sandbox | None]:
    """As ``wait``, with the sandbox as the operation left it, when that happened in this process and just now."""
    ends = asyncio.get_running_loop().time() + min(timeout_s, WAIT_S_MAX)
    with control.changes.watch(operation_id) as watch:
        while True:
            operation = await get(control, project_id, operation_id)
            left = ends - asyncio.get_running_loop().time()
            if operation.state in FINISHED or left <= 0:
                return operation, None
            await watch.wait(left)
            if watch.news is not None and watch.news[0] is not None:
                return watch.news


def error_of(operation: Operation) -> SpaceError:
    """Return the error that an operation ended with, for a caller who waited for it."""
    ids = {"sandbox_id": operation.sandbox_id, "operation_id": operation.id}
    failure = operation.error
    if failure is None:
        return Conflict("The operation was cancelled: the sandbox was deleted meanwhile.", code="cancelled", **ids)
    cls = class_of_kind(failure.kind) or HostError
    return cls(failure.message, code=failure.code, **{**failure.details, **ids})

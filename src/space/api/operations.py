"""HTTP for operations: poll, long-poll, list."""

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import WAIT_S_MAX, control_of, operation_out, reply
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.api.schemas import OperationPage
from space.control import operations
from space.model.operation import OperationState

WaitS = Annotated[
    float, Query(ge=0, le=WAIT_S_MAX, allow_inf_nan=False, description="Answer once it has ended, or after so long.")
]


async def get(request: Request, operation_id: str, wait_s: WaitS = 0) -> Response:
    """One operation."""
    control, project_id = control_of(request), caller(request).project_id
    return reply(operation_out(await operations.wait(control, project_id, operation_id, wait_s)))


async def page(
    request: Request,
    sandbox_id: Annotated[str | None, Query(max_length=64)] = None,
    state: Annotated[list[OperationState] | None, Query(description="Only these states.")] = None,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Response:
    """List operations, newest first."""
    found = await operations.page(
        control_of(request),
        caller(request).project_id,
        sandbox_id=sandbox_id,
        states=state or (),
        after=position(cursor),
        limit=limit,
    )
    return reply(OperationPage(items=[operation_out(o) for o in found], next_cursor=next_cursor(found, limit)))

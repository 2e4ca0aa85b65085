"""Operations: look at one, list them, wait for one to finish."""

import time
from collections.abc import AsyncIterator
from typing import Any

from space.errors import Conflict, OutcomeUnknown
from space.sdk._async.transport import AsyncTransport
from space.sdk.errors import from_wire
from space.sdk.requests import READ_TIMEOUT_S, Request, present
from space.sdk.types import Operation

POLL_S = 30.0
_SANDBOX_AT_FAULT = 502


class AsyncOperations:
    """``client.operations``."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def get(self, operation_id: str, *, wait_s: float | None = None) -> Operation:
        """Return an operation; with ``wait_s`` not before it has finished or so many seconds have passed."""
        params = {"wait_s": f"{wait_s:g}"} if wait_s else {}
        path = f"/v1/operations/{operation_id}"
        request = Request(method="GET", path=path, params=params, read_s=READ_TIMEOUT_S + (wait_s or 0))
        return Operation.parse(await self._transport.call(request))

    async def list(self, *, sandbox_id: str | None = None, state: str | None = None) -> AsyncIterator[Operation]:
        """Yield operations, newest first."""
        async for item in pages(self._transport, "/v1/operations", present(sandbox_id=sandbox_id, state=state)):
            yield Operation.parse(item)

    async def wait(self, operation: Operation | str, *, timeout_s: float = 300.0) -> Operation:
        """Wait until the operation has succeeded and return it.

        Raises what it failed with, and ``OutcomeUnknown`` when it still goes on after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        if isinstance(operation, Operation):
            current = operation
        else:
            current = await self.get(operation, wait_s=max(0.1, min(POLL_S, timeout_s)))
        while not current.finished:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise OutcomeUnknown(
                    f"Operation {current.id} ({current.kind}) still goes on.",
                    code="still-running",
                    operation=current.id,
                )
            current = await self.get(current.id, wait_s=max(0.1, min(POLL_S, left_s)))
        if current.state == "failed":
            raise failure(current)
        if current.state == "cancelled":
            raise Conflict(f"Operation {current.id} ({current.kind}) was cancelled.", code="cancelled")
        return current


def failure(operation: Operation) -> Exception:
    """Return the error that a failed operation stands for."""
    described = {"code": "failed", "message": f"Operation {operation.id} ({operation.kind}) failed."}
    if (error := operation.error) is not None:
        described = present(code=error.code, message=error.message, kind=error.kind)
    details = present(sandbox_id=operation.sandbox_id, operation_id=operation.id)
    return from_wire({**described, "details": details}, _SANDBOX_AT_FAULT)


async def pages(
    transport: AsyncTransport, path: str, params: dict[str, str], limit: int = 100
) -> AsyncIterator[dict[str, Any]]:
    """Yield the items of a list, page by page."""
    cursor: str | None = None
    while True:
        query = {**params, "limit": str(limit), **present(cursor=cursor)}
        answer = await transport.call(Request(method="GET", path=path, params=query))
        for item in answer["items"]:
            yield item
        cursor = answer.get("next_cursor")
        if not cursor:
            return

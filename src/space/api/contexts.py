"""HTTP for contexts: stateful code cells in a sandbox, run by the code interpreter of its template."""

from typing import Any, cast

from fastapi import Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from space.api import interpreter
from space.api.access import caller
from space.api.answers import control_of, reply
from space.api.context_schemas import CellBody, ContextBody, ContextOut, ContextPage, ContextPath
from space.api.proxy import until_gone
from space.api.streaming import NDJSON
from space.control.nodes import Node
from space.control.readiness import get_running
from space.errors import GuestError

_HEADERS = [
    (b"content-type", NDJSON.encode()),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    # What a guest has written must not act as a page of this origin in somebody's browser.
    (b"content-security-policy", b"sandbox; default-src 'none'"),
]


async def create(request: Request, sandbox_id: str, body: ContextBody | None = None) -> Response:
    """Start a context: a kernel that remembers what its cells leave."""
    asked = body or ContextBody()
    made = await _call(
        request, sandbox_id, "POST", interpreter.CONTEXTS, {"language": asked.language, "cwd": asked.cwd}
    )
    return reply(_context(made), 201)


async def page(request: Request, sandbox_id: str) -> Response:
    """List a sandbox's contexts, oldest first; there are never more than one page of them."""
    listed = await _call(request, sandbox_id, "GET", interpreter.CONTEXTS)
    if not isinstance(listed, list):
        raise GuestError("The code interpreter lists no contexts.", code="bad-answer")
    return reply(ContextPage(items=[_context(one) for one in cast("list[Any]", listed)], next_cursor=None))


async def get(request: Request, sandbox_id: str, context_id: ContextPath) -> Response:
    """One context. `default` is the Python context that is there from the start."""
    return reply(_context(await _call(request, sandbox_id, "GET", f"/contexts/{context_id}")))


async def delete(request: Request, sandbox_id: str, context_id: ContextPath) -> Response:
    """End a context, and what runs in it."""
    await _call(request, sandbox_id, "DELETE", f"/contexts/{context_id}")
    return Response(status_code=204)


async def interrupt(request: Request, sandbox_id: str, context_id: ContextPath) -> Response:
    """Interrupt the cell that runs, if one does; what the context remembers stays."""
    await _call(request, sandbox_id, "POST", f"/contexts/{context_id}/interrupt", {})
    return Response(status_code=204)


async def restart(request: Request, sandbox_id: str, context_id: ContextPath) -> Response:
    """Begin the context anew, with nothing remembered, whatever it is at."""
    return reply(_context(await _call(request, sandbox_id, "POST", f"/contexts/{context_id}/restart", {})))


async def execute(request: Request, sandbox_id: str, context_id: ContextPath, body: CellBody) -> Response:
    """Run a cell and stream what comes of it, a line of JSON each; going away interrupts it."""
    control = control_of(request)
    sandbox = await get_running(control, caller(request).project_id, sandbox_id)
    asked = {"code": body.code, "env_vars": body.env, "timeout_s": body.timeout_s}
    return Cell(control.node, sandbox.id, context_id, asked)


class Cell(Response):
    """What comes of a cell, as the sandbox says it, while it does."""

    def __init__(self, node: Node, sandbox_id: str, context_id: str, asked: dict[str, Any]) -> None:
        self._node = node
        self._sandbox_id = sandbox_id
        self._context_id = context_id
        self._asked = asked
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await until_gone(self._stream(send), receive)

    async def _stream(self, send: Send) -> None:
        async with interpreter.execute(self._node, self._sandbox_id, self._context_id, self._asked) as lines:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            async for chunk in lines:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _call(request: Request, sandbox_id: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    control = control_of(request)
    sandbox = await get_running(control, caller(request).project_id, sandbox_id)
    return await interpreter.call(control.node, sandbox.id, method, path, body)


def _context(told: Any) -> ContextOut:
    try:
        return ContextOut.model_validate(told)
    except ValidationError as error:
        raise GuestError("The code interpreter describes no context.", code="bad-answer") from error

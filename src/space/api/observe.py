"""Around every request: its id, one log line, its figures, and the answer to what nobody foresaw.

Headers, query strings and bodies are never logged: they may hold keys and secrets.
"""

import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from space import error_wire, tracing
from space.api.access import header
from space.api.errors import answer
from space.api.figures import Figures
from space.errors import SpaceError

log = structlog.get_logger(__name__)
METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}


class Observe:
    """The outermost layer of the app."""

    def __init__(self, app: ASGIApp, figures: Figures) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = error_wire.request_id(header(scope, b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        tracing.begin(trace=tracing.parse(header(scope, b"traceparent")), request_id=request_id)
        with tracing.Span("request", "server") as span:
            await self._observed(scope, receive, send, request_id, span)

    async def _observed(self, scope: Scope, receive: Receive, send: Send, request_id: str, span: tracing.Span) -> None:
        began = time.perf_counter()
        status = 0
        added = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        self._figures.opened()
        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if status and isinstance(error.__cause__, SpaceError):
                # Such as that the sandbox went which was told of: nothing of ours broke, and the same is done.
                log.warning("answer-cut-off", code=str(error.__cause__.code), kind=type(error.__cause__).__name__)
                raise _CutError from None
            self._figures.broke()
            # The message of a foreign exception may quote what a caller sent: type and place tell enough.
            log.exception("request-broke", error=type(error).__name__)
            if status:
                # Begun and not finished: the connection must be cut, or the caller would take it for whole.
                raise _CutError from None
            await answer(SpaceError("SPACE itself failed; its log says where."), request_id)(scope, receive, noted)
        finally:
            seconds = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", "")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._figures.closed(method, route, status, seconds)
            span.name = f"{method} {route}".rstrip()
            span.attributes |= {"http.request.method": method, "http.route": route, "http.response.status_code": status}
            if status >= 500:
                span.fail(str(status))
            log.info("request", method=method, route=route, status=status, seconds=round(seconds, 6))


class _CutError(Exception):
    """Makes the server cut the connection of an answer that was begun."""

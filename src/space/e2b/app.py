"""E2B's HTTP: which plane a request is for, whose it is, and what surrounds it. Translation happens in the handlers.

Paths, headers, queries and bodies are never logged: they hold keys, tokens and signatures.
"""

import time
from typing import Any

import structlog
from starlette.types import Receive, Scope, Send

from space import error_wire, tracing
from space.e2b import connect, envd, errors, routes
from space.e2b.call import Call, ClientGone, CutOff, Parts, fail
from space.e2b.keys import api_key
from space.e2b.routes import Row
from space.e2b.routing import target_of
from space.errors import NotFound, SpaceError
from space.node.ports.upgrades import EXTENSION

log = structlog.get_logger(__name__)

CORS = {
    "access-control-allow-origin": "*",
    "access-control-allow-methods": "GET, POST, PUT, PATCH, DELETE, OPTIONS",
    "access-control-allow-headers": "*",
    "access-control-expose-headers": "*",
    "access-control-max-age": "7200",
}


class App:
    """The ASGI application of both planes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" and EXTENSION not in scope.get("extensions", {}):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        call = Call(self._parts, scope, receive, _Answering(send, scope["type"]), send)
        tracing.begin(
            trace=tracing.parse(call.headers.get("traceparent")),
            request_id=error_wire.request_id(call.headers.get("x-request-id")),
        )
        began = time.perf_counter()
        route = "e2b"
        try:
            with tracing.Span("e2b", "server"):
                route = await self._answer(call)
        finally:
            call.done()
            log.info("request", route=route, status=call.status, seconds=round(time.perf_counter() - began, 6))

    async def _answer(self, call: Call) -> str:
        route = "none"
        try:
            target = target_of(call.headers, call.path, call.query)
            if target is not None:
                route = envd.route_of(call, target)
                await envd.serve(call, target)
            else:
                route, handler = routes.find(call)
                await _serve_control(call, handler)
        except SpaceError as error:
            await self._fail(call, error)
        except CutOff:
            call.reset()
        except ClientGone:
            call.status = call.status or 499
        except Exception as error:
            # The message of a foreign exception may quote what a caller sent: type and place tell enough.
            log.exception("request-broke", error=type(error).__name__)
            await self._fail(call, SpaceError("SPACE itself failed; its log says where."))
        return route

    async def _fail(self, call: Call, error: SpaceError) -> None:
        if call.status:
            call.reset()
            return
        if errors.status_of(error) >= 500:
            log.warning("request-failed", code=str(error.code), kind=type(error).__name__)
        if error.code == "sandbox-gone":
            await fail(call, error)  # As E2B's proxy, which knows of no RPC, says of each request to it.
        elif call.headers.get("content-type", "").startswith((connect.STREAM_TYPE, "application/connect")):
            await call.begin(200, {"content-type": connect.STREAM_TYPE})
            await call.write(connect.end(errors.rpc(error)))
            await call.finish()
        elif "connect-protocol-version" in call.headers:
            told = errors.rpc(error)
            await call.answer(told, errors.HTTP_STATUS.get(told["code"], 500))
        else:
            await fail(call, error)


async def _serve_control(call: Call, row: Row | None) -> None:
    if row is None:
        raise NotFound("There is nothing at this path.")
    if not row.public:
        key = await call.control.keyring.authenticate(api_key(call.headers.get("x-api-key", "")))
        call.project_id, call.key_id = key.project_id, key.id
    await row.function(call)


class _Answering:
    """Adds to each answer what all have."""

    def __init__(self, send: Send, kind: str) -> None:
        self._send = send
        self._prefix = "" if kind == "http" else "websocket."
        """How an ordinary answer is sent where a WebSocket was asked for."""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            added = [(name.encode(), value.encode()) for name, value in CORS.items()]
            message = {**message, "headers": [*message["headers"], *added, (b"x-content-type-options", b"nosniff")]}
        await self._send({**message, "type": self._prefix + message["type"]})

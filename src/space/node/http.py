"""The node's ASGI application: finds the route, checks who may use it, and turns errors into answers.

Handlers get a ``Call`` and answer through it. Nothing here knows what the routes do.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext

import structlog
from starlette.requests import ClientDisconnect
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from space import error_wire
from space.errors import NotFound, OutcomeUnknown, RequestError, SpaceError
from space.node.access import authorise
from space.node.call import JSON_TYPE, BrokenOff, Call, ClientGone
from space.node.node import Node
from space.node.routes import ROUTES
from space.node.table import Access, Endpoint

log = structlog.get_logger(__name__)


class _Http:
    """All methods of one path."""

    def __init__(self, node: Node, pattern: str, endpoints: list[Endpoint], *, local: bool) -> None:
        self._node = node
        self._pattern = pattern
        self._by_method = {endpoint.method: endpoint for endpoint in endpoints}
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self._node, scope, receive, send)
        call.local = self._local
        method = scope["method"]
        try:
            endpoint = self._endpoint(method)
            authorise(call, endpoint.access)
            with _in_use(call, endpoint):
                await endpoint.handler(call)
        except SpaceError as error:
            await self._fail(call, error)
        except TimeoutError:
            await self._fail(call, OutcomeUnknown("That took too long and was given up.", code="timed-out"))
        except (ClientGone, ClientDisconnect, BrokenOff):
            call.status = call.status or 499
        except Exception:
            log.exception("request-broke", route=self._pattern, request_id=call.request_id)
            await self._fail(call, SpaceError("SPACE itself failed; its log says where."))
        finally:
            call.done()
            self._node.metrics.answered(self._pattern, method, call.status or 500)

    def _endpoint(self, method: str) -> Endpoint:
        endpoint = self._by_method.get(method)
        if endpoint is None:
            raise RequestError(f"{method} is not possible here.", code="method-not-allowed")
        return endpoint

    async def _fail(self, call: Call, error: SpaceError) -> None:
        """Answer with the error; an answer that has begun is left unfinished, so that the server closes it."""
        if call.status is not None:
            log.info("answer-broken-off", route=self._pattern, code=error.code, request_id=call.request_id)
            return
        headers = {"retry-after": "1"} if error.retryable or error.code in _PASSING else {}
        if error.code == "method-not-allowed":
            headers["allow"] = ", ".join(self._by_method)
        await call.answer(error_wire.answer(error, call.request_id), error_wire.status_of(error), headers)


_PASSING = {"wrong-state", "not-ready", "guest-busy", "too-many-attached"}


class _WebSocket:
    def __init__(self, node: Node, pattern: str, endpoint: Endpoint, *, local: bool) -> None:
        self._node = node
        self._pattern = pattern
        self._endpoint = endpoint
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self._node, scope, receive, send)
        call.local = self._local
        try:
            authorise(call, self._endpoint.access)
            with _in_use(call, self._endpoint):
                await self._endpoint.handler(call)
        except SpaceError as error:
            await self._refuse(call, error)
        except OSError:
            log.debug("client-gone", route=self._pattern)
        finally:
            self._node.metrics.answered(self._pattern, "WS", call.status or 101)

    async def _refuse(self, call: Call, error: SpaceError) -> None:
        """Answer the handshake with an HTTP error."""
        call.status = error_wire.status_of(error)
        body = json.dumps(error_wire.answer(error, call.request_id)).encode()
        headers = [(b"content-type", JSON_TYPE.encode()), (b"x-request-id", call.request_id.encode("ascii"))]
        await call.send({"type": "websocket.http.response.start", "status": call.status, "headers": headers})
        await call.send({"type": "websocket.http.response.body", "body": body})


def _in_use(call: Call, endpoint: Endpoint) -> AbstractContextManager[None]:
    """Count the call as one of its sandbox's clients, when it is for the data plane."""
    if endpoint.access is Access.LOCAL:
        return nullcontext()
    node, sandbox = call.node, call.params.get("sandbox")
    return node.machines.in_use(sandbox or node.commands.get(call.params["command"]).record.sandbox_id)


def build_app(node: Node, *, local: bool = False) -> ASGIApp:
    """Return the application. ``local`` is for the Unix socket, whose peers are trusted: all routes, no tokens.

    Without it there is only the data plane, and nothing of that without a token.
    """
    by_path: dict[str, list[Endpoint]] = {}
    for endpoint in ROUTES:
        if local or endpoint.access is not Access.LOCAL:
            by_path.setdefault(endpoint.path, []).append(endpoint)
    routes: list[Route | WebSocketRoute] = []
    for path, endpoints in by_path.items():
        http = [endpoint for endpoint in endpoints if endpoint.method != "WS"]
        if http:
            routes.append(Route(path, _Http(node, path, http, local=local)))
        routes.extend(
            WebSocketRoute(path, _WebSocket(node, path, endpoint, local=local))
            for endpoint in endpoints
            if endpoint.method == "WS"
        )
    return Router(routes=routes, redirect_slashes=False, default=_nothing_here)


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - the form of ASGI
    if scope["type"] == "lifespan":
        return
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    error = NotFound("There is no such route.", code="no-such-route")
    body = json.dumps(error_wire.answer(error, error_wire.request_id(None))).encode()
    headers = [(b"content-type", JSON_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""The node's ASGI application: finds the route, checks who may use it, and turns errors into answers.

Handlers get a ``Call`` and answer through it. Nothing here knows what the routes do.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import structlog
from starlette.requests import ClientDisconnect
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from space import error_wire, tracing
from space.errors import NotFound, OutcomeUnknown, RequestError, SpaceError
from space.node.access import authorise
from space.node.call import JSON_TYPE, BrokenOff, Call, ClientGone
from space.node.metrics import METHODS
from space.node.node import Node
from space.node.ports.admission import preview_of
from space.node.routes import PREVIEW, PREVIEW_HOST, ROUTES
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
        with _observed(call, scope["method"], self._pattern):
            await self._answer(call, scope["method"])

    async def _answer(self, call: Call, method: str) -> None:
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
            log.exception("request-broke", route=self._pattern)
            await self._fail(call, SpaceError("SPACE itself failed; its log says where."))
        finally:
            call.done()

    def _endpoint(self, method: str) -> Endpoint:
        endpoint = self._by_method.get(method) or self._by_method.get("*")
        if endpoint is None:
            raise RequestError(f"{method} is not possible here.", code="method-not-allowed")
        return endpoint

    async def _fail(self, call: Call, error: SpaceError) -> None:
        """Answer with the error; an answer that has begun is left unfinished, so that the server closes it."""
        if call.status is not None:
            log.info("answer-broken-off", route=self._pattern, code=error.code)
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
        with _observed(call, "WS", self._pattern):
            await self._attach(call)

    async def _attach(self, call: Call) -> None:
        try:
            authorise(call, self._endpoint.access)
            with _in_use(call, self._endpoint):
                await self._endpoint.handler(call)
        except SpaceError as error:
            await self._refuse(call, error)
        except (OSError, ClientGone, BrokenOff):
            log.debug("client-gone", route=self._pattern)

    async def _refuse(self, call: Call, error: SpaceError) -> None:
        """Answer the handshake with an HTTP error."""
        call.status = error_wire.status_of(error)
        body = json.dumps(error_wire.answer(error, call.request_id)).encode()
        headers = [(b"content-type", JSON_TYPE.encode()), (b"x-request-id", call.request_id.encode("ascii"))]
        await call.send({"type": "websocket.http.response.start", "status": call.status, "headers": headers})
        await call.send({"type": "websocket.http.response.body", "body": body})


@contextmanager
def _observed(call: Call, method: str, pattern: str) -> Generator[None]:
    """Around every request: for whom it is, its span, its figures and its line in the log."""
    call.begin_work()
    method = method if method in METHODS else "other"
    with tracing.Span(f"{method} {pattern}", "server") as span:
        try:
            yield
        finally:
            status = call.status or (101 if method == "WS" else 500)
            seconds = time.perf_counter() - call.began
            call.node.metrics.answered(pattern, method, status, seconds)
            span.attributes |= {"http.route": pattern, "http.response.status_code": status}
            if status >= 500:
                span.fail(str(status))
            # What is asked again and again whatever happens is no news.
            write = log.debug if method == "GET" and pattern in _POLLED else log.info
            write("request", method=method, route=pattern, status=status, seconds=round(seconds, 6))


_POLLED = {
    *("/healthz", "/readyz", "/metrics", "/machines", "/machines/activity", "/templates"),
    *("/machines/{sandbox}", "/snapshots", "/pool", "/builds", "/builds/{build}"),
}


def _in_use(call: Call, endpoint: Endpoint) -> AbstractContextManager[None]:
    """Count the call as one of its sandbox's clients, when it is for the data plane."""
    node, sandbox, command = call.node, call.params.get("sandbox"), call.params.get("command")
    if endpoint.access is Access.LOCAL:
        tracing.note(sandbox=sandbox)
        return nullcontext()
    sandbox = sandbox or node.commands.get(call.params["command"]).record.sandbox_id
    tracing.note(sandbox=sandbox, command=command)
    return node.machines.in_use(sandbox)


def build_app(node: Node, *, local: bool = False) -> ASGIApp:
    """Return the application. ``local`` is for the Unix socket, whose peers are trusted: all routes, no tokens.

    Without it there is only the data plane, and nothing of that without a token, and the own hosts of ports.
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
    router = Router(routes=routes, redirect_slashes=False, default=_nothing_here)
    return router if local else _Hosts(node, router)


class _Hosts:
    """Requests for the own hosts of ports go to those, whatever their path; all others go by path."""

    def __init__(self, node: Node, by_path: ASGIApp) -> None:
        http, websocket = PREVIEW
        self._domain = node.settings.preview_domain
        self._by_path = by_path
        self._http = _Http(node, PREVIEW_HOST, [http], local=False)
        self._websocket = _WebSocket(node, PREVIEW_HOST, websocket, local=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = preview_of(scope, self._domain) if scope["type"] in {"http", "websocket"} else None
        if named is None:
            await self._by_path(scope, receive, send)
            return
        sandbox, port = named
        scope["path_params"] = {"sandbox": sandbox, "port": str(port)}
        scope["space.preview"] = True
        app = self._http if scope["type"] == "http" else self._websocket
        await app(scope, receive, send)


def gives_away(node: Node) -> Callable[[Scope], bool]:
    """Return which WebSockets are for servers in sandboxes, which have their connections to themselves."""

    def wanted(scope: Scope) -> bool:
        return preview_of(scope, node.settings.preview_domain) is not None or _BY_PATH.match(scope["path"]) is not None

    return wanted


_BY_PATH = re.compile(r"/v1/sandboxes/[^/]+/ports/")


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - the form of ASGI
    if scope["type"] == "lifespan":
        return
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    error = NotFound("There is nothing at this path: this is the data plane, not the api.", code="no-such-route")
    body = json.dumps(error_wire.answer(error, error_wire.request_id(None))).encode()
    headers = [(b"content-type", JSON_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""The node's ASGI application: finds the route, checks who may use it, and turns errors into answers.

Handlers get a ``Call`` and answer through it. Nothing here knows what the routes do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

import structlog
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from space import error_wire
from space.errors import NotFound, OutcomeUnknown, RequestError, SpaceError
from space.node.access import Access, authorise
from space.node.node import Node
from space.node.parse import parse_object, parse_query
from space.node.table import Endpoint

log = structlog.get_logger(__name__)

MIB = 1024 * 1024
BODY_TIMEOUT_S = 60.0
CHUNK_TIMEOUT_S = 300.0
JSON_TYPE = "application/json"
NDJSON_TYPE = "application/x-ndjson"


class ClientGone(Exception):
    """The client closed its connection; nobody is there to be answered."""


class BrokenOff(Exception):
    """An answer that has begun cannot be completed: the connection is closed so that the client sees it."""


class Call:
    """One request: what was asked, and the way to answer."""

    def __init__(self, node: Node, scope: Scope, receive: Receive, send: Send) -> None:
        self.node = node
        self.scope = scope
        self.connection = HTTPConnection(scope)
        self.params: dict[str, str] = scope.get("path_params", {})
        self.request_id = error_wire.request_id(self.header("x-request-id"))
        self.status: int | None = None
        self.local = False
        self.token_fingerprint: str | None = None
        self.receive = receive
        self.send = send
        self._query: dict[str, str] | None = None
        self._gone = False

    # --- what was asked

    @property
    def query(self) -> dict[str, str]:
        """The query's fields; raises ``InvalidRequest`` when one is not UTF-8."""
        if self._query is None:
            self._query = parse_query(self.scope["query_string"])
        return self._query

    def header(self, name: str) -> str | None:
        return self.connection.headers.get(name)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises ``ClientGone``, or ``TimeoutError`` when the client stalls."""
        while True:
            async with asyncio.timeout(CHUNK_TIMEOUT_S):
                message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body = message.get("body", b"")
            if body:
                yield body
            if not message.get("more_body", False):
                return

    async def body(self, bytes_max: int | None = None) -> bytes:
        """Return the whole body, or raise ``RequestError`` (``body-too-large``)."""
        limit = bytes_max or self.node.settings.body_mib_max * MIB
        parts = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in self.chunks():
                    parts += chunk
                    if len(parts) > limit:
                        raise RequestError(
                            f"The body is larger than {limit} bytes.", code="body-too-large", field="body", limit=limit
                        )
        except TimeoutError as error:
            raise RequestError("The body did not arrive in time.", code="body-timeout", field="body") from error
        return bytes(parts)

    async def json(self) -> dict[str, Any]:
        return parse_object(await self.body())

    @asynccontextmanager
    async def while_connected(self) -> AsyncGenerator[None]:
        """Carry out the block only as long as the client stays: otherwise cancel it and raise ``ClientGone``.

        The body must have been read before.
        """
        task = asyncio.current_task()
        watcher = asyncio.get_running_loop().create_task(self._watch(task))
        try:
            yield
        except asyncio.CancelledError:
            if self._gone and task is not None and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()

    async def _watch(self, task: asyncio.Task[Any] | None) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if task is not None:
            task.cancel()

    # --- the answer

    async def answer(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON."""
        body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
        await self.answer_bytes(body, JSON_TYPE, status, headers)

    async def answer_bytes(
        self, body: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        await self.begin(status, {**(headers or {}), "content-type": content_type, "content-length": str(len(body))})
        await self.send({"type": "http.response.body", "body": body})

    async def answer_empty(self) -> None:
        await self.begin(204, {})
        await self.send({"type": "http.response.body", "body": b""})

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin an answer whose body follows with ``write`` and ``finish``."""
        self.status = status
        fields = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        fields.append((b"x-request-id", self.request_id.encode("ascii")))
        await self.send({"type": "http.response.start", "status": status, "headers": fields})

    async def write(self, data: bytes) -> None:
        """Send a part of the body, waiting until the connection takes more."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


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
            log.exception("request broke", route=self._pattern, request_id=call.request_id)
            await self._fail(call, SpaceError("SPACE itself failed; its log says where."))
        finally:
            self._node.metrics.answered(self._pattern, method, call.status or 500)

    def _endpoint(self, method: str) -> Endpoint:
        endpoint = self._by_method.get(method)
        if endpoint is None:
            raise RequestError(f"{method} is not possible here.", code="method-not-allowed")
        return endpoint

    async def _fail(self, call: Call, error: SpaceError) -> None:
        """Answer with the error; an answer that has begun is left unfinished, so that the server closes it."""
        if call.status is not None:
            log.info("answer broken off", route=self._pattern, code=error.code, request_id=call.request_id)
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
            log.debug("client gone", route=self._pattern)
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
    from space.node.routes import ROUTES

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

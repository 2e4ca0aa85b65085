"""One request to the node as its handlers see it: what was asked, and the way to answer.

Knows no routes, and not what any of them does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from space import error_wire, tracing
from space.errors import InvalidRequest, RequestError
from space.listening import Held
from space.model.ids import is_id
from space.node.endings import BrokenOff, ClientGone
from space.node.node import Node
from space.node.parse import parse_object, parse_query

MIB = 1024 * 1024
BODY_TIMEOUT_S = 60.0
CHUNK_TIMEOUT_S = 300.0
JSON_TYPE = "application/json"
NDJSON_TYPE = "application/x-ndjson"

__all__ = ["JSON_TYPE", "MIB", "NDJSON_TYPE", "BrokenOff", "Call", "ClientGone"]


class Call:
    """One request: what was asked, and the way to answer."""

    def __init__(self, node: Node, scope: Scope, receive: Receive, send: Send) -> None:
        self.node = node
        self.scope = scope
        self.connection = HTTPConnection(scope)
        self.params: dict[str, str] = scope.get("path_params", {})
        self.request_id = error_wire.request_id(self.header("x-request-id"))
        self.began = time.perf_counter()
        self.status: int | None = None
        self.local = False
        self.token_fingerprint: str | None = None
        self._held = Held(node.bodies)
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

    def begin_work(self) -> None:
        """Let what follows in this task carry whose request it is. Operations are the api's: a stranger names none."""
        operation = self.header(tracing.HEADERS["operation"]) if self.local else None
        tracing.begin(
            trace=tracing.parse(self.header(tracing.HEADERS["trace"])),
            request_id=self.request_id,
            operation=operation if operation is not None and is_id("op", operation) else None,
        )

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
        """Return the whole body, or raise ``InvalidRequest`` (``body-too-large``)."""
        limit = bytes_max or self.node.settings.body_mib_max * MIB
        parts = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in self.chunks():
                    if len(parts) + len(chunk) > limit:
                        raise InvalidRequest(
                            f"The body is larger than {limit} bytes.",
                            code="body-too-large",
                            field="body",
                            limit_bytes=limit,
                        )
                    self._held.grow(len(chunk))
                    parts += chunk
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

    def done(self) -> None:
        """The call is over: what it held of its body is free for others."""
        self._held.release()

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

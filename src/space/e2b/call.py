"""One request of an E2B client as the handlers see it: what was asked, and the ways to answer. Knows no routes."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from space.control.control import Control
from space.e2b import connect, errors
from space.e2b.keys import Tokens
from space.e2b.watchers import Watchers
from space.errors import InvalidRequest, RequestError, SpaceError
from space.listening import Bodies, Held
from space.model.sandbox import Sandbox

BODY_TIMEOUT_S = 60.0
CHUNK_TIMEOUT_S = 300.0
QUERY_FIELDS_MAX = 64
RESET = "space.reset"
"""Where in a connection's scope the server puts what resets it."""


@dataclass(frozen=True)
class Parts:
    """What all requests share."""

    control: Control
    tokens: Tokens
    watchers: Watchers
    bodies: Bodies


class ClientGone(Exception):
    """The client closed its connection."""


class CutOff(Exception):
    """What was streamed has no end that could be told: the connection is to be reset, so that none is seen."""


class Call:
    """One request."""

    def __init__(self, parts: Parts, scope: Scope, receive: Receive, send: Send, send_raw: Send) -> None:
        self.parts = parts
        self.control = parts.control
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        self.status = 0
        self.params: dict[str, str] = {}
        self.project_id = ""
        self.key_id = ""
        self.target_sandbox: Sandbox | None = None
        self.receive = receive
        self.send_raw = send_raw
        """Sends an answer that is a server's in a sandbox, to which nothing is added."""
        self._send = send
        self._held: Held | None = None
        self._query: dict[str, str] | None = None

    # --- what was asked

    @property
    def query(self) -> dict[str, str]:
        if self._query is None:
            raw: bytes = self.scope["query_string"]
            try:
                pairs = parse_qsl(
                    raw.decode("latin-1"),
                    keep_blank_values=True,
                    errors="surrogateescape",
                    max_num_fields=QUERY_FIELDS_MAX,
                )
            except ValueError as error:
                raise InvalidRequest("The query has too many fields.") from error
            self._query = dict(pairs)
        return self._query

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of a request for the data plane; it runs."""
        if self.target_sandbox is None:
            raise errors.gone("")
        return self.target_sandbox

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises ``ClientGone``, or ``RequestError`` when the client stalls."""
        while True:
            try:
                async with asyncio.timeout(CHUNK_TIMEOUT_S):
                    message = await self.receive()
            except TimeoutError as error:
                raise RequestError("The body did not arrive in time.", code="body-timeout") from error
            if message["type"] == "http.disconnect":
                raise ClientGone
            if body := message.get("body", b""):
                yield body
            if not message.get("more_body", False):
                return

    async def body(self, bytes_max: int = connect.FRAME_BYTES_MAX) -> bytes:
        """Return the whole body, or raise ``InvalidRequest`` when it is too large."""
        self._held = self._held or Held(self.parts.bodies)
        taken = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S), aclosing(self.chunks()) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if len(taken) + len(chunk) > bytes_max:
                        raise InvalidRequest(f"The body may have at most {bytes_max} bytes.", code="body-too-large")
                    self._held.grow(len(chunk))
                    taken += chunk
        except TimeoutError as error:
            raise RequestError("The body did not arrive in time.", code="body-timeout") from error
        return bytes(taken)

    async def json(self) -> dict[str, Any]:
        return connect.parse(await self.body())

    async def gone(self) -> None:
        """Return when the client has closed its connection. The body must have been read before."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def done(self) -> None:
        """The call is over: what it held of its body is free for others."""
        if self._held is not None:
            self._held.release()

    # --- the answer

    async def answer(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON."""
        await self.answer_encoded(encoded(value), status, headers)

    async def answer_encoded(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with what ``encoded`` has returned."""
        await self.begin(
            status, {**(headers or {}), "content-type": "application/json", "content-length": str(len(body))}
        )
        await self._send({"type": "http.response.body", "body": body})

    async def answer_empty(self, status: int = 204) -> None:
        await self.begin(status, {} if status == 204 else {"content-length": "0"})
        await self._send({"type": "http.response.body", "body": b""})

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin an answer whose body follows with ``write`` and ``finish``."""
        self.status = status
        fields = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def write(self, data: bytes) -> None:
        """Send a part of the body, waiting until the connection takes more."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def reset(self) -> None:
        """Reset the connection, so that the client cannot take what it got for whole."""
        reset: Callable[[], None] | None = self.scope.get(RESET)
        if reset is not None:
            reset()


def encoded(value: Any) -> bytes:
    """Return JSON as it is answered."""
    return json.dumps(value, separators=(",", ":")).encode("utf-8", "backslashreplace")


async def fail(call: Call, error: SpaceError) -> None:
    """Answer with an error, in the form of the control plane and of files."""
    status, body, headers = errors.answer(error)
    await call.answer(body, status, headers)


async def while_connected(call: Call, work: Awaitable[None]) -> None:
    """Do ``work`` as long as the client stays; then it is given up. The body must have been read before."""
    watching = asyncio.ensure_future(call.gone())
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait({watching, working})
    if working.cancelled():
        raise ClientGone
    working.result()


async def stream(call: Call, frames: AsyncGenerator[bytes]) -> None:
    """Answer an RPC with the frames, until they end or the client goes. An error is the last frame, with status 200."""

    async def write() -> None:
        await call.begin(200, {"content-type": connect.STREAM_TYPE, "cache-control": "no-store"})
        async with aclosing(frames) as coming:
            try:
                async for frame in coming:
                    await call.write(frame)
                last = connect.end()
            except SpaceError as error:
                last = connect.end(errors.rpc(error))
        await call.write(last)
        await call.finish()

    await while_connected(call, write())

"""Passes a request on to the node and its answer back, both as streams; knows the way, not what travels on it.

Nothing of the caller's authority goes along: only headers that describe the body and what part of it is wanted.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from http import HTTPStatus

import aiohttp
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from space.api.answers import control_of
from space.control.nodes import Node

REQUEST_HEADERS = {"accept", "content-type", "content-length", "range", "if-range", "if-match", "if-none-match"}
RESPONSE_HEADERS = {
    "accept-ranges",
    "cache-control",
    "content-disposition",
    "content-length",
    "content-range",
    "content-type",
    "etag",
    "last-modified",
    "retry-after",
}


ASLEEP_STATUS = HTTPStatus.CONFLICT
REFUSAL_BYTES_MAX = 64 * 1024

Waking = Callable[[], Awaitable[object]]


class PassedOn(Response):
    """An answer that the node gives, written as it comes. Ends when either side goes away.

    With ``wake`` a machine that fell asleep between the look at its sandbox and this request is woken, and asked again.
    """

    def __init__(
        self,
        node: Node,
        request: Request,
        path: str,
        body: bytes | AsyncIterable[bytes] | None,
        wake: Waking | None = None,
    ) -> None:
        self._node = node
        self._wake = wake
        self._method = request.method
        query: bytes = request.scope["query_string"]
        self._path = path + (f"?{query.decode('latin-1')}" if query else "")
        self._headers = {name: value for name, value in request.headers.items() if name in REQUEST_HEADERS}
        if body is None or isinstance(body, bytes):
            self._headers.pop("content-length", None)
        self._body = body
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        # A streamed request body is read from `receive`; only once that is done may anybody else listen there.
        listen = receive if self._body is None or isinstance(self._body, bytes) else None
        await until_gone(self._stream(send), listen)

    async def _stream(self, send: Send) -> None:
        try:
            if not await self._answer(send, self._wake) and self._wake is not None:
                await self._wake()
                await self._answer(send, None)
        except ClientDisconnect:
            return

    async def _answer(self, send: Send, wake: Waking | None) -> bool:
        """Write the node's answer; False, and nothing written, when the machine is to be woken first."""
        async with self._node.pass_on(self._method, self._path, self._headers, self._body) as response:
            first = b""
            if wake is not None and response.status == ASLEEP_STATUS:
                first = await response.content.read(REFUSAL_BYTES_MAX)
                if _is_asleep(first):
                    return False
            await send({"type": "http.response.start", "status": response.status, "headers": _kept(response)})
            left = response.content_length
            while chunk := first or await response.content.readany():
                first = b""
                left = None if left is None else left - len(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": left != 0})
            if left != 0:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def pass_on(request: Request, path: str, wake: Waking | None = None) -> Response:
    """Pass a request with a small body on; the guard has bounded it."""
    body = await request.body() if request.method not in {"GET", "HEAD"} else None
    return PassedOn(control_of(request).node, request, path, body, wake)


async def pass_stream_on(request: Request, path: str) -> Response:
    """Pass a request on whose body may be of any size."""
    return PassedOn(control_of(request).node, request, path, _chunks(request))


async def until_gone(work: Awaitable[None], receive: Receive | None) -> None:
    """Do ``work``, and give it up when the client goes away; without ``receive`` nobody looks for that."""
    if receive is None:
        await work
        return
    watching = asyncio.ensure_future(_gone(receive))
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait({watching, working})
    if not working.cancelled():
        working.result()


def _is_asleep(refusal: bytes) -> bool:
    """Whether a refusal of the node says that the machine does not run, so that nothing of the request was done."""
    try:
        return json.loads(refusal)["error"]["code"] == "wrong-state"
    except (ValueError, TypeError, KeyError):
        return False


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _chunks(request: Request) -> AsyncGenerator[bytes]:
    async for chunk in request.stream():
        if chunk:
            yield chunk


def _kept(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    kept = [(name.lower(), value) for name, value in response.raw_headers]
    kept = [(name, value) for name, value in kept if name.decode("latin-1") in RESPONSE_HEADERS]
    # What a guest has written must not act as a page of this origin in somebody's browser.
    return [*kept, (b"content-security-policy", b"sandbox; default-src 'none'")]

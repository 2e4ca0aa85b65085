"""A guest's connection over HTTP/2. Each request is decided on by itself, whatever the ones before it were."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import h2.errors

from space.egress.denials import BadRequest, NotCarriedOut
from space.egress.guest_http1 import BODY_SILENCE_S
from space.egress.http2 import Http2, Stream, StreamReset
from space.egress.inject import RequestHead
from space.egress.messages import HEADERS_MAX, Body, GuestGone, Headers, Request, Response, end_to_end, header
from space.egress.targets import parse_authority, parse_target

if TYPE_CHECKING:
    from space.egress.pipeline import Connection, Pipeline
    from space.egress.wire import Wire

_PSEUDO = frozenset({b":method", b":scheme", b":authority", b":path"})


class Http2Guest:
    """Serves one connection until it ends."""

    def __init__(self, connection: Connection, pipeline: Pipeline, wire: Wire) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._http2 = Http2(wire, connection.step, client=False, opened=self._open)
        self._tasks: asyncio.TaskGroup | None = None

    async def serve(self) -> None:
        await self._http2.begin()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._http2.run()

    def _open(self, stream: Stream) -> None:
        if self._tasks is not None:
            self._tasks.create_task(self._answer(stream))

    async def _answer(self, stream: Stream) -> None:
        """Answer one request. What breaks it off is this stream's matter alone."""
        try:
            try:
                request = self._request(stream)
            except BadRequest as error:
                async with self._pipeline.refuse(self._connection, error, "h2") as response:
                    await self._send_response(stream, response)
            else:
                async with self._pipeline.carry_out(self._connection, request) as response:
                    await self._send_response(stream, response)
        except (ConnectionError, NotCarriedOut):
            await self._http2.reset(stream, h2.errors.ErrorCodes.INTERNAL_ERROR)
        else:
            if stream.ended and not stream.unread:
                self._http2.forget(stream)
            else:
                await self._http2.reset(stream, h2.errors.ErrorCodes.NO_ERROR)

    def _request(self, stream: Stream) -> Request:
        headers: Headers = stream.headers.result()
        if len(headers) > HEADERS_MAX:
            raise BadRequest("too-many-headers", f"A request has at most {HEADERS_MAX} headers.")
        pseudo = {name: value for name, value in headers if name[:1] == b":"}
        scheme = self._connection.scheme
        if pseudo.keys() != _PSEUDO or pseudo[b":scheme"].decode("latin-1") != scheme:
            raise BadRequest("bad-request", "A request has :method, :scheme, :authority and :path, and no others.")
        method = pseudo[b":method"].decode("latin-1")
        if not method.isascii():
            raise BadRequest("bad-request", "The method is not the name of one.")
        if method == "CONNECT":
            raise BadRequest("connect", "CONNECT is not answered: connections are let out without a proxy.")
        authority = parse_authority(pseudo[b":authority"], scheme)
        if any(name == b"host" and parse_authority(value, scheme) != authority for name, value in headers):
            raise BadRequest("authority-mismatch", "The request's :authority and its Host name different servers.")
        target = parse_target(pseudo[b":path"], method, scheme, authority)
        kept = [item for item in headers if item[0] not in _PSEUDO and item[0] not in {b"host", b"expect"}]
        body = None if stream.ended and not stream.unread else self._body(stream)
        if body is None and (header(kept, b"content-length") or b"0").strip(b"0"):
            raise BadRequest("ambiguous-length", "A request without a body has a Content-Length for one.")
        head = RequestHead(method, scheme, authority.host, authority.port, target, end_to_end(kept))
        return Request(head, body, "h2")

    async def _body(self, stream: Stream) -> Body:
        while True:
            try:
                async with asyncio.timeout(BODY_SILENCE_S):
                    chunk = await stream.take()
            except (TimeoutError, StreamReset) as error:
                raise GuestGone("the body broke off") from error
            if not chunk and stream.ended:
                return
            await self._connection.step()
            yield chunk

    async def _send_response(self, stream: Stream, response: Response) -> None:
        headers: Headers = [(b":status", str(response.status).encode()), *response.headers]
        await self._http2.send_headers(stream, headers, end=False)
        async for chunk in response.body:
            await self._connection.step()
            await self._http2.send(stream, chunk)
        if response.trailers:
            await self._http2.send_headers(stream, response.trailers, end=True)
        else:
            await self._http2.send_end(stream)

"""One connection to a server outside over HTTP/2; many requests at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from space.egress.denials import Failed
from space.egress.http2 import Http2, Step, Stream, StreamReset
from space.egress.messages import HEADERS_MAX, Body, GuestGone, Headers, Request, Response, end_to_end, no_body, without
from space.egress.upstream_http1 import SILENCE_S
from space.egress.wire import Wire

_GRPC = b"application/grpc"


class Http2Upstream:
    """``run`` it beside its use."""

    def __init__(self, wire: Wire, step: Step) -> None:
        self._wire = wire
        self._http2 = Http2(wire, step, client=True)
        self.used = 0

    @property
    def reusable(self) -> bool:
        return self._wire.alive and not self._http2.ended and not self._http2.refuses

    async def begin(self) -> None:
        await self._http2.begin()

    async def run(self) -> None:
        try:
            await self._http2.run()
        finally:
            self._wire.abort()

    @asynccontextmanager
    async def exchange(self, request: Request) -> AsyncGenerator[Response]:
        """Send the request and give the answer as it comes. Raises ``Failed``, or ``GuestGone`` for the other side."""
        self.used += 1
        try:
            stream = await self._http2.open(_headers(request), end=request.body is None)
        except ConnectionError as error:
            raise Failed("server-closed", 502, "The server closed the connection.") from error
        sender: asyncio.Task[None] | None = None
        try:
            if request.body is not None:
                sender = asyncio.get_running_loop().create_task(self._send_body(stream, request.body))
            try:
                response = await self._answer(stream)
            except StreamReset:
                _check_guest(sender)
                raise
            _check_guest(sender)
            yield response
        except StreamReset as error:
            raise Failed("server-closed", 502, "The server gave up the request.") from error
        finally:
            if sender is not None:
                sender.cancel()
                await asyncio.wait({sender})
            if stream.ended and not stream.unread and (sender is None or not sender.cancelled()):
                self._http2.forget(stream)
            else:
                await self._http2.reset(stream)

    async def _send_body(self, stream: Stream, body: Body) -> None:
        try:
            async for chunk in body:
                await self._http2.send(stream, chunk)
            await self._http2.send_end(stream)
        except GuestGone:
            stream.break_off("the guest is gone")
            raise
        except ConnectionError:
            pass  # the server may have answered before it closed

    async def _answer(self, stream: Stream) -> Response:
        try:
            async with asyncio.timeout(SILENCE_S):
                headers = await asyncio.shield(stream.headers)
        except TimeoutError as error:
            raise Failed("server-timeout", 504, "The server says nothing.") from error
        status = next((value for name, value in headers if name == b":status"), b"")
        if not status.isdigit():
            raise Failed("server-protocol", 502, "The server's answer has no status.")
        if len(headers) > HEADERS_MAX:
            raise Failed("server-protocol", 502, f"The server's answer has more than {HEADERS_MAX} headers.")
        response = Response(int(status), end_to_end([item for item in headers if item[0][:1] != b":"]), no_body())
        response.body = self._body(stream, response)
        return response

    async def _body(self, stream: Stream, response: Response) -> Body:
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    chunk = await stream.take()
            except TimeoutError as error:
                raise Failed("server-timeout", 504, "The server says nothing.") from error
            except StreamReset as error:
                raise Failed("server-closed", 502, "The server broke off its answer.") from error
            if not chunk and stream.ended:
                response.trailers += end_to_end(stream.trailers)
                return
            yield chunk


def _check_guest(sender: asyncio.Task[None] | None) -> None:
    """Raise the guest's ``GuestGone``, whatever the server says to half a request."""
    if sender is not None and sender.done() and isinstance(gone := sender.exception(), GuestGone):
        raise gone


def _headers(request: Request) -> Headers:
    head = request.head
    headers: Headers = [
        (b":method", head.method.encode("ascii")),
        (b":scheme", head.scheme.encode("ascii")),
        (b":authority", head.authority),
        (b":path", head.target.encode("ascii")),
        *without(head.headers, b"host"),
    ]
    if any(name == b"content-type" and value.startswith(_GRPC) for name, value in head.headers):
        headers.append((b"te", b"trailers"))  # gRPC's servers want to see it
    return headers

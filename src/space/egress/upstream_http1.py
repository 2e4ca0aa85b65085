"""One connection to a server outside over HTTP/1.1: requests one after the other, each written anew by h11."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import h11

from space.egress.denials import Failed
from space.egress.messages import (
    HEAD_BYTES_MAX,
    HEAD_PART_BYTES,
    HEADERS_MAX,
    Body,
    GuestGone,
    Headers,
    Request,
    Response,
    end_to_end,
    header,
    no_body,
    without,
)
from space.egress.wire import Wire

SILENCE_S = 3600.0
"""Longest time that a server may say nothing; those that think for long are why this is long."""
INTERIM_MAX = 32
"""Answers before the answer (1xx)."""


class Http1Upstream:
    """Use it for one request at a time. ``reusable`` says whether another one may follow."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self.used = 0

    @property
    def reusable(self) -> bool:
        unasked = self._h11.trailing_data[0]  # else it would be taken for the answer to the next request
        return (
            self._wire.quiet and not unasked and self._h11.our_state is h11.IDLE and self._h11.their_state is h11.IDLE
        )

    def abort(self) -> None:
        self._wire.abort()

    @asynccontextmanager
    async def exchange(self, request: Request) -> AsyncGenerator[Response]:
        """Send the request and give the answer as it comes. Raises ``Failed``, or ``GuestGone`` for the other side."""
        self.used += 1
        sender: asyncio.Task[None] | None = None
        try:
            await self._send(_written(request))
            if request.body is None:
                await self._send(h11.EndOfMessage())
            else:
                sender = asyncio.get_running_loop().create_task(self._send_body(request.body))
            try:
                response = await self._answer(request)
            except Failed:
                if sender is not None and sender.done() and not sender.cancelled() and sender.exception() is not None:
                    raise _of_sender(sender) from None
                raise
            yield response
        except ConnectionError as error:
            raise (
                error
                if isinstance(error, GuestGone)
                else Failed("server-closed", 502, "The server closed the connection.")
            ) from error
        finally:
            await self._finish(sender)

    async def _finish(self, sender: asyncio.Task[None] | None) -> None:
        """Make the connection ready for the next request, or end it where that cannot be."""
        if sender is not None:
            sender.cancel()
            await asyncio.wait({sender})
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        elif self._h11.their_state is not h11.SWITCHED_PROTOCOL:
            self._wire.abort()

    async def _send(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        try:
            data = self._h11.send(event)
        except h11.LocalProtocolError as error:
            raise Failed("request-not-expressible", 502, "The request cannot be written as HTTP/1.1.") from error
        if data:
            await self._wire.send(data)

    async def _send_body(self, body: Body) -> None:
        try:
            async for chunk in body:
                await self._send(h11.Data(data=chunk))
            await self._send(h11.EndOfMessage())
        except GuestGone:
            self._wire.abort()  # whoever waits for the answer learns of it
            raise
        except ConnectionError:
            pass  # the server may have answered before it closed

    async def _answer(self, request: Request) -> Response:
        for _ in range(INTERIM_MAX):
            event = await self._next()
            if isinstance(event, h11.InformationalResponse):
                if event.status_code == 101 and request.upgrade:
                    self._wire.give_back(self._h11.trailing_data[0])
                    headers = [(bytes(name), bytes(value)) for name, value in event.headers]
                    return Response(101, headers, no_body(), bytes(event.reason), tunnel=self._wire)
                continue
            if not isinstance(event, h11.Response):
                raise Failed("server-protocol", 502, "The server does not answer in HTTP.")
            return self._response(event)
        raise Failed("server-protocol", 502, "The server says again and again that it is about to answer.")

    def _response(self, event: h11.Response) -> Response:
        headers = [(bytes(name), bytes(value)) for name, value in event.headers]
        if len(headers) > HEADERS_MAX:
            raise Failed("server-protocol", 502, f"The server's answer has more than {HEADERS_MAX} headers.")
        response = Response(event.status_code, end_to_end(headers), no_body(), bytes(event.reason))
        response.body = self._body(response)
        return response

    async def _body(self, response: Response) -> Body:
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                response.trailers += end_to_end([(bytes(name), bytes(value)) for name, value in event.headers])
                return
            else:
                raise Failed("server-closed", 502, "The server broke off its answer.")

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            try:
                event = self._h11.next_event()
                if event is not h11.NEED_DATA:
                    return event  # type: ignore[return-value]
                async with asyncio.timeout(SILENCE_S):
                    data = await self._wire.receive()
                if self._h11.their_state is h11.SEND_RESPONSE and len(data) > HEAD_PART_BYTES:
                    self._wire.give_back(data[HEAD_PART_BYTES:])
                    data = data[:HEAD_PART_BYTES]
                self._h11.receive_data(data)
            except h11.RemoteProtocolError as error:
                raise Failed(
                    "server-protocol", 502, "The server's answer is not proper HTTP, or was cut off."
                ) from error
            except TimeoutError as error:
                raise Failed("server-timeout", 504, "The server says nothing.") from error
            except ConnectionError as error:
                raise Failed("server-closed", 502, "The server closed the connection.") from error


def _written(request: Request) -> h11.Request:
    try:
        return h11.Request(method=request.head.method, target=request.head.target, headers=_headers(request))
    except h11.LocalProtocolError as error:
        raise Failed("request-not-expressible", 502, "The request cannot be written as HTTP/1.1.") from error


def _headers(request: Request) -> Headers:
    """Return what is written: one Host, one way to tell the body's length, of connections nothing but upgrades."""
    head = request.head
    headers: Headers = [(b"host", head.authority)]
    cookies = [value for key, value in head.headers if key == b"cookie"]
    headers += without(head.headers, b"host", b"cookie", b"content-length")
    if cookies:  # HTTP/2 may send them in parts (RFC 9113 §8.2.3)
        headers.append((b"cookie", b"; ".join(cookies)))
    length = header(head.headers, b"content-length")
    if request.body is None:
        if length is not None or head.method in {"POST", "PUT", "PATCH"}:
            headers.append((b"content-length", b"0"))
    elif length is not None:
        headers.append((b"content-length", length))
    else:
        headers.append((b"transfer-encoding", b"chunked"))
    if request.upgrade:
        headers += [(b"connection", b"upgrade"), (b"upgrade", b"websocket")]
    return headers


def _of_sender(sender: asyncio.Task[None]) -> BaseException:
    error = sender.exception()
    return error if error is not None else Failed("server-closed", 502, "The server closed the connection.")

"""A guest's connection over HTTP/1.1. Requests are parsed strictly, one after the other, and answered in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import h11

from space.egress.denials import BadRequest, NotCarriedOut
from space.egress.inject import RequestHead
from space.egress.messages import (
    HEAD_BYTES_MAX,
    HEAD_PART_BYTES,
    HEADERS_MAX,
    Body,
    GuestGone,
    Headers,
    Join,
    Request,
    Response,
    end_to_end,
    header,
)
from space.egress.targets import parse_authority, parse_target

if TYPE_CHECKING:
    from space.egress.pipeline import Connection, Pipeline
    from space.egress.wire import Wire

HEAD_S, IDLE_S, BODY_SILENCE_S = 30.0, 300.0, 300.0
DISCARD_BYTES_MAX, DISCARD_S = 256 * 1024, 2.0
_VERSIONS = frozenset({b"1.0", b"1.1"})
_CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")


class Http1Guest:
    """Serves one connection until it ends. ``head_s`` is how long a request's head may take."""

    def __init__(self, connection: Connection, pipeline: Pipeline, wire: Wire, head_s: float = HEAD_S) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._wire = wire
        self._head_s = head_s
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)

    async def serve(self) -> None:
        """Answer requests. Raises ``ConnectionError`` when the guest's end breaks."""
        first = True
        while True:
            event = await self._head(self._head_s if first else IDLE_S)
            first = False
            if event is None:
                return
            if not await self._answer(event):
                await self._discard()
                return
            self._h11.start_next_cycle()

    async def serve_refusal(self, refusal: NotCarriedOut) -> None:
        """Answer the first request with a refusal, whatever it is."""
        event = await self._head(self._head_s)
        if event is None:
            return
        method, target = None, None
        if isinstance(event, h11.Request):
            method, target = event.method.decode("ascii"), event.target.decode("ascii", "replace")
        async with self._pipeline.refuse(self._connection, refusal, "h1", method, target) as response:
            await self._send_response(response, head_only=method == "HEAD")
        await self._discard()

    async def _head(self, wait_s: float) -> h11.Request | BadRequest | None:
        """Return the next request, or what is wrong with it; None: there is none."""
        try:
            if not self._h11.trailing_data[0]:
                async with asyncio.timeout(wait_s):
                    data = await self._wire.receive()
                if not data:
                    return None
                self._take_in(data)
            async with asyncio.timeout(self._head_s):
                event = await self._next()
        except TimeoutError:
            return None
        except BadRequest as error:
            return error
        if isinstance(event, h11.Request):
            return event
        return None

    async def _answer(self, event: h11.Request | BadRequest) -> bool:
        """Answer one request; False: the connection is at its end."""
        if isinstance(event, BadRequest):
            async with self._pipeline.refuse(self._connection, event, "h1") as response:
                await self._send_response(response, head_only=False)
            return False
        try:
            request = self._request(event)
        except BadRequest as error:
            method, target = event.method.decode("ascii"), event.target.decode("ascii", "replace")
            async with self._pipeline.refuse(self._connection, error, "h1", method, target) as response:
                await self._send_response(response, head_only=method == "HEAD")
            return False
        async with self._pipeline.carry_out(self._connection, request) as response:
            if response.join is not None:
                await self._upgrade(response, response.join)
                return False
            await self._send_response(response, head_only=request.head.method == "HEAD")
            read_whole = self._h11.their_state is h11.DONE
        return read_whole and not response.close and self._h11.our_state is h11.DONE

    def _request(self, event: h11.Request) -> Request:
        headers: Headers = [(bytes(name), bytes(value)) for name, value in event.headers]
        method = event.method.decode("ascii")
        if event.http_version not in _VERSIONS:
            raise BadRequest("not-http", "This is no request of HTTP/1.1, and no other version was agreed on.")
        if method == "CONNECT":
            raise BadRequest("connect", "CONNECT is not answered: connections are let out without a proxy.")
        if len(headers) > HEADERS_MAX:
            raise BadRequest("too-many-headers", f"A request has at most {HEADERS_MAX} headers.")
        length, encoding = header(headers, b"content-length"), header(headers, b"transfer-encoding")
        if length is not None and encoding is not None:
            raise BadRequest("ambiguous-length", "A request has Content-Length or Transfer-Encoding, not both.")
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1:
            raise BadRequest("no-host", "A request has exactly one Host.")
        scheme = self._connection.scheme
        authority = parse_authority(hosts[0], scheme)
        target = parse_target(event.target, method, scheme, authority)
        upgrade = _asks_for_websocket(headers)
        body = None if self._ends_at_once() else self._body()
        head = RequestHead(method, scheme, authority.host, authority.port, target, _forwarded(headers))
        return Request(head, body, "h1", upgrade=upgrade)

    def _ends_at_once(self) -> bool:
        """Whether the request has no body; what comes next in that case is there already."""
        if self._h11.they_are_waiting_for_100_continue:
            return False
        event = self._next_parsed()
        if isinstance(event, h11.EndOfMessage):
            return True
        self._early = event
        return False

    _early: type[h11.NEED_DATA | h11.PAUSED] | h11.Event | None = None

    async def _body(self) -> Body:
        if self._h11.they_are_waiting_for_100_continue:
            await self._wire.send(self._h11.send(_CONTINUE) or b"")
        while True:
            event, self._early = self._early, None
            if event is None or event is h11.NEED_DATA:
                try:
                    async with asyncio.timeout(BODY_SILENCE_S):
                        event = await self._next()
                except TimeoutError as error:
                    raise GuestGone("the body does not go on") from error
                except BadRequest as error:
                    raise GuestGone(error.message) from error
            if isinstance(event, h11.Data):
                await self._connection.step()
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise GuestGone("the body broke off")

    def _next_parsed(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        try:
            return self._h11.next_event()
        except h11.RemoteProtocolError as error:
            raise BadRequest("not-http", f"This is not a proper HTTP request: {error}.") from error

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._next_parsed()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]
            try:
                self._take_in(await self._wire.receive())
            except ConnectionError as error:
                raise GuestGone(str(error)) from error
            except h11.RemoteProtocolError as error:
                raise BadRequest("not-http", f"This is not a proper HTTP request: {error}.") from error

    def _take_in(self, data: bytes) -> None:
        if self._h11.their_state is h11.IDLE and len(data) > HEAD_PART_BYTES:
            self._wire.give_back(data[HEAD_PART_BYTES:])
            data = data[:HEAD_PART_BYTES]
        self._h11.receive_data(data)

    async def _send_response(self, response: Response, *, head_only: bool) -> None:
        try:
            if self._h11.our_state in {h11.IDLE, h11.ERROR} or self._h11.their_state is h11.ERROR:
                self._h11 = _answering()
            headers = [*response.headers, (b"connection", b"close")] if response.close else response.headers
            framed = head_only or header(headers, b"content-length") is not None or response.status in {204, 304}
            if not framed:
                headers = [*headers, (b"transfer-encoding", b"chunked")]
            sent = h11.Response(status_code=response.status, headers=headers, reason=response.reason)
            await self._wire.send(self._h11.send(sent) or b"")
            async for chunk in response.body:
                await self._connection.step()
                for part in self._h11.send_with_data_passthrough(h11.Data(data=chunk)) or []:
                    await self._wire.send(part)
            await self._wire.send(self._h11.send(h11.EndOfMessage(headers=response.trailers)) or b"")
        except h11.LocalProtocolError as error:
            raise GuestGone(f"the answer cannot be written: {error}") from error
        except ConnectionError as error:
            raise error if isinstance(error, GuestGone) else GuestGone(str(error)) from error

    async def _upgrade(self, response: Response, join: Join) -> None:
        sent = h11.InformationalResponse(status_code=101, headers=response.headers, reason=response.reason)
        await self._wire.send(self._h11.send(sent) or b"")
        self._wire.give_back(self._h11.trailing_data[0])
        await join(self._wire)

    async def _discard(self) -> None:
        """Take what the guest still sends for a moment: closing over it would take our answer from it."""
        self._wire.send_end()
        try:
            async with asyncio.timeout(DISCARD_S):
                left = DISCARD_BYTES_MAX
                while left > 0 and (data := await self._wire.receive()):
                    left -= len(data)
        except (TimeoutError, ConnectionError):
            return


def _answering() -> h11.Connection:
    """Return the state in which a refusal can be written to a guest whose request could not be read."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    connection.next_event()
    return connection


def _asks_for_websocket(headers: Headers) -> bool:
    tokens = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    upgrades = [value.strip().lower() for name, value in headers if name == b"upgrade"]
    return b"upgrade" in tokens and upgrades == [b"websocket"]


def _forwarded(headers: Headers) -> Headers:
    return [(name, value) for name, value in end_to_end(headers) if name not in {b"host", b"expect"}]

"""One HTTP/1.1 exchange over a tunnel: the request on, the answer back, each at the pace of who takes it.

h11 reads what the guest sends and writes what it is sent, so that a guest sees exactly one request and a client exactly
one answer, whatever is in their bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import h11
from starlette.types import Receive, Scope, Send

from space.errors import GuestError, InvalidRequest, OutcomeUnknown, SpaceError
from space.node.endings import BrokenOff, ClientGone
from space.node.ports import heads
from space.node.ports.target import Target
from space.node.ports.tunnel import Tunnel

HEAD_BYTES_MAX = 64 * 1024
ANSWER_S = 600.0
"""How long a server may think before it answers."""
STALL_S = 3600.0
"""How long either side may send or take nothing once there is an answer."""
CONTINUE_S = 1.0
"""A client that waits to be asked for its body is asked after this, whatever the server thinks of it."""
SLICE_S = 0.004
"""How long bytes of one guest may keep the event loop."""
STATUS_MAX = 599
_HTTP = b"HTTP/"
INFORMATIONAL_MAX = 16
"""Heads of 1xx before the answer's own: they are tiny, and nobody is told of them."""


async def exchange(scope: Scope, receive: Receive, send: Send, target: Target, tunnel: Tunnel) -> int:
    """Carry out one exchange and return the answer's status; see ``proxy.serve`` for what it raises."""
    server = Server(tunnel)
    server.held_back = _waits_to_be_asked(scope)
    await server.ask(scope["method"], heads.path_for_server(scope, target), heads.for_server(scope, target))
    upload = asyncio.ensure_future(_upload(receive, server))
    answer = asyncio.ensure_future(_answer(send, target, server))
    try:
        await asyncio.wait((upload, answer), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            upload.result()  # It ends by itself only when the client is gone, or sends what is no body.
        return await answer
    finally:
        for task in (upload, answer):
            task.cancel()
        await asyncio.wait((upload, answer))
        for task in (upload, answer):
            if not task.cancelled():
                task.exception()


class Server:
    """The server's side of one exchange. ``ask``, read ``head`` and ``body``, and meanwhile ``give`` the request's."""

    def __init__(self, tunnel: Tunnel) -> None:
        self.tunnel = tunnel
        self._closed = False
        self._begins = b""
        """What it said first, as far as that tells whether it speaks HTTP."""
        self.wants_body = asyncio.Event()
        """Set once the server has asked for the body that a client holds back."""
        self.held_back = False
        """Whether the client has not been asked for its body yet: it may never send it."""
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)

    async def ask(self, method: str, path: bytes, headers: heads.Headers) -> None:
        """Send the head of a request."""
        await self._write(h11.Request(method=method, target=path, headers=headers))

    async def give(self, data: bytes, *, last: bool) -> None:
        """Send a part of the request's body."""
        if data:
            await self._write(h11.Data(data=data))
        if last:
            await self._write(h11.EndOfMessage())

    async def head(self) -> h11.Response | h11.InformationalResponse:
        """Return the head of the answer: a final one, or one of 101."""
        try:
            async with asyncio.timeout(ANSWER_S):
                event = await self._first_head()
        except TimeoutError as error:
            raise OutcomeUnknown(
                f"The server in the sandbox did not answer within {ANSWER_S:g} s.", code="port-timeout"
            ) from error
        if event.status_code > STATUS_MAX:
            raise GuestError(f"The server in the sandbox answered {event.status_code}.", code="bad-answer")
        if sum(len(name) + len(value) for name, value in event.headers) > HEAD_BYTES_MAX:
            # Much may come at once, and is a whole head then, however large.
            raise GuestError("The head of the server's answer is too large.", code="bad-answer")
        return event

    async def _first_head(self) -> h11.Response | h11.InformationalResponse:
        for _ in range(INFORMATIONAL_MAX):
            event = await self._next()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise GuestError("The server in the sandbox closed the connection.", code="bad-answer")
            if event.status_code == 101:
                return event
            self.wants_body.set()
        raise GuestError("The server in the sandbox has too much to say before its answer.", code="bad-answer")

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the answer's body as it comes. Raises ``SpaceError`` when it ends before it is whole."""
        parts: list[bytes] = []
        began = time.monotonic()
        while True:
            event = self._event()
            if isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                if time.monotonic() - began > SLICE_S:
                    # Many tiny chunks are dear: others have their turn in between.
                    await asyncio.sleep(0)
                    began = time.monotonic()
                continue
            if parts:
                yield b"".join(parts)
                parts.clear()
            if event is not h11.NEED_DATA:
                return
            async with asyncio.timeout(STALL_S):
                await self._read()
            began = time.monotonic()

    def left_over(self) -> bytes:
        """What came behind a head of 101, and belongs to the other protocol."""
        return self._h11.trailing_data[0]

    async def _next(self) -> object:
        while (event := self._event()) is h11.NEED_DATA:
            await self._read()
        return event

    def _event(self) -> object:
        try:
            return self._h11.next_event()
        except h11.RemoteProtocolError as error:
            cut = self._closed and self._begins == _HTTP[: len(self._begins)]
            said = "closed the connection too early" if cut else f"does not speak HTTP/1.1: {error}"
            raise GuestError(f"The server in the sandbox {said}.", code="bad-answer") from error

    async def _read(self) -> None:
        data = await self.tunnel.read()
        self._closed = not data
        self._begins += data[: len(_HTTP) - len(self._begins)]
        self._h11.receive_data(data)

    async def _write(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        try:
            data = self._h11.send(event)
        except h11.LocalProtocolError as error:
            raise InvalidRequest(f"The request cannot be passed on: {error}", code="invalid-request") from error
        if data:
            async with asyncio.timeout(STALL_S):
                await self.tunnel.write(data)


async def _upload(receive: Receive, server: Server) -> None:
    """Pass the request's body on; then wait for the client to go, and raise ``ClientGone``."""
    if server.held_back:
        with suppress(TimeoutError):
            async with asyncio.timeout(CONTINUE_S):
                await server.wants_body.wait()
        server.held_back = False  # Reading the body is what asks the client for it.
    takes = True
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if takes:
            try:
                await server.give(message.get("body", b""), last=not message.get("more_body", False))
            except InvalidRequest:
                raise
            except SpaceError:
                takes = False  # It has answered, or gone: that comes the other way.


async def _answer(send: Send, target: Target, server: Server) -> int:
    response = await server.head()
    if not isinstance(response, h11.Response):
        raise GuestError("The server in the sandbox changed the protocol unasked.", code="bad-answer")
    return await pass_answer(send, target, server, response)


async def pass_answer(send: Send, target: Target, server: Server, response: h11.Response) -> int:
    """Pass an answer on whose head has come; ``BrokenOff`` when not all of it comes."""
    status = response.status_code
    headers = heads.for_client(status, response.headers, target)
    if server.held_back:
        # Whether a body or another request comes next cannot be told.
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    try:
        async for data in server.body():
            async with asyncio.timeout(STALL_S):
                await send({"type": "http.response.body", "body": data, "more_body": True})
    except (SpaceError, TimeoutError) as error:
        raise BrokenOff from error
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return status


def _waits_to_be_asked(scope: Scope) -> bool:
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])

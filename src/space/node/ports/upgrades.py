"""WebSockets into a sandbox: once the server there has agreed, bytes are relayed and nobody here reads them.

So whatever the two have agreed on holds: subprotocols, compression, closing codes, messages of any size. For that a
server has to give its connection away, which ASGI knows no way for: ``upgradable`` makes a protocol for uvicorn that
offers it, as ``scope["extensions"]["space.connection"]`` of a scope of type ``websocket``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
import httptools
import structlog
from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from space.errors import RequestError, SpaceError
from space.listening import BoundedProtocol
from space.node.ports import heads
from space.node.ports.exchange import Server, pass_answer
from space.node.ports.target import Target
from space.node.ports.tunnel import Tunnel

log = structlog.get_logger(__name__)

EXTENSION = "space.connection"
READ_BYTES = 64 * 1024
STALL_S = 3600.0
FAREWELL_S = 30.0
"""How long one side may go on when the other has ended."""
REFUSAL_S = 30.0
KEEPALIVE_S = 60
_PHRASES = {int(status): status.phrase for status in HTTPStatus}


class Connection:
    """A client's connection that was given away: bytes both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def write(self, data: bytes) -> None:
        """Send, waiting while the client takes no more. Raises ``OSError`` when it is gone."""
        self.writer.write(data)
        async with asyncio.timeout(STALL_S):
            await self.writer.drain()


async def pass_upgrade(scope: Scope, send: Send, target: Target, tunnel: Tunnel) -> int:
    """Ask the server to upgrade; relay bytes once it has, until both sides have ended. Else pass its answer on."""
    connection: Connection | None = scope.get("extensions", {}).get(EXTENSION)
    if connection is None:
        raise RequestError("A WebSocket to a port is not possible here.", code="no-upgrade")
    server = Server(tunnel)
    headers = heads.for_server(scope, target, upgrade=True)
    await server.ask("GET", heads.path_for_server(scope, target), headers)
    await server.give(b"", last=True)
    response = await server.head()
    if isinstance(response, h11.Response):
        return await pass_answer(_as_refusal(send), target, server, response)
    agreed = heads.for_client(101, response.headers, target, upgrade=True)
    with contextlib.suppress(OSError, TimeoutError):
        await connection.write(_head(101, agreed) + server.left_over())
        await _relay(connection, tunnel)
    return 101


async def _relay(connection: Connection, tunnel: Tunnel) -> None:
    inward = asyncio.ensure_future(_inward(connection, tunnel))
    outward = asyncio.ensure_future(_outward(connection, tunnel))
    both = (inward, outward)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if all(task.exception() is None for task in both if task.done()):
            await asyncio.wait(both, timeout=FAREWELL_S)
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)
        for task in both:
            # However it ended, both ends see it: what is to be said of it cannot be said in their protocol.
            if not task.cancelled():
                task.exception()


async def _inward(connection: Connection, tunnel: Tunnel) -> None:
    while data := await connection.reader.read(READ_BYTES):
        async with asyncio.timeout(STALL_S):
            await tunnel.write(data)
    await tunnel.end()


async def _outward(connection: Connection, tunnel: Tunnel) -> None:
    while data := await tunnel.read():
        await connection.write(data)
    if connection.writer.can_write_eof():
        connection.writer.write_eof()
    else:
        connection.writer.close()  # TLS has no half of a connection to close.


def _as_refusal(send: Send) -> Send:
    """Send an ordinary answer where a WebSocket was asked for."""

    async def refuse(message: Message) -> None:
        kind = message["type"].replace("http.response", "websocket.http.response")
        await send({**message, "type": kind})

    return refuse


def upgradable(wanted: Callable[[Scope], bool], base: type[BoundedProtocol] = BoundedProtocol) -> type[BoundedProtocol]:
    """Return the protocol that gives connections away for the WebSocket requests that are ``wanted``."""

    class UpgradableProtocol(base):
        def _should_upgrade_to_ws(self) -> bool:
            return True  # Also where uvicorn has been given no WebSockets of its own.

        def handle_websocket_upgrade(self) -> None:
            scope = _scope(self.scope, self.url)
            if scope is None or not wanted(scope):
                if self.ws_protocol_class is not None:
                    super().handle_websocket_upgrade()
                    return
                self.transport.write(_head(400, [(b"content-length", b"0"), (b"connection", b"close")]))
                self.transport.close()
                return
            if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
                self.transport.write(_head(503, [(b"content-length", b"0"), (b"connection", b"close")]))
                self.transport.close()
                return
            _give_away(self, scope)

    return UpgradableProtocol


class _GivenAway(asyncio.StreamReaderProtocol):
    """What a connection is to uvicorn once its bytes are another's; ``shutdown`` is what that calls at its end."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop, connections: set[Any]) -> None:
        super().__init__(reader, loop=loop)
        self._connections = connections
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = transport  # type: ignore[assignment]
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self.transport is not None:
            self.transport.close()


def _give_away(protocol: HttpToolsProtocol, scope: Scope) -> None:
    loop, transport = protocol.loop, protocol.transport
    protocol.connections.discard(protocol)
    reader = asyncio.StreamReader(READ_BYTES, loop)
    given = _GivenAway(reader, loop, protocol.connections)
    given.connection_made(transport)
    transport.set_protocol(given)
    writer = asyncio.StreamWriter(transport, given, reader, loop)
    _keep_alive(transport)
    scope["extensions"] = {EXTENSION: Connection(reader, writer)}
    task = loop.create_task(_serve(protocol.app, scope, writer))
    protocol.tasks.add(task)
    task.add_done_callback(protocol.tasks.discard)


async def _serve(app: Any, scope: Scope, writer: asyncio.StreamWriter) -> None:
    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        if message["type"] == "websocket.http.response.start":
            named = {name for name, _ in message["headers"]}
            close = [] if b"connection" in named else [(b"connection", b"close")]
            writer.write(_head(message["status"], [*message["headers"], *close]))
        elif message["type"] == "websocket.http.response.body":
            writer.write(message.get("body", b""))
        elif message["type"] == "websocket.close":
            writer.write(_head(403, [(b"content-length", b"0"), (b"connection", b"close")]))
        else:
            raise RuntimeError(f"{message['type']} is not possible on a connection that was given away")
        async with asyncio.timeout(REFUSAL_S):
            await writer.drain()

    try:
        await app(scope, receive, send)
    except (OSError, TimeoutError, SpaceError):
        log.debug("upgrade-ended")
    except Exception:
        log.exception("upgrade-broke")
    finally:
        writer.close()


def _keep_alive(transport: asyncio.Transport) -> None:
    """Have the kernel find out when a client is gone: neither side of a WebSocket need ever say anything."""
    connected = transport.get_extra_info("socket")
    if connected is not None and connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 4)


def _scope(known: Any, url: bytes) -> Scope | None:
    """Return the scope of an upgrade; uvicorn leaves out what only its own WebSockets would need."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return None
    raw_path = parsed.path or b"/"
    return {
        **known,
        "type": "websocket",
        "scheme": "wss" if known["scheme"] == "https" else "ws",
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": parsed.query or b"",
        "subprotocols": [],
    }


def _head(status: int, headers: heads.Headers) -> bytes:
    phrase = _PHRASES.get(status, "")
    lines = b"".join(b"%b: %b\r\n" % (name, value) for name, value in headers)
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, phrase.encode(), lines)

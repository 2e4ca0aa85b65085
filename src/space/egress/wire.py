"""A byte stream with backpressure in both directions, in plain or under TLS. Knows nothing of what the bytes mean."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from typing import cast

from space.egress.holding import note

HANDSHAKE_S = 10.0
CLOSE_S = 2.0
STALLED_S = 3600.0
"""Longest time that the other end may have no room for what is sent to it; a guest may be paused meanwhile."""
TOGETHER_BYTES_MAX = 64 * 1024
READ_BYTES_HIGH = 512 * 1024
WRITE_BYTES_HIGH = 512 * 1024


class Wire(asyncio.Protocol):
    """One connection. What has come and was not taken is at most `READ_BYTES_HIGH` and what the kernel gave at once."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._reading = True
        self._ended = False
        self._lost: Exception | None = None
        self._is_lost = False
        self._unsent: list[bytes | bytearray | memoryview] = []
        self._unsent_bytes = 0
        self._sending: asyncio.Handle | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._is_full = False
        self.closed = asyncio.get_running_loop().create_future()
        """Done once the connection is gone."""
        self.said_all: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the other end has said that nothing more will come from it."""
        note(self)

    # --- for who uses it

    @property
    def transport(self) -> asyncio.Transport:
        if self._transport is None:
            raise ConnectionError("not connected")
        return self._transport

    @property
    def alive(self) -> bool:
        """Whether more may come and be sent, as far as is known."""
        return self._transport is not None and not self._is_lost and not self._ended and not self.transport.is_closing()

    @property
    def quiet(self) -> bool:
        """Whether it is alive and nothing has come that nobody asked for."""
        return self.alive and not self._chunks

    def alpn(self) -> str | None:
        """Return the protocol that was agreed on under TLS."""
        tls = cast("ssl.SSLObject | None", self.transport.get_extra_info("ssl_object"))
        return tls.selected_alpn_protocol() if tls is not None else None

    async def receive(self) -> bytes:
        """Return the next bytes, and ``b""`` at the end; raise ``ConnectionError`` when the connection broke."""
        while not self._chunks:
            if self._ended:
                return b""
            if self._is_lost:
                raise ConnectionResetError(str(self._lost or "closed"))
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        chunk = self._chunks.popleft()
        self._held -= len(chunk)
        if not self._reading and self._held <= READ_BYTES_HIGH // 2 and not self._is_lost:
            self._reading = True
            self.transport.resume_reading()
        return chunk

    def give_back(self, chunk: bytes) -> None:
        """Have the next ``receive`` return these bytes, which were taken too early."""
        if chunk:
            self._chunks.appendleft(chunk)
            self._held += len(chunk)

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send, and wait while the other end does not take it. Raises ``ConnectionError`` when it is gone."""
        self.write(data)
        if self._is_full:
            await self.drain()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send without waiting. What is little goes out together with what else is written in the same moment."""
        self._check_open()
        if not data:
            return
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes >= TOGETHER_BYTES_MAX:
            self._send_out()
        elif self._sending is None:
            self._sending = asyncio.get_running_loop().call_soon(self._send_out)

    @property
    def held(self) -> int:
        """How many bytes wait here for somebody to take them."""
        return self._held + (0 if self._transport is None or self._is_lost else self.unsent)

    @property
    def unsent(self) -> int:
        """How many bytes wait for the other end to take them."""
        return self.transport.get_write_buffer_size() + self._unsent_bytes

    async def drain(self) -> None:
        """Wait until there is room to send; where there is none for `STALLED_S`, the connection is at its end."""
        self._check_open()
        while self._is_full:
            if self._room is None:
                self._room = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(STALLED_S):
                    await asyncio.shield(self._room)
            except TimeoutError:
                self.abort()
                raise ConnectionAbortedError("the other end takes nothing") from None
            self._check_open()

    def send_end(self) -> bool:
        """Say that nothing more will be sent; False where that cannot be said without closing the connection."""
        if self._transport is None or self._is_lost or not self._transport.can_write_eof():
            return False
        self._send_out()
        self._transport.write_eof()
        return True

    async def close(self) -> None:
        """Close in good order: what was sent still goes out, within `CLOSE_S`. It is closed however this ends."""
        if self._transport is None or self._is_lost:
            return
        self._send_out()
        self._transport.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.closed), CLOSE_S)
        except TimeoutError:
            pass
        finally:
            if not self.closed.done():
                self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _send_out(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        unsent, self._unsent, self._unsent_bytes = self._unsent, [], 0
        if unsent and self._transport is not None and not self._is_lost:
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    def _check_open(self) -> None:
        if self._is_lost or self._transport is None:
            raise ConnectionResetError(str(self._lost or "closed"))

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BYTES_HIGH)

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        self._held += len(data)
        if self._reading and self._held > READ_BYTES_HIGH:
            self._reading = False
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        if not self.said_all.done():
            self.said_all.set_result(None)
        return self.transport.get_extra_info("ssl_object") is None  # TLS has no half-closed connections here

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost, self._lost = True, exc
        if exc is None:
            self._ended = True
        self._wake()
        self.resume_writing()
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


async def accepted(sock: socket.socket, tls: ssl.SSLContext | None) -> Wire:
    """Take over an accepted connection; with ``tls`` shake hands as its server. The socket is closed on failure."""
    wire = Wire()  # made here: what uvloop returns beside the transport is not always the protocol
    wait_s = None if tls is None else HANDSHAKE_S
    try:
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: wire, sock, ssl=tls, ssl_handshake_timeout=wait_s
        )
    except BaseException:
        sock.close()
        raise
    return wire


async def connected(sock: socket.socket, tls: ssl.SSLContext | None, server_name: str | None) -> Wire:
    """Take over a connected socket; with ``tls`` shake hands as its client. The socket is closed on failure."""
    wire = Wire()
    wait_s = None if tls is None else HANDSHAKE_S
    try:
        await asyncio.get_running_loop().create_connection(
            lambda: wire, sock=sock, ssl=tls, server_hostname=server_name, ssl_handshake_timeout=wait_s
        )
    except BaseException:
        sock.close()
        raise
    return wire

"""The first bytes of an accepted connection, looked at and left where they are, for whoever will take it over."""

from __future__ import annotations

import asyncio
import re
import socket

from space.egress.client_hello import HELLO_BYTES_MAX, RECORD_HANDSHAKE, ClientHello, HelloReader

_LINE = re.compile(rb"[A-Z]{1,20} [!-~]+ HTTP/1\.[01]\r\n")
_BEGINNING = re.compile(rb"[A-Z]{1,20}(?: [ -~]*\r?)?")
_HOST = re.compile(rb"\r\nhost:[ \t]*([!-9;-~]+)(?::[0-9]+)?[ \t]*\r\n", re.IGNORECASE)


async def first_byte(sock: socket.socket) -> int | None:
    """Wait for the first byte; None: there will be none."""
    data = await _wait_peek(sock, 1)
    return data[0] if data else None


def is_tls(byte: int) -> bool:
    return byte == RECORD_HANDSHAKE


async def client_hello(sock: socket.socket) -> ClientHello | None:
    """Wait for the whole ClientHello; None: the client ended before. Raises ``NotAHello``."""
    reader, least = HelloReader(), 1
    try:
        while True:
            data = await _wait_peek(sock, least)
            hello = reader.read(data)
            if hello is not None:
                return hello
            if len(data) < least:
                return None
            least = len(data) + 1
    finally:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


async def http_host(sock: socket.socket) -> str | None:
    """Wait for the head of an HTTP request and return the host it names; None: it names none in the usual form.

    What does not begin as one is not waited for: whoever sent it may be waiting for an answer.
    """
    least = 1
    try:
        while True:
            data = await _wait_peek(sock, least)
            if not _LINE.match(data) and not _BEGINNING.fullmatch(data):
                return None
            if b"\r\n\r\n" in data or len(data) < least or len(data) >= HELLO_BYTES_MAX:
                found = _HOST.search(data)
                return found[1].decode("ascii", "replace") if found else None
            least = len(data) + 1
    finally:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


async def _wait_peek(sock: socket.socket, least: int) -> bytes:
    """Return what is there once it is at least so much, or no more will come.

    The socket is readable as long as nothing is taken; so the kernel is told from how much on it counts as that.
    """
    loop = asyncio.get_running_loop()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
    while True:
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(sock.fileno(), _done, readable)
        try:
            await readable
        finally:
            loop.remove_reader(sock.fileno())
        try:
            return sock.recv(HELLO_BYTES_MAX + 1, socket.MSG_PEEK)
        except BlockingIOError:
            continue


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

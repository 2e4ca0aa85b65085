"""Who may connect: strangers on the trusted socket are cut off by what the kernel says of them."""

import asyncio
import os
import socket

from space.listening import peer_uid, trusting
from space.node.server import _server


class Transport:
    """What a protocol asks of a connection to know its peer."""

    def __init__(self, sock):
        self.sock = sock

    def get_extra_info(self, name):
        assert name == "socket"
        return self.sock


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"trusted"})


async def answer(path, uids: frozenset[int]) -> bytes:
    """What a client of a server that trusts ``uids`` reads."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    server = _server(app, trusting(uids), None)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            try:
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()
    finally:
        server.should_exit = True
        await serving


def test_the_peer_is_who_the_kernel_says():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_uid(Transport(ours)) == os.geteuid()


async def test_the_trusted_are_served(tmp_path):
    assert b"trusted" in await answer(tmp_path / "s", frozenset({os.geteuid()}))


async def test_strangers_get_no_answer(tmp_path):
    assert await answer(tmp_path / "s", frozenset({os.geteuid() + 1})) == b""

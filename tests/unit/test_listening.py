"""What a server takes from clients that it knows nothing of yet: no more than so much, for no longer than so long."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from space import listening
from space.errors import HostError, Unavailable
from space.listening import HEADER_BYTES_MAX, SMALL_BODY_BYTES, Bodies, BoundedProtocol, check_address

MIB = 1 << 20
ENOUGH = 64 * MIB
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"


async def app(_scope: Any, receive: Any, send: Any) -> None:
    """Answer with the length of the body."""
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": str(size).encode()})


@asynccontextmanager
async def client(path: Path) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(path))
    bound.listen()
    server = uvicorn.Server(
        uvicorn.Config(app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False)
    )
    serving = asyncio.ensure_future(server._serve(sockets=[bound]))
    try:
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_unix_connection(path)
            yield reader, writer
            writer.close()
    finally:
        server.should_exit = True
        await serving


async def sent_until_cut_off(path: Path, begin: bytes, more: bytes) -> int:
    """Send ``begin``, then ``more`` again and again; return how many bytes went before the server hung up."""
    async with client(path) as (reader, writer):
        writer.write(begin)
        sent = 0
        try:
            while sent < ENOUGH and not reader.at_eof():
                writer.write(more)
                await writer.drain()
                sent += len(more)
        except ConnectionError:
            pass
        assert b"200" not in await _rest(reader)
        return sent


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (HEAD, b"x-filler: " + b"a" * 1000 + b"\r\n"),
        (HEAD + b"x-endless: ", b"a" * 16384),
        (b"POST /", b"a" * 16384),
        (CHUNKED + b"x-endless-trailer: ", b"a" * 16384),
        (CHUNKED, b"x-trailer: " + b"a" * 1000 + b"\r\n"),
    ],
    ids=["many headers", "a header without end", "a path without end", "a trailer without end", "many trailers"],
)
async def test_a_head_without_end_is_cut_off(tmp_path: Path, begin: bytes, more: bytes) -> None:
    # What lies in the socket's buffers and in one read of the server comes on top.
    assert await sent_until_cut_off(tmp_path / "s", begin, more) < HEADER_BYTES_MAX + 2 * MIB


async def test_a_client_that_does_not_finish_its_head_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HEADER_TIMEOUT_S", 0.05)
    async with client(tmp_path / "s") as (reader, writer):
        writer.write(HEAD)
        assert await _rest(reader) == b""


async def test_a_body_of_any_size_comes_through_at_once_or_in_pieces(tmp_path: Path) -> None:
    async with client(tmp_path / "s") as (reader, writer):
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % (8 * MIB) + bytes(8 * MIB))
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200")
    assert str(8 * MIB).encode() in answer


def test_large_bodies_are_bounded_together_and_small_ones_are_always_taken() -> None:
    bodies = Bodies(MIB)
    with bodies.one() as large, bodies.one() as late, bodies.one() as small:
        large.grow(MIB + SMALL_BODY_BYTES)
        late.grow(SMALL_BODY_BYTES)
        with pytest.raises(Unavailable) as refused:
            late.grow(1)
        assert refused.value.code == "too-many-bodies"
        small.grow(SMALL_BODY_BYTES)
    with bodies.one() as again:
        for _ in range(16):
            again.grow((MIB + SMALL_BODY_BYTES) // 16)


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.1", "::", "example.test"])
def test_listening_in_the_clear_elsewhere_needs_to_be_allowed(address: str) -> None:
    with pytest.raises(HostError, match="TLS"):
        check_address("api", address, allow_plaintext=False)
    check_address("api", address, allow_plaintext=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost", "127.8.0.1"])
def test_loopback_needs_nothing(address: str) -> None:
    check_address("node", address, allow_plaintext=False)

"""What is sent on a connection waits for the other end so long and no longer, and every end of it closes it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from space.egress import dns, wire
from space.egress.wire import WRITE_BYTES_HIGH, Wire, accepted

WAIT_S = 10
MORE_THAN_FITS = bytes(16 * WRITE_BYTES_HIGH)


async def ends() -> tuple[Wire, socket.socket]:
    """Return a wire and the socket at its other end, which reads nothing."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)  # noqa: FBT003 - of socket
    return await accepted(ours, None), theirs


async def test_an_end_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STALLED_S", 0.05)
    ours, theirs = await ends()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ConnectionError, match="takes nothing"):
            await ours.send(MORE_THAN_FITS)
        await ours.closed
    theirs.close()


async def test_closing_that_is_cut_short_closes_all_the_same() -> None:
    ours, theirs = await ends()
    ours.write(MORE_THAN_FITS)
    closing = asyncio.create_task(ours.close())
    await asyncio.sleep(0)
    closing.cancel()
    async with asyncio.timeout(wire.CLOSE_S / 2):
        await asyncio.wait([closing])
        await ours.closed
    assert closing.cancelled()
    theirs.close()


class Long:
    """A name server whose answers are as long as they may be."""

    async def answer(self, address: str, data: bytes) -> bytes:
        assert (address, data) == ("127.0.0.1", b"?")
        return bytes(65535)


async def test_who_asks_for_names_and_takes_no_answers_keeps_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns, "TCP_SILENCE_S", 0.05)
    served: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await dns.serve_stream(Long(), reader, writer)  # type: ignore[arg-type]
        served.set_result(writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        with socket.create_connection(server.sockets[0].getsockname()) as client:
            client.sendall(b"\x00\x01?" * dns.TCP_QUESTIONS_MAX)
            async with asyncio.timeout(WAIT_S):
                writer = await served
                assert writer.transport.get_write_buffer_size() == 0

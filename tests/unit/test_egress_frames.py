"""Frames of HTTP/2 are followed however they are cut, and those too large are refused at their first nine bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import h2.exceptions
import h2.settings
import pytest

from space.egress import http2
from space.egress.frames import AT_ONCE, FRAME_BYTES_MAX, Frames
from space.egress.http2 import Http2, Stream
from space.egress.inject import RequestHead
from space.egress.messages import HEAD_BYTES_MAX, Body, GuestGone, Request
from space.egress.upstream_http2 import Http2Upstream
from space.egress.wire import accepted, connected

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, CONTINUATION = 0, 1, 9
WAIT_S = 10
HEAD = [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"x"), (b":path", b"/")]


def head(size: int, kind: int) -> bytes:
    return size.to_bytes(3) + bytes([kind, 0]) + (1).to_bytes(4)


def frame(size: int, kind: int = DATA) -> bytes:
    return head(size, kind) + bytes(size)


@pytest.mark.parametrize("step", [1, 2, 5, 9, 10, 1000])
def test_frames_are_followed_however_they_are_cut(step: int) -> None:
    frames = Frames(preface=True)
    data = PREFACE + frame(0) + frame(3) + frame(20, HEADERS) + frame(1, CONTINUATION) + frame(700) + head(1, DATA)
    for at in range(0, len(data), step):
        frames.follow(data[at : at + step])
    with pytest.raises(h2.exceptions.ProtocolError):
        frames.follow(b"a" + head(FRAME_BYTES_MAX + 1, DATA))


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_many_frames_are_told_where_it_is_somebody_elses_turn(step: int) -> None:
    frames = Frames(preface=True)
    data = PREFACE + (frame(0) + frame(3)) * AT_ONCE
    told = [at + place for at in range(0, len(data), step) for place in frames.follow(data[at : at + step])]
    assert told == [len(PREFACE) + number * (AT_ONCE // 2) * (2 * 9 + 3) - 3 for number in (1, 2)]


def test_the_largest_that_was_agreed_on_is_taken() -> None:
    Frames(preface=False).follow(frame(FRAME_BYTES_MAX))


def test_a_head_in_parts_is_as_large_as_one_in_one() -> None:
    frames = Frames(preface=False)
    frames.follow(frame(HEAD_BYTES_MAX // 2, HEADERS) + frame(HEAD_BYTES_MAX // 2, CONTINUATION))
    frames.follow(frame(HEAD_BYTES_MAX // 2, HEADERS))  # the next one
    with pytest.raises(h2.exceptions.ProtocolError):
        frames.follow(frame(HEAD_BYTES_MAX // 2 + 1, CONTINUATION))
    with pytest.raises(h2.exceptions.ProtocolError):
        Frames(preface=False).follow(frame(HEAD_BYTES_MAX + 1, HEADERS))


@asynccontextmanager
async def two_ends() -> AsyncIterator[tuple[Http2, Http2, Stream, Stream]]:
    """A client and a server, and a stream between them."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)  # noqa: FBT003 - of socket
    opened: asyncio.Queue[Stream] = asyncio.Queue()
    client = Http2(await connected(ours, None, None), _no_turns, client=True)
    server = Http2(await accepted(theirs, None), _no_turns, client=False, opened=opened.put_nowait)
    await client.begin()
    await server.begin()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(WAIT_S):
        running = [tasks.create_task(one.run()) for one in (client, server)]
        stream = await client.open(HEAD, end=True)
        yield client, server, stream, await opened.get()
        await client.go_away()
        await server.go_away()
        for task in running:
            task.cancel()


async def _no_turns() -> None:
    """Whoever is alone has every turn."""


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so, as long as the surrounding timeout lets it."""
    while not condition():  # noqa: ASYNC110 - of what is asked nobody tells
        await asyncio.sleep(0)


async def test_a_body_many_times_the_window_arrives_whole() -> None:
    size = 3 * http2.CONNECTION_WINDOW + 12_345
    async with two_ends() as (_, server, stream, answered):
        await server.send_headers(answered, [(b":status", b"200")], end=False)

        async def answer() -> None:
            for at in range(0, size, 1_000_000):
                await server.send(answered, bytes(min(1_000_000, size - at)))
            await server.send_end(answered)

        answering = asyncio.create_task(answer())
        got = 0
        while part := await stream.take():
            got += len(part)
        await answering
        assert (got, stream.ended, stream.unread) == (size, True, 0)


async def test_what_is_not_taken_is_within_the_window() -> None:
    async with two_ends() as (client, server, stream, answered):
        await server.send_headers(answered, [(b":status", b"200")], end=False)
        sending = asyncio.create_task(server.send(answered, bytes(4 * http2.STREAM_WINDOW)))
        await stream.headers
        await until(lambda: stream.unread >= http2.STREAM_WINDOW)
        assert not sending.done()
        assert stream.unread == http2.STREAM_WINDOW
        await client.reset(stream)
        with pytest.raises(ConnectionError):
            await sending


async def test_a_stream_that_cannot_be_opened_is_not_kept() -> None:
    async with two_ends() as (client, server, _, _):
        server._h2.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 1})
        await server.flush()
        await until(lambda: client._h2.remote_settings.max_concurrent_streams == 1)
        with pytest.raises(ConnectionError):
            await client.open(HEAD, end=True)
        assert client.streams == 1


async def test_a_body_that_its_guest_breaks_off_is_not_the_servers_fault() -> None:
    async def broken() -> Body:
        yield b"half"
        raise GuestGone("the body broke off")

    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)  # noqa: FBT003 - of socket
    upstream = Http2Upstream(await connected(ours, None, None), _no_turns)
    server = Http2(await accepted(theirs, None), _no_turns, client=False)
    await upstream.begin()
    await server.begin()
    running = [asyncio.create_task(one.run()) for one in (upstream, server)]
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(GuestGone):
            async with upstream.exchange(Request(RequestHead("POST", "https", "x", 443, "/", []), broken(), "h2")):
                pass
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    await server.go_away()


async def test_an_end_that_gives_a_stream_no_credit_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http2, "STALLED_S", 0.05)
    async with two_ends() as (client, server, stream, answered):
        await server.send_headers(answered, [(b":status", b"200")], end=False)
        with pytest.raises(ConnectionError, match="takes nothing"):
            await server.send(answered, bytes(2 * http2.STREAM_WINDOW))
        assert (client.ended, server.ended, stream.unread) == (False, False, http2.STREAM_WINDOW)


@pytest.mark.parametrize(("part", "held"), [(b"", 0), (b"a", 60_000)], ids=["empty", "small"])
async def test_frames_with_next_to_nothing_are_held_in_next_to_nothing(part: bytes, held: int) -> None:
    async with two_ends() as (client, server, stream, answered):
        await server.send_headers(answered, [(b":status", b"200")], end=False)
        await stream.headers
        server._wire.write((len(part).to_bytes(3) + bytes(2) + stream.number.to_bytes(4) + part) * 60_000)
        await server.send_headers(answered, [(b"x-last", b"1")], end=True)
        await until(lambda: stream.ended)
        assert (stream.unread, len(stream._chunks)) == (held, -(-held // http2.TOGETHER_BYTES_MAX))
        if part:
            got = b""
            while len(got) < held:
                got += await stream.take()
            assert got == part * held
        assert client.streams == 1


async def test_the_table_for_headers_is_no_larger_than_usual_whatever_the_other_end_likes() -> None:
    async with two_ends() as (client, server, stream, answered):
        client._h2.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 1 << 30})
        await client.flush()
        await server.send_headers(answered, [(b":status", b"200")], end=True)
        await stream.headers
        await until(lambda: server._h2.remote_settings.header_table_size == 1 << 30)
        assert server._h2.encoder.header_table_size == http2.HEADER_TABLE_BYTES

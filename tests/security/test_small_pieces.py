"""A guest that sends its output in single bytes costs the node bytes, not an object for each."""

import asyncio
import tracemalloc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from space.model.command import CommandSpec
from space.node.guests import Guest
from space.node.readers import Chunk
from space.node.runs import Relay, Run
from space.node.transfers import Download
from space.protocol.streams import WINDOW_BYTES

PIECES = 100_000
BYTES_MAX = 2 * PIECES * len(b"xx") + WINDOW_BYTES


class Owner:
    """Owns a guest that is never opened, so nobody is ever told anything."""

    def on_welcome(self, guest: Guest, welcome: object) -> None: ...

    def on_exit(self, guest: Guest, fields: dict[str, object]) -> None: ...

    def on_lost(self, guest: Guest, cause: str) -> None: ...


@contextmanager
def costs_at_most(bytes_max: int) -> Generator[None]:
    tracemalloc.start()
    try:
        yield
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < bytes_max, f"{kept} bytes are kept"


def piece(number: int) -> bytes:
    """A bytes object of its own, as a frame's payload is one."""
    return bytes((number % 256, number // 256 % 256))


def fill(take: Callable[[str, int, bytes], object]) -> None:
    for number in range(PIECES):
        for stream in ("stdout", "stderr"):
            take(stream, 2 * number, piece(number))


async def test_output_of_exec_that_nobody_reads_costs_its_bytes(tmp_path: Path) -> None:
    relay = Relay()
    with costs_at_most(BYTES_MAX):
        fill(relay.take)
    run = Run(Guest("machine", tmp_path, Owner()), CommandSpec(("true",)), None, relay.take)
    whole = b"".join(map(piece, range(PIECES)))
    received = {"stdout": b"", "stderr": b""}
    async with asyncio.timeout(20):
        while any(len(data) < len(whole) for data in received.values()):
            chunk = await relay.follow(run)
            assert isinstance(chunk, Chunk)
            assert chunk.offset == len(received[chunk.stream])
            received[chunk.stream] += chunk.data
    assert received == {"stdout": whole, "stderr": whole}


def test_a_file_that_nobody_reads_costs_its_bytes(tmp_path: Path) -> None:
    download = Download(Guest("machine", tmp_path, Owner()))
    with costs_at_most(BYTES_MAX):
        for number in range(PIECES):
            download.on_data(1, 2 * number, piece(number))
    assert b"".join(download._chunks) == b"".join(map(piece, range(PIECES)))

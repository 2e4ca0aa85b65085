"""A port of this machine that leads into a sandbox: each connection to it is one to a port there."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from space import AsyncClient, AsyncSandbox
from space.errors import SpaceError
from space.sdk._async.connection import AsyncConnection

READ_BYTES = 64 * 1024
AT_ONCE = 512
FAREWELL_S = 30.0


async def forward(sandbox_id: str, inside: int, local: int, say: Callable[[str], None]) -> None:
    """Listen on ``local`` (0: any port that is free) of this machine's loopback until cancelled."""
    async with AsyncClient() as client:
        sandbox = await AsyncSandbox.connect(sandbox_id, client=client)
        seats = asyncio.Semaphore(AT_ONCE)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with seats, sandbox.ports.connect(inside) as connection:
                    await _relay(reader, writer, connection)
            except SpaceError as error:
                say(f"space: {error.message}")
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", local)
        async with server:
            say(f"127.0.0.1:{server.sockets[0].getsockname()[1]} leads to port {inside} of {sandbox_id}")
            await server.serve_forever()


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: AsyncConnection) -> None:
    inward = asyncio.ensure_future(_inward(reader, connection))
    outward = asyncio.ensure_future(_outward(connection, writer))
    both = (inward, outward)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if outward.done() and outward.exception() is None:
            await asyncio.wait((inward,), timeout=FAREWELL_S)
        elif inward.exception() is None:
            await asyncio.wait((outward,))
        for task in both:
            if task.done():
                with suppress(OSError):  # The local program is gone, which needs no words.
                    task.result()
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)


async def _inward(reader: asyncio.StreamReader, connection: AsyncConnection) -> None:
    while data := await reader.read(READ_BYTES):
        await connection.write(data)
    await connection.end()


async def _outward(connection: AsyncConnection, writer: asyncio.StreamWriter) -> None:
    while data := await connection.read():
        writer.write(data)
        await writer.drain()
    writer.write_eof()

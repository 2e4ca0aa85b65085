"""Waiting with asyncio."""

import asyncio
import math
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TypeVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from space.sdk.attach import FRAME_BYTES_MAX, SUBPROTOCOL
from space.sdk.backends import CLOSE_TIMEOUT_S, IDLE_S, OPEN_TIMEOUT_S, QUEUE_FRAMES_MAX, Disconnected
from space.sdk.errors import from_answer

__all__ = ["Condition", "Lock", "Socket", "in_thread", "sleep", "wait_on"]

sleep = asyncio.sleep
Condition = asyncio.Condition
Lock = asyncio.Lock
T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Run something that blocks (a local file) without holding up the loop."""
    return await asyncio.to_thread(function)


async def wait_on(condition: asyncio.Condition, timeout_s: float | None) -> None:
    """Wait to be notified. Raises ``TimeoutError`` after ``timeout_s`` seconds; None waits for ever."""
    async with asyncio.timeout(timeout_s):
        await condition.wait()


class Socket:
    """One WebSocket of the data plane. Only one task may receive at a time."""

    def __init__(self, connection: ClientConnection, held: AsyncExitStack) -> None:
        self._connection = connection
        self._held = held

    @classmethod
    async def open(
        cls,
        url: str,
        headers: Mapping[str, str],
        *,
        tls: ssl.SSLContext | None,
        use_proxy: bool,
        protocol: str = SUBPROTOCOL,
    ) -> "Socket":
        """Connect. Raises `Disconnected` when that may work later, and the server's error when it refuses."""
        held = AsyncExitStack()
        try:
            connection = await held.enter_async_context(
                connect(
                    url,
                    subprotocols=[Subprotocol(protocol)],
                    additional_headers=headers,
                    compression=None,
                    ssl=tls,
                    proxy=True if use_proxy else None,
                    open_timeout=OPEN_TIMEOUT_S,
                    close_timeout=CLOSE_TIMEOUT_S,
                    # A reader that is slow on purpose would look dead to an automatic ping; `receive` asks instead.
                    ping_interval=None,
                    max_size=FRAME_BYTES_MAX,
                    max_queue=QUEUE_FRAMES_MAX,
                )
            )
        except InvalidStatus as error:
            status = error.response.status_code
            if status in {502, 503, 504}:
                raise Disconnected(str(error)) from error
            raise from_answer(status, bytes(error.response.body or b"")) from error
        except (OSError, InvalidHandshake, WebSocketException, EOFError) as error:
            raise Disconnected(str(error) or type(error).__name__) from error
        return cls(connection, held)

    async def receive(self, timeout_s: float | None = None) -> bytes | str:
        """Return the next frame.

        Raises `Disconnected` when the connection ends or the other side falls silent, and ``TimeoutError`` when the
        command has nothing to say for ``timeout_s`` seconds.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pong: asyncio.Future[float] | None = None
        while True:
            wait_s = max(0.0, min(IDLE_S, deadline - time.monotonic()))
            try:
                async with asyncio.timeout(wait_s):
                    return await self._connection.recv()
            except TimeoutError as error:
                if time.monotonic() >= deadline:
                    raise
                if pong is not None and not pong.done():
                    raise Disconnected("the server does not answer") from error
                pong = await self._ping()
            except (WebSocketException, OSError) as error:
                raise Disconnected(str(error)) from error

    async def _ping(self) -> "asyncio.Future[float]":
        try:
            return asyncio.ensure_future(await self._connection.ping())
        except (WebSocketException, OSError) as error:
            raise Disconnected(str(error)) from error

    async def send(self, frame: bytes | str) -> None:
        """Send one frame; waits while the server is not taking any."""
        try:
            await self._connection.send(frame)
        except (WebSocketException, OSError) as error:
            raise Disconnected(str(error)) from error

    async def close(self) -> None:
        await self._held.aclose()

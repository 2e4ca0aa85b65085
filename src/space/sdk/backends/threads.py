"""Waiting with threads. Says the same as `space.sdk.backends.asyncio`."""

import math
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TypeVar

from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from space.sdk.attach import FRAME_BYTES_MAX, SUBPROTOCOL
from space.sdk.backends import CLOSE_TIMEOUT_S, IDLE_S, OPEN_TIMEOUT_S, QUEUE_FRAMES_MAX, Disconnected
from space.sdk.errors import from_answer

__all__ = ["Condition", "Lock", "Socket", "in_thread", "sleep", "wait_on"]

sleep = time.sleep
Condition = threading.Condition
Lock = threading.Lock
T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> T:
    """Run something that blocks; here it may."""
    return function()


def wait_on(condition: threading.Condition, timeout_s: float | None) -> None:
    """Wait to be notified. Raises ``TimeoutError`` after ``timeout_s`` seconds; None waits for ever."""
    if not condition.wait(timeout_s):
        raise TimeoutError


class Socket:
    """One WebSocket of the data plane. Only one thread may receive at a time."""

    def __init__(self, connection: ClientConnection, held: ExitStack) -> None:
        self._connection = connection
        self._held = held

    @classmethod
    def open(
        cls,
        url: str,
        headers: Mapping[str, str],
        *,
        tls: ssl.SSLContext | None,
        use_proxy: bool,
        protocol: str = SUBPROTOCOL,
    ) -> "Socket":
        """Connect. Raises `Disconnected` when that may work later, and the server's error when it refuses."""
        held = ExitStack()
        try:
            connection = held.enter_context(
                connect(
                    url,
                    subprotocols=[Subprotocol(protocol)],
                    additional_headers=headers,
                    compression=None,
                    ssl=tls,
                    proxy=True if use_proxy else None,
                    open_timeout=OPEN_TIMEOUT_S,
                    close_timeout=CLOSE_TIMEOUT_S,
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

    def receive(self, timeout_s: float | None = None) -> bytes | str:
        """Return the next frame.

        Raises `Disconnected` when the connection ends or the other side falls silent, and ``TimeoutError`` when the
        command has nothing to say for ``timeout_s`` seconds.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pong: threading.Event | None = None
        while True:
            wait_s = max(0.0, min(IDLE_S, deadline - time.monotonic()))
            try:
                return self._connection.recv(timeout=wait_s)
            except TimeoutError as error:
                if time.monotonic() >= deadline:
                    raise
                if pong is not None and not pong.is_set():
                    raise Disconnected("the server does not answer") from error
                pong = self._ping()
            except (WebSocketException, OSError) as error:
                raise Disconnected(str(error)) from error

    def _ping(self) -> threading.Event:
        try:
            return self._connection.ping()
        except (WebSocketException, OSError) as error:
            raise Disconnected(str(error)) from error

    def send(self, frame: bytes | str) -> None:
        """Send one frame; waits while the server is not taking any."""
        try:
            self._connection.send(frame)
        except (WebSocketException, OSError) as error:
            raise Disconnected(str(error)) from error

    def close(self) -> None:
        self._held.close()

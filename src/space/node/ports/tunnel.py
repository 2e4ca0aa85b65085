"""What a connection to a port inside a sandbox is to those who use it, wherever it comes from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol


class Tunnel(Protocol):
    """Bytes both ways. Whoever has one closes it."""

    async def read(self) -> bytes:
        """Return the next bytes, and none once the other side has sent all. Raises what ended it before that."""
        ...

    async def write(self, data: bytes) -> None:
        """Send all of ``data``, waiting while the other side takes no more. Raises what ended it."""
        ...

    async def end(self) -> None:
        """Say that this side has sent all; the other may still send."""
        ...

    async def close(self) -> None:
        """Let go. A connection that is not over both ways breaks off. May be repeated."""
        ...


Dial = Callable[[], Awaitable[Tunnel]]
"""Connects anew. Raises ``SandboxError`` (``port-closed``) where nobody listens, and why there is no sandbox to ask."""

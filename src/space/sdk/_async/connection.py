"""One raw connection to a port inside a sandbox, over a WebSocket of the data plane."""

import json
from typing import Any

from space.errors import SandboxError, SpaceError
from space.sdk.backends import Disconnected
from space.sdk.backends.asyncio import Socket
from space.sdk.errors import from_wire

CHUNK_BYTES = 128 * 1024
_END = json.dumps({"type": "eof"})


class AsyncConnection:
    """Bytes both ways. One task may read while another writes."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._ended = False

    async def opened(self) -> None:
        """Return once it is there; raise why it could not be made."""
        while True:
            message = await self._receive()
            if not isinstance(message, bytes) and message.get("type") == "open":
                return

    async def read(self) -> bytes:
        """Return the next bytes, and none once the server has sent all. Raises what ended it before that."""
        while not self._ended:
            message = await self._receive()
            if isinstance(message, bytes):
                if message:
                    return message
            elif message.get("type") == "eof":
                self._ended = True
        return b""

    async def write(self, data: bytes) -> None:
        """Send all of ``data``, waiting while the server takes no more."""
        try:
            for at in range(0, len(data), CHUNK_BYTES):
                await self._socket.send(data[at : at + CHUNK_BYTES])
        except Disconnected as error:
            raise _lost() from error

    async def end(self) -> None:
        """Say that this side has sent all; the server may go on."""
        try:
            await self._socket.send(_END)
        except Disconnected as error:
            raise _lost() from error

    async def close(self) -> None:
        await self._socket.close()

    async def _receive(self) -> bytes | dict[str, Any]:
        try:
            message = await self._socket.receive()
        except Disconnected as error:
            raise _lost() from error
        if isinstance(message, bytes):
            return message
        told: dict[str, Any] = json.loads(message)
        if told.get("type") == "error":
            raise from_wire(told.get("error") or {})
        return told


def _lost() -> SpaceError:
    return SandboxError("The connection to the port broke off.", code="connection-reset")

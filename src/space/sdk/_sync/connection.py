# Generated from ../_async/connection.py by scripts/sync-sdk; change that one.
"""One raw connection to a port inside a sandbox, over a WebSocket of the data plane."""

import json
from typing import Any

from space.errors import SandboxError, SpaceError
from space.sdk.backends import Disconnected
from space.sdk.backends.threads import Socket
from space.sdk.errors import from_wire

CHUNK_BYTES = 128 * 1024
_END = json.dumps({"type": "eof"})


class Connection:
    """Bytes both ways. One task may read while another writes."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._ended = False

    def opened(self) -> None:
        """Return once it is there; raise why it could not be made."""
        while True:
            message = self._receive()
            if not isinstance(message, bytes) and message.get("type") == "open":
                return

    def read(self) -> bytes:
        """Return the next bytes, and none once the server has sent all. Raises what ended it before that."""
        while not self._ended:
            message = self._receive()
            if isinstance(message, bytes):
                if message:
                    return message
            elif message.get("type") == "eof":
                self._ended = True
        return b""

    def write(self, data: bytes) -> None:
        """Send all of ``data``, waiting while the server takes no more."""
        try:
            for at in range(0, len(data), CHUNK_BYTES):
                self._socket.send(data[at : at + CHUNK_BYTES])
        except Disconnected as error:
            raise _lost() from error

    def end(self) -> None:
        """Say that this side has sent all; the server may go on."""
        try:
            self._socket.send(_END)
        except Disconnected as error:
            raise _lost() from error

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> bytes | dict[str, Any]:
        try:
            message = self._socket.receive()
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

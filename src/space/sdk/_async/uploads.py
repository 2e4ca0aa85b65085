"""Sending what a build reads, in pieces; what a lost connection has cut off goes on where it was."""

import os
from collections.abc import Callable
from typing import IO

from space.errors import OutcomeUnknown, SpaceError, Unavailable
from space.sdk._async.transport import AsyncTransport
from space.sdk.backends.asyncio import in_thread, sleep
from space.sdk.requests import Request, creating

PIECE_BYTES = 8 * 1024 * 1024
FAILURES_MAX = 8
"""So many times in a row that nothing more has come."""
BUSY_S = 0.5

_MAY_PASS = {"upload-busy", "unexpected-answer"}

Progress = Callable[[int, int], None]
"""Told how many bytes have come, and of how many."""


class AsyncUploads:
    """``client.uploads``."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def send(self, file: IO[bytes], progress: Progress | None = None) -> str:
        """Send a file from its beginning, and return the upload's id."""
        size = await in_thread(lambda: os.fstat(file.fileno()).st_size)
        request = Request(method="POST", path="/v1/uploads", body={"size": size}, headers=creating())
        upload_id: str = (await self._transport.call(request))["id"]
        came, failures = 0, 0
        while True:
            piece = await in_thread(lambda at=came: _read(file, at, min(PIECE_BYTES, size - at)))
            before = came
            came = await self._send_piece(upload_id, came, piece)
            if progress is not None:
                progress(came, size)
            if came >= size:
                return upload_id
            failures = 0 if came > before else failures + 1
            if failures >= FAILURES_MAX:
                raise Unavailable(f"The upload does not go on behind byte {came}.", code="upload-stuck")

    async def bytes_of(self, upload_id: str) -> int:
        """Return how much of an upload has come."""
        return (await self._transport.call(Request(method="GET", path=f"/v1/uploads/{upload_id}")))["bytes"]

    async def delete(self, upload_id: str) -> None:
        """Delete an upload; a build that reads it goes on."""
        await self._transport.call(Request(method="DELETE", path=f"/v1/uploads/{upload_id}"))

    async def _send_piece(self, upload_id: str, offset: int, piece: bytes) -> int:
        """Send a piece; return how much has come then, whether or not this was the time that it arrived."""
        path, params = f"/v1/uploads/{upload_id}", {"offset": str(offset)}
        try:
            answer = await self._transport.call(Request(method="PUT", path=path, params=params, content=piece))
            return answer["bytes"]
        except SpaceError as error:
            if error.code == "wrong-offset":
                return int(error.details["offset"])
            if not isinstance(error, (Unavailable, OutcomeUnknown)) and error.code not in _MAY_PASS:
                raise
        # What was sent before may still be on its way, or a proxy has lost its server.
        await sleep(BUSY_S)
        return await self.bytes_of(upload_id)


def _read(file: IO[bytes], offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)

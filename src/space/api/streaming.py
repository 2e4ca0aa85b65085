"""Answers that go on until somebody has enough of them, and how many of them there may be."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from space.api.proxy import until_gone
from space.errors import LimitExceeded

STREAMS_MAX = 500
"""Over all projects."""
PROJECT_STREAMS_MAX = 100
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"


def check_streams(request: Request, project_id: str) -> Counter[str]:
    """Return the count of open streams by project, or raise ``LimitExceeded`` when there is no room for one more."""
    streams: Counter[str] = request.app.state.streams
    for count, most in ((streams[project_id], PROJECT_STREAMS_MAX), (streams.total(), STREAMS_MAX)):
        if count >= most:
            raise LimitExceeded("Too many event streams are open; close one first.", limit=most)
    return streams


class Stream(Response):
    """Writes what ``chunks`` yields until that ends or the client goes away, and is counted meanwhile."""

    def __init__(self, chunks: AsyncGenerator[bytes], media_type: str, streams: Counter[str], project_id: str) -> None:
        self._chunks = chunks
        self._media_type = media_type
        self._streams = streams
        self._project_id = project_id
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        self._streams[self._project_id] += 1
        try:
            await until_gone(self._write(send), receive)
        finally:
            self._streams[self._project_id] -= 1
            if not self._streams[self._project_id]:
                del self._streams[self._project_id]

    async def _write(self, send: Send) -> None:
        headers = [(b"content-type", self._media_type.encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

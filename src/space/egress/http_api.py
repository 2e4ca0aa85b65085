"""What the api tells the gateway and asks of it, over the Unix socket. Paths and bodies are in docs/architecture.md."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from space import error_wire
from space.egress.attachments import Attachments, parse_attachment
from space.egress.audit import PAGE_MAX, Audit, Filter
from space.egress.metrics import Metrics
from space.errors import InvalidRequest, SpaceError

BODY_BYTES_MAX = 16 * 1024 * 1024
"""An attachment has a policy of at most 128 KiB, and 64 grants with values of 8 KiB."""
BEAT_S = 15.0


class HttpApi:
    """The functions behind the paths."""

    def __init__(self, attachments: Attachments, audit: Audit, metrics: Metrics) -> None:
        self._attachments = attachments
        self._audit = audit
        self._metrics = metrics
        self._epoch = uuid.uuid4().hex

    async def put(self, request: Request) -> Response:
        """One sandbox's attachment. Once this is answered every next request sees it."""
        await self._attachments.put(request.path_params["sandbox"], parse_attachment(await _json(request)))
        return JSONResponse({})

    async def remove(self, request: Request) -> Response:
        await self._attachments.remove(request.path_params["sandbox"])
        return JSONResponse({})

    async def keep(self, request: Request) -> Response:
        """The sandboxes that there are: all others are forgotten."""
        told = (await _json(request)).get("sandboxes")
        if not isinstance(told, list):
            raise InvalidRequest("There are no sandboxes.", field="sandboxes")
        await self._attachments.keep([str(sandbox) for sandbox in told])
        return JSONResponse({})

    async def watch(self, request: Request) -> Response:  # noqa: ARG002
        """Stay open as long as this gateway lives."""

        async def lines() -> AsyncGenerator[bytes]:
            yield json.dumps({"epoch": self._epoch}).encode() + b"\n"
            while True:
                await asyncio.sleep(BEAT_S)
                yield b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def egress(self, request: Request) -> Response:
        """Audit records, one JSON object a line; with ``follow=true`` those to come, too."""
        query = request.query_params
        wanted = Filter(**{name: query.get(name) for name in ("sandbox", "project", "decision", "host", "secret")})
        after, limit = _number(query.get("after"), 0), _number(query.get("limit"), 100)
        before = _number(query["before"], 0) if "before" in query else None
        if query.get("follow") == "true":
            return StreamingResponse(self._follow(wanted, after), media_type="application/x-ndjson")
        records = await self._audit.read(wanted, after=after, before=before, limit=min(limit, PAGE_MAX))
        return Response(b"".join(map(_line, records)), media_type="application/x-ndjson")

    async def figures(self, request: Request) -> Response:  # noqa: ARG002
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _follow(self, wanted: Filter, after: int) -> AsyncGenerator[bytes]:
        async for record in self._audit.follow(wanted, after=after):
            yield _line(record)


def build_app(attachments: Attachments, audit: Audit, metrics: Metrics) -> Starlette:
    """Return the application for the Unix socket."""
    api = HttpApi(attachments, audit, metrics)
    return Starlette(
        routes=[
            Route("/sandboxes", api.keep, methods=["PUT"]),
            Route("/sandboxes/{sandbox}", api.put, methods=["PUT"]),
            Route("/sandboxes/{sandbox}", api.remove, methods=["DELETE"]),
            Route("/watch", api.watch),
            Route("/egress", api.egress),
            Route("/metrics", api.figures),
        ],
        exception_handlers={SpaceError: _refuse},
    )


async def _refuse(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, SpaceError)  # noqa: S101 - the handler of that class
    answer = error_wire.answer(error, error_wire.request_id(None))
    return JSONResponse(answer, status_code=error_wire.status_of(error))


async def _json(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise InvalidRequest("The body is too large.")
    try:
        found = json.loads(body)
    except ValueError:
        raise InvalidRequest("The body is not JSON.") from None
    if not isinstance(found, dict):
        raise InvalidRequest("The body is not an object.")
    return found


def _number(text: str | None, default: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidRequest("A number is not one.")
    return int(text)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"

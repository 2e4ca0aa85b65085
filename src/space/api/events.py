"""Server-sent events: every state change in the caller's project."""

import json
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import Header, Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import control_of
from space.api.streaming import SSE, Stream, check_streams
from space.control import events
from space.control.control import Control
from space.errors import InvalidRequest
from space.model.event import Event

NUMBER_DIGITS_MAX = 18


async def stream(
    request: Request,
    last_event_id: Annotated[str | None, Header(description="Go on behind this event.")] = None,
) -> Response:
    """Follow the project's events as SSE."""
    control, project_id = control_of(request), caller(request).project_id
    streams = check_streams(request, project_id)
    after = await events.latest(control, project_id)
    gap = False
    if last_event_id is not None:
        if not last_event_id.isdecimal() or len(last_event_id) > NUMBER_DIGITS_MAX:
            raise InvalidRequest("Last-Event-ID: It must be the id of an event.", field="last-event-id")
        asked = min(int(last_event_id), after)
        gap = asked + 1 < await events.oldest(control, project_id)
        after = asked
    return Stream(_lines(control, project_id, after, gap=gap), SSE, streams, project_id)


async def _lines(control: Control, project_id: str, after: int, *, gap: bool) -> AsyncGenerator[bytes]:
    yield b"event: gap\ndata: {}\n\n" if gap else b": here\n\n"
    async for event in events.follow(control, project_id, after):
        yield b": quiet\n\n" if event is None else _render(event)


def _render(event: Event) -> bytes:
    data = json.dumps({**event.data, "at": event.created_at.isoformat().replace("+00:00", "Z")})
    return f"id: {event.number}\nevent: {event.kind}\ndata: {data}\n\n".encode()

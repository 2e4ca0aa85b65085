"""HTTP for the records of what left sandboxes, or was refused."""

import json
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Header, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from space import error_wire
from space.api.access import caller, header
from space.api.answers import control_of
from space.api.streaming import NDJSON, SSE, Stream, check_streams
from space.control import egress, sandboxes
from space.errors import SpaceError

RECORDS_MAX = 1000
NUMBER_MAX = 1 << 53

LastEventId = Annotated[str | None, Header(description="Of SSE: go on behind this record.")]


class Records(BaseModel):
    """Which records are wanted."""

    after: int = Field(0, ge=0, le=NUMBER_MAX, description="Only those behind this `n`, the first ones of them.")
    before: int | None = Field(None, ge=0, le=NUMBER_MAX, description="Only those before this `n`.")
    limit: int = Field(100, ge=1, le=RECORDS_MAX, description="How many at most.")
    decision: Literal["allow", "deny", "error"] | None = Field(None, description="Only those.")
    host: str | None = Field(None, max_length=253, description="Only to this host.")
    secret: str | None = Field(None, max_length=63, description="Only with this secret placed.")
    follow: bool = Field(default=False, description="Go on with those to come, without end.")


class ProjectRecords(Records):
    """Those of a project."""

    sandbox: str | None = Field(None, max_length=24, description="Only of this one, deleted or not.")


async def of_sandbox(
    request: Request, sandbox_id: str, wanted: Annotated[Records, Query()], last_event_id: LastEventId = None
) -> Response:
    """A sandbox's records, a JSON object a line, the newest last; with `Accept: text/event-stream` as events.

    `{n, at, sandbox, kind, decision, rule, reason, host, port, method, path, status, …, secrets}`: names of secrets,
    never values. Of those to come, `{"missed": true}` stands for some that were too many to be sent.
    """
    await sandboxes.get(control_of(request), caller(request).project_id, sandbox_id)
    return await _answer(request, sandbox_id, wanted, last_event_id)


async def of_project(
    request: Request, wanted: Annotated[ProjectRecords, Query()], last_event_id: LastEventId = None
) -> Response:
    """The records of all the project's sandboxes, also of deleted ones, and of its builds."""
    return await _answer(request, wanted.sandbox, wanted, last_event_id)


async def _answer(request: Request, sandbox_id: str | None, asked: Records, last: str | None) -> Response:
    wanted = {
        name: str(value)
        for name in ("after", "before", "limit", "decision", "host", "secret")
        if (value := getattr(asked, name)) is not None
    }
    control, project_id = control_of(request), caller(request).project_id
    as_events = SSE in (header(request.scope, b"accept") or "")
    if last is not None and last.isascii() and last.isdecimal() and len(last) < len(str(NUMBER_MAX)):
        wanted["after"] = str(max(int(last), asked.after))
    media = SSE if as_events else NDJSON
    if not asked.follow:
        # All of it before the first byte: what goes wrong is a status then.
        found = [record async for record in egress.records(control, project_id, sandbox_id, wanted)]
        return Response(b"".join(_written(record, as_events=as_events) for record in found), media_type=media)
    streams = check_streams(request, project_id)
    records = egress.records(control, project_id, sandbox_id, {**wanted, "follow": "true"})
    return Stream(_rendered(records, as_events=as_events), media, streams, project_id)


async def _rendered(records: AsyncGenerator[dict[str, Any]], *, as_events: bool) -> AsyncGenerator[bytes]:
    """Yield records as they are sent; what goes wrong after the beginning is the last one."""
    try:
        async for record in records:
            yield _written(record, as_events=as_events)
        last: dict[str, Any] = {"type": "end"}
    except SpaceError as error:
        last = {"type": "error", "error": error_wire.render(error)}
    finally:
        await records.aclose()
    yield _written(last, as_events=as_events)


def _written(record: Mapping[str, Any], *, as_events: bool) -> bytes:
    text = json.dumps(_shown(record) if "sandbox" in record else record)
    if not as_events:
        return text.encode() + b"\n"
    name = f"id: {record['n']}\n" if "n" in record else ""
    return f"{name}event: {record.get('type', 'record')}\ndata: {text}\n\n".encode()


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a gateway's record as everything else is shown here: times as text, ids by their names."""
    shown = {name: value for name, value in record.items() if name not in {"at", "sandbox", "project"}}
    at = datetime.fromtimestamp(record["at"], UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {**shown, "at": at, "sandbox_id": record["sandbox"], "project_id": record["project"]}

"""HTTP for builds of templates: begun, looked at, followed, cancelled; and what is uploaded for them."""

import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import Header, Query, Request
from fastapi.responses import Response

from space import error_wire, tracing
from space.api.access import caller, header
from space.api.answers import IDEMPOTENCY_KEY, IdempotencyKey, Prefer, control_of, once, reply, wait_s
from space.api.build_bodies import BuildCreate, UploadCreate
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.api.proxy import pass_stream_on
from space.api.streaming import NDJSON, SSE, Stream, check_streams
from space.api.template_schemas import BuildPage, build_out, upload_out
from space.control import buildlog, builds, uploads
from space.control.builds import NewBuild
from space.control.once import Once, fingerprint
from space.errors import InvalidRequest, SpaceError
from space.model.build import BuildState

OFFSET_DIGITS_MAX = 15
"""More than a file can have."""


async def create(
    request: Request, body: BuildCreate, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Build a template. The build goes on by itself; when it has succeeded, `name:tag` points to what it made."""
    control, project_id = control_of(request), caller(request).project_id
    seconds = wait_s(prefer)
    build = await builds.request_build(control, project_id, _wanted(body), _once(request, body, idempotency_key))
    tracing.note(build=build.id)
    headers = {"Location": f"/v1/builds/{build.id}"}
    if seconds > 0:
        headers["Preference-Applied"] = f"wait={seconds:g}"
        build = await builds.wait(control, project_id, build.id, seconds)
        if build.state in {BuildState.FAILED, BuildState.CANCELLED}:
            raise builds.error_of(build)
    return reply(build_out(build), 201 if build.state == BuildState.SUCCEEDED else 202, headers)


async def page(
    request: Request,
    name: Annotated[str | None, Query(max_length=64, description="Only of templates of this name.")] = None,
    state: Annotated[list[BuildState] | None, Query(description="Only in these states.")] = None,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Response:
    """List the project's builds, newest first; those that have ended for a week."""
    found = await builds.page(
        control_of(request),
        caller(request).project_id,
        name=name,
        states=state or (),
        after=position(cursor),
        limit=limit,
    )
    return reply(BuildPage(items=[build_out(build) for build in found], next_cursor=next_cursor(found, limit)))


async def get(
    request: Request,
    build_id: str,
    wait: Annotated[float, Query(alias="wait_s", ge=0, le=300, description="Hold the answer until it has ended.")] = 0,
) -> Response:
    """One build."""
    return reply(build_out(await builds.wait(control_of(request), caller(request).project_id, build_id, wait)))


async def cancel(request: Request, build_id: str) -> Response:
    """Have a build end without a result: nothing of it is published from now on. One that has ended stays as it is."""
    return reply(build_out(await builds.cancel(control_of(request), caller(request).project_id, build_id)), 202)


async def log(
    request: Request,
    build_id: str,
    start: Annotated[int, Query(alias="from", ge=0, le=1 << 40, description="Begin at this line.")] = 0,
    follow: Annotated[bool, Query(description="Go on until the build has ended.")] = False,
    last_event_id: Annotated[str | None, Header(description="Of SSE: go on behind this line.")] = None,
) -> Response:
    """The build's log, a JSON object a line; with `Accept: text/event-stream` as server-sent events.

    Lines are `{"type": "log", "n", "at", "stream": "step" | "stdout" | "stderr" | "info", "text"}`. The last object is
    `{"type": "end", "state", "digest", "code", "next"}` or `{"type": "error", "error"}`; a body without either was cut
    off. With `follow`, the end comes when the build has ended.
    """
    control, project_id = control_of(request), caller(request).project_id
    streams = check_streams(request, project_id)
    build = await builds.get(control, project_id, build_id)
    if last_event_id is not None and last_event_id.isdecimal() and len(last_event_id) <= OFFSET_DIGITS_MAX:
        start = max(start, int(last_event_id) + 1)
    as_events = SSE in (header(request.scope, b"accept") or "")
    lines = buildlog.read(control, build, start, follow=follow)
    return Stream(_rendered(lines, as_events=as_events), SSE if as_events else NDJSON, streams, project_id)


async def create_upload(request: Request, body: UploadCreate, idempotency_key: IdempotencyKey = None) -> Response:
    """Make room for a context, an archive or a root file system, to be sent in pieces."""
    asked_once = await once(request, idempotency_key)
    made = await uploads.request_upload(control_of(request), caller(request).project_id, body.size, asked_once)
    return reply(upload_out(made, 0), 201, {"Location": f"/v1/uploads/{made.id}"})


async def get_upload(request: Request, upload_id: str) -> Response:
    """One upload, and how much of it has come: what was cut off goes on there."""
    return reply(upload_out(*await uploads.get(control_of(request), caller(request).project_id, upload_id)))


async def write_upload(request: Request, upload_id: str) -> Response:
    """Send a piece, which must begin where the one before has ended; 409 `wrong-offset` says where that is."""
    offset, length = request.query_params.get("offset", "0"), header(request.scope, b"content-length")
    for value, name in ((offset, "offset"), (length, "content-length")):
        if value is None or not value.isdecimal() or len(value) > OFFSET_DIGITS_MAX:
            raise InvalidRequest(f"{name}: It must be a number of bytes.", field=name)
    found = await uploads.admit_piece(
        control_of(request), caller(request).project_id, upload_id, int(offset), int(length or 0)
    )
    return await pass_stream_on(request, f"/uploads/{found.id}")


async def delete_upload(request: Request, upload_id: str) -> Response:
    """Delete an upload; a build that reads it goes on."""
    await uploads.delete(control_of(request), caller(request).project_id, upload_id)
    return Response(status_code=204)


def _wanted(body: BuildCreate) -> NewBuild:
    source = body.source.model_dump(exclude_none=True, exclude={"auth"})
    auth = getattr(body.source, "auth", None)
    if auth is not None:
        told = {"username": auth.username, "password": auth.password.get_secret_value(), "registry": auth.registry}
        auth = {name: value for name, value in told.items() if value is not None}
    return NewBuild(
        name=body.name,
        tag=body.tag,
        source=source,
        auth=auth,
        rest=body.rest(),
        resources={name: getattr(body.resources, name) for name in body.resources.model_fields_set},
        timeout_s=body.timeout_s,
        policy=body.policy,
        template_policy=body.defaults.policy,
    )


def _once(request: Request, body: BuildCreate, key: str | None) -> Once | None:
    """Return the request as one that may be repeated. A password is no part of what is remembered of it."""
    if key is None:
        return None
    if not IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidRequest(
            "Idempotency-Key: It must be 1 to 255 printable ASCII characters.", field="idempotency-key"
        )
    said = body.model_dump(mode="json", by_alias=True, exclude={"source": {"auth": {"password"}}})
    return Once(key, fingerprint(request.method, request.url.path, said))


async def _rendered(lines: AsyncGenerator[dict[str, Any] | None], *, as_events: bool) -> AsyncGenerator[bytes]:
    """Yield the log as it is sent; what goes wrong after the beginning is its last line."""
    try:
        async for line in lines:
            if line is None:
                if as_events:
                    yield b": quiet\n\n"
                continue
            yield _event(line) if as_events else json.dumps(line).encode() + b"\n"
    except SpaceError as error:
        last = {"type": "error", "error": error_wire.render(error)}
        yield _event(last) if as_events else json.dumps(last).encode() + b"\n"
    finally:
        await lines.aclose()


def _event(line: dict[str, Any]) -> bytes:
    name = f"id: {line['n']}\n" if "n" in line else ""
    return f"{name}event: {line['type']}\ndata: {json.dumps(line)}\n\n".encode()

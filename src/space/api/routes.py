"""The table of all paths: what is there, who may call it, and which function answers. Nothing else decides that."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import request_response
from starlette.types import ASGIApp

from space.api import commands, events, files, health, operations, projects, sandboxes, templates
from space.api.access import Access, Guard
from space.api.schemas import (
    Accepted,
    AccessOut,
    CommandCreate,
    CommandCreated,
    CommandOut,
    CommandPage,
    DirectoryBody,
    DirectoryMade,
    ErrorAnswer,
    Exec,
    ExecOut,
    FileList,
    FileOut,
    FileWritten,
    KeyOut,
    KeyPage,
    MetricsOut,
    MoveBody,
    OperationOut,
    OperationPage,
    ProjectCreated,
    ProjectOut,
    SandboxOut,
    SandboxPage,
    SignalBody,
    TemplateOut,
    TemplatePage,
    Unpacked,
)
from space.listening import Bodies

PUBLIC, MEMBER, ADMIN = Access.PUBLIC, Access.MEMBER, Access.ADMIN
BYTES = "application/octet-stream"
TAR = "application/x-tar"
OWN_BODY_BYTES_MAX = 1024 * 1024
"""Of bodies that are parsed here, in the one loop that answers everybody; those for a sandbox the node parses."""


@dataclass(frozen=True)
class Row:
    """One path and method."""

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    access: Access
    function: Callable[..., Awaitable[Response]]
    answer: type[BaseModel] | str | None = None
    """What a good answer is: a model, or a media type; None: nothing."""
    status: int = 200
    body: type[BaseModel] | str | None = None
    """Only for bodies that the node reads: what one looks like, or the media type of a streamed one."""
    also: tuple[int, ...] = ()
    """Other statuses of good answers."""
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    """Query parameters that the node reads, each with what it means."""


_PARAMETER = re.compile(r"\{(\w+)\}")
_PLACE = {
    "path": "A path in the sandbox; a relative one begins where the user's commands do.",
    "user": "Act as this user of the sandbox; the template's default otherwise.",
}
_NEW = {
    "mode": "Permission bits in octal, such as 644.",
    "exclusive": "true: only if there is nothing at the path.",
}
_FOLLOW = {"follow": "true: what a symbolic link points to."}
_DEPTH = {"depth": "How many levels of directories, 1 to 64; 1 otherwise."}
_BELOW = {"recursive": "true: in all directories below too."}
_ONE = "/v1/sandboxes/{sandbox_id}"
_FILES = f"{_ONE}/files"
_COMMAND = "/v1/commands/{command_id}"

ROUTES: tuple[Row, ...] = (
    # First what is called most: the table is searched from the top.
    Row("POST", f"{_ONE}/exec", MEMBER, commands.exec_, ExecOut, body=Exec),
    Row("POST", "/v1/sandboxes", MEMBER, sandboxes.create, Accepted, 202, also=(201,)),
    Row("GET", "/v1/sandboxes", MEMBER, sandboxes.page, SandboxPage),
    Row("GET", _ONE, MEMBER, sandboxes.get, SandboxOut),
    Row("PATCH", _ONE, MEMBER, sandboxes.change, SandboxOut),
    Row("DELETE", _ONE, MEMBER, sandboxes.delete, Accepted, 202, also=(200,)),
    Row("POST", f"{_ONE}/pause", MEMBER, sandboxes.pause, Accepted, 202, also=(200,)),
    Row("POST", f"{_ONE}/resume", MEMBER, sandboxes.resume, Accepted, 202, also=(200,)),
    Row("POST", f"{_ONE}/suspend", MEMBER, sandboxes.suspend, Accepted, 202, also=(200,)),
    Row("POST", f"{_ONE}/wake", MEMBER, sandboxes.wake, Accepted, 202, also=(200,)),
    Row("POST", f"{_ONE}/stop", MEMBER, sandboxes.stop, Accepted, 202, also=(200,)),
    Row("POST", f"{_ONE}/start", MEMBER, sandboxes.start, Accepted, 202, also=(200,)),
    Row("POST", f"{_ONE}/access", MEMBER, sandboxes.access, AccessOut, 201),
    Row("GET", f"{_ONE}/metrics", MEMBER, sandboxes.metrics, MetricsOut),
    Row("GET", "/v1/operations", MEMBER, operations.page, OperationPage),
    Row("GET", "/v1/operations/{operation_id}", MEMBER, operations.get, OperationOut),
    Row("POST", f"{_ONE}/commands", MEMBER, commands.create, CommandCreated, 201, CommandCreate),
    Row("GET", f"{_ONE}/commands", MEMBER, commands.page, CommandPage),
    Row("GET", _COMMAND, MEMBER, commands.get, CommandOut),
    Row("POST", f"{_COMMAND}/access", MEMBER, commands.access, AccessOut, 201),
    Row(
        "GET",
        f"{_COMMAND}/output",
        MEMBER,
        commands.output,
        "application/x-ndjson",
        query={
            "stdout_from": "Begin at this byte of stdout.",
            "stderr_from": "Begin at this byte of stderr.",
            "tty_from": "Begin at this byte of the terminal.",
            "follow": "true: go on until the command has ended.",
        },
    ),
    Row("POST", f"{_COMMAND}/signal", MEMBER, commands.signal, None, 204, SignalBody),
    Row(
        "POST",
        f"{_COMMAND}/stdin",
        MEMBER,
        commands.stdin,
        "application/json",
        body=BYTES,
        query={"eof": "true: then close it.", "offset": "Where this body belongs; repeats are skipped."},
    ),
    Row("GET", _FILES, MEMBER, files.read, BYTES, also=(206,), query=_PLACE),
    Row("PUT", _FILES, MEMBER, files.write, FileWritten, 201, BYTES, also=(200,), query=_PLACE | _NEW),
    Row("DELETE", _FILES, MEMBER, files.remove, None, 204, query=_PLACE | {"recursive": "true: with all below."}),
    Row("GET", f"{_FILES}/stat", MEMBER, files.stat, FileOut, query=_PLACE | _FOLLOW),
    Row("GET", f"{_FILES}/list", MEMBER, files.list_, FileList, query=_PLACE | _DEPTH),
    Row("POST", f"{_FILES}/mkdir", MEMBER, files.mkdir, DirectoryMade, 201, DirectoryBody, also=(200,)),
    Row("POST", f"{_FILES}/move", MEMBER, files.move, None, 204, MoveBody),
    Row("GET", f"{_FILES}/archive", MEMBER, files.archive_out, TAR, query=_PLACE),
    Row("PUT", f"{_FILES}/archive", MEMBER, files.archive_in, Unpacked, body=TAR, query=_PLACE),
    Row("GET", f"{_FILES}/watch", MEMBER, files.watch, "text/event-stream", query=_PLACE | _BELOW),
    Row("GET", "/v1/templates", MEMBER, templates.page, TemplatePage),
    Row("GET", "/v1/templates/{template}", MEMBER, templates.get, TemplateOut),
    Row("GET", "/v1/events", MEMBER, events.stream, "text/event-stream"),
    Row("POST", "/v1/keys", MEMBER, projects.create_key, KeyOut, 201),
    Row("GET", "/v1/keys", MEMBER, projects.page_keys, KeyPage),
    Row("DELETE", "/v1/keys/{key_id}", MEMBER, projects.revoke_key, None, 204),
    Row("GET", "/v1/projects/self", MEMBER, projects.own_project, ProjectOut),
    Row("POST", "/v1/projects", ADMIN, projects.create_project, ProjectCreated, 201),
    Row("GET", "/healthz", PUBLIC, health.alive, "text/plain"),
    Row("GET", "/readyz", PUBLIC, health.ready, "application/json"),
    Row("GET", "/metrics", ADMIN, health.metrics, "text/plain"),
    Row("GET", "/openapi.json", PUBLIC, health.openapi, "application/json"),
    Row("GET", "/docs", PUBLIC, health.docs, "text/html"),
)


def install(app: FastAPI, body_bytes_max: int) -> None:
    """Put the table's rows into the app, each behind its guard."""
    bodies = Bodies()
    for row in ROUTES:
        app.add_api_route(
            row.path,
            row.function,
            methods=[row.method],
            name=f"{row.method} {row.path}",
            status_code=row.status,
            response_class=Response,
            operation_id=_operation_id(row),
            tags=[_tag(row)],
            responses=_responses(row),
            openapi_extra=_extra(row),
        )
        route = cast("APIRoute", app.routes[-1])
        inner = _plain(row) or route.app
        route.app = Guard(inner, row.access, _body_bytes_max(row, body_bytes_max), bodies)


def _body_bytes_max(row: Row, most: int) -> int | None:
    if isinstance(row.body, str):
        return None
    return min(most, OWN_BODY_BYTES_MAX) if row.body is None else most


def _plain(row: Row) -> ASGIApp | None:
    """Return the function of a row as an app when it needs nothing but the ids in its path.

    FastAPI would look for other parameters first; exec and files are called too often for that.
    """
    wanted = set(inspect.signature(row.function).parameters) - {"request"}
    if not wanted <= set(_PARAMETER.findall(row.path)):
        return None

    async def answer(request: Request) -> Response:
        return await row.function(request, **request.path_params)

    return request_response(answer)


def schemas() -> dict[str, Any]:
    """Return the schemas of bodies that the node reads, which FastAPI does not know of."""
    found: dict[str, Any] = {}
    for row in ROUTES:
        if isinstance(row.body, type):
            schema = row.body.model_json_schema(ref_template="#/components/schemas/{model}")
            found |= schema.pop("$defs", {}) | {row.body.__name__: schema}
    return found


def _operation_id(row: Row) -> str:
    module = row.function.__module__.rpartition(".")[2]
    return f"{module}.{row.function.__name__.rstrip('_')}"


def _tag(row: Row) -> str:
    return row.function.__module__.rpartition(".")[2]


def _responses(row: Row) -> dict[int | str, dict[str, Any]]:
    good: dict[str, Any] = {"description": "Done." if row.status != 202 else "Accepted."}
    if isinstance(row.answer, str):
        good["content"] = {row.answer: {}}
    elif row.answer is not None:
        good["model"] = row.answer
    found: dict[int | str, dict[str, Any]] = {
        status: {**good, "description": "Accepted." if status == 202 else "Done."} for status in (row.status, *row.also)
    }
    if row.access is not PUBLIC:
        found["4XX"] = {"model": ErrorAnswer, "description": "The caller must change something."}
        found["5XX"] = {"model": ErrorAnswer, "description": "SPACE or the sandbox could not do it."}
    return found


def _extra(row: Row) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if row.access is not PUBLIC:
        extra["security"] = [{"key": []}]
    if isinstance(row.body, str):
        extra["requestBody"] = {"required": True, "content": {row.body: {}}}
    elif row.body is not None:
        reference = {"$ref": f"#/components/schemas/{row.body.__name__}"}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    if row.query:
        extra["parameters"] = [
            {"name": name, "in": "query", "required": name == "path", "description": text, "schema": {"type": "string"}}
            for name, text in row.query.items()
        ]
    return extra

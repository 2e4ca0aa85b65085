"""The table of all paths: what is there, who may call it, and which function answers. Nothing else decides that."""

import copy
import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import request_response
from starlette.types import ASGIApp

from space.api import (
    builds,
    commands,
    contexts,
    egress,
    events,
    files,
    grants,
    health,
    host,
    operations,
    policies,
    ports,
    projects,
    sandboxes,
    secrets,
    snapshots,
    templates,
    usage,
    volumes,
    webhooks,
)
from space.api.access import Access, Guard
from space.api.bodies import CommandCreate, DirectoryBody, Exec, MoveBody, SignalBody
from space.api.context_schemas import ContextOut, ContextPage
from space.api.egress_schemas import (
    CheckOut,
    GrantOut,
    GrantPage,
    PolicyInForce,
    PolicyOut,
    PolicyPage,
    RotatedOut,
    SandboxPolicyOut,
    SecretOut,
    SecretPage,
    SuggestionOut,
)
from space.api.port_schemas import PortOpened, PortPage
from space.api.schemas import (
    Accepted,
    AccessOut,
    CommandCreated,
    CommandOut,
    CommandPage,
    DirectoryMade,
    E2BOut,
    ErrorAnswer,
    ExecOut,
    FileList,
    FileOut,
    FileWritten,
    Forked,
    GcOut,
    KeyOut,
    KeyPage,
    MetricsOut,
    OperationOut,
    OperationPage,
    PoolOut,
    ProjectCreated,
    ProjectOut,
    ProjectPage,
    SandboxOut,
    SandboxPage,
    SnapshotAccepted,
    SnapshotOut,
    SnapshotPage,
    Unpacked,
    VolumeOut,
    VolumePage,
)
from space.api.streaming import NDJSON
from space.api.template_schemas import (
    AuditOut,
    BuildOut,
    BuildPage,
    HistoryPage,
    TemplateDetail,
    TemplatePage,
    Uploaded,
    UploadOut,
    WarmOut,
)
from space.api.webhook_schemas import DeliveryOut, DeliveryPage, WebhookCreated, WebhookOut, WebhookPage
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
    "owner": "What is made belongs to this user, in whose home relative paths and `~` begin.",
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
_CONTEXT = f"{_ONE}/contexts/{{context_id}}"
_COMMAND = "/v1/commands/{command_id}"
_TEMPLATE = "/v1/templates/{template}"

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
    Row("POST", f"{_ONE}/fork", MEMBER, snapshots.fork, Forked, 202, also=(201,)),
    Row("POST", f"{_ONE}/snapshots", MEMBER, snapshots.create, SnapshotAccepted, 202, also=(201,)),
    Row("POST", f"{_ONE}/access", MEMBER, sandboxes.access, AccessOut, 201),
    Row("GET", f"{_ONE}/ports", MEMBER, ports.page, PortPage),
    Row("POST", f"{_ONE}/ports/{{port}}", MEMBER, ports.expose, PortOpened, 201),
    Row("DELETE", f"{_ONE}/ports/{{port}}", MEMBER, ports.hide, None, 204),
    Row("POST", f"{_ONE}/contexts", MEMBER, contexts.create, ContextOut, 201),
    Row("GET", f"{_ONE}/contexts", MEMBER, contexts.page, ContextPage),
    Row("GET", _CONTEXT, MEMBER, contexts.get, ContextOut),
    Row("DELETE", _CONTEXT, MEMBER, contexts.delete, None, 204),
    Row("POST", f"{_CONTEXT}/execute", MEMBER, contexts.execute, NDJSON),
    Row("POST", f"{_CONTEXT}/interrupt", MEMBER, contexts.interrupt, None, 204),
    Row("POST", f"{_CONTEXT}/restart", MEMBER, contexts.restart, ContextOut),
    Row("GET", f"{_ONE}/metrics", MEMBER, usage.metrics, MetricsOut),
    Row("GET", f"{_ONE}/policy", MEMBER, policies.of_sandbox, SandboxPolicyOut),
    Row("PUT", f"{_ONE}/policy", MEMBER, policies.set_of_sandbox, SandboxPolicyOut),
    Row("POST", f"{_ONE}/policy/check", MEMBER, policies.check, CheckOut),
    Row("GET", f"{_ONE}/policy/suggest", MEMBER, policies.suggest, SuggestionOut),
    Row("POST", f"{_ONE}/grants", MEMBER, grants.create, GrantOut, 201),
    Row("GET", f"{_ONE}/grants", MEMBER, grants.page, GrantPage),
    Row("DELETE", f"{_ONE}/grants/{{grant_id}}", MEMBER, grants.delete, None, 204),
    Row("GET", f"{_ONE}/egress", MEMBER, egress.of_sandbox, NDJSON),
    Row("GET", "/v1/egress", MEMBER, egress.of_project, NDJSON),
    Row("POST", "/v1/policies", MEMBER, policies.create, PolicyOut, 201),
    Row("GET", "/v1/policies", MEMBER, policies.page, PolicyPage),
    Row("GET", "/v1/policies/{name}", MEMBER, policies.get, PolicyOut),
    Row("PUT", "/v1/policies/{name}", MEMBER, policies.replace, PolicyOut, also=(201,)),
    Row("DELETE", "/v1/policies/{name}", MEMBER, policies.delete, None, 204),
    Row("GET", "/v1/project/policy", MEMBER, policies.of_project, PolicyInForce),
    Row("PUT", "/v1/project/policy", MEMBER, policies.set_of_project, PolicyInForce),
    Row("POST", "/v1/secrets", MEMBER, secrets.create, SecretOut, 201),
    Row("GET", "/v1/secrets", MEMBER, secrets.page, SecretPage),
    Row("GET", "/v1/secrets/{name}", MEMBER, secrets.get, SecretOut),
    Row("PUT", "/v1/secrets/{name}", MEMBER, secrets.replace, SecretOut, also=(201,)),
    Row("DELETE", "/v1/secrets/{name}", MEMBER, secrets.delete, None, 204),
    Row("POST", "/v1/secret-keys/rotate", ADMIN, secrets.rotate_key, RotatedOut),
    Row("GET", "/v1/snapshots", MEMBER, snapshots.page, SnapshotPage),
    Row("GET", "/v1/snapshots/{snapshot_id}", MEMBER, snapshots.get, SnapshotOut),
    Row("DELETE", "/v1/snapshots/{snapshot_id}", MEMBER, snapshots.delete, SnapshotOut),
    Row("POST", "/v1/volumes", MEMBER, volumes.create, VolumeOut, 201),
    Row("GET", "/v1/volumes", MEMBER, volumes.page, VolumePage),
    Row("GET", "/v1/volumes/{name}", MEMBER, volumes.get, VolumeOut),
    Row("DELETE", "/v1/volumes/{name}", MEMBER, volumes.delete, None, 204),
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
    Row("GET", "/v1/templates/audit", MEMBER, templates.audit, AuditOut),
    Row("POST", "/v1/templates/builds", MEMBER, builds.create, BuildOut, 202, also=(201,)),
    Row("GET", _TEMPLATE, MEMBER, templates.get, TemplateDetail),
    Row("DELETE", _TEMPLATE, MEMBER, templates.delete, TemplateDetail),
    Row("POST", f"{_TEMPLATE}/warm", MEMBER, templates.warm, WarmOut),
    Row("PUT", "/v1/templates/{name}/tags/{tag}", MEMBER, templates.move_tag, TemplateDetail),
    Row("DELETE", "/v1/templates/{name}/tags/{tag}", MEMBER, templates.remove_tag, None, 204),
    Row("GET", "/v1/templates/{name}/history", MEMBER, templates.history, HistoryPage),
    Row("GET", "/v1/builds", MEMBER, builds.page, BuildPage),
    Row("GET", "/v1/builds/{build_id}", MEMBER, builds.get, BuildOut),
    Row("GET", "/v1/builds/{build_id}/log", MEMBER, builds.log, NDJSON),
    Row("POST", "/v1/builds/{build_id}/cancel", MEMBER, builds.cancel, BuildOut, 202),
    Row("POST", "/v1/uploads", MEMBER, builds.create_upload, UploadOut, 201),
    Row("GET", "/v1/uploads/{upload_id}", MEMBER, builds.get_upload, UploadOut),
    Row(
        "PUT",
        "/v1/uploads/{upload_id}",
        MEMBER,
        builds.write_upload,
        Uploaded,
        body=BYTES,
        query={"offset": "Where in the upload the body belongs: at the end of what has come."},
    ),
    Row("DELETE", "/v1/uploads/{upload_id}", MEMBER, builds.delete_upload, None, 204),
    Row("GET", "/v1/events", MEMBER, events.stream, "text/event-stream"),
    Row("POST", "/v1/webhooks", MEMBER, webhooks.create, WebhookCreated, 201),
    Row("GET", "/v1/webhooks", MEMBER, webhooks.page, WebhookPage),
    Row("GET", "/v1/webhooks/{webhook_id}", MEMBER, webhooks.get, WebhookOut),
    Row("DELETE", "/v1/webhooks/{webhook_id}", MEMBER, webhooks.delete, None, 204),
    Row("POST", "/v1/webhooks/{webhook_id}/test", MEMBER, webhooks.test, DeliveryOut),
    Row("GET", "/v1/webhooks/{webhook_id}/deliveries", MEMBER, webhooks.deliveries, DeliveryPage),
    Row("POST", "/v1/keys", MEMBER, projects.create_key, KeyOut, 201),
    Row("GET", "/v1/keys", MEMBER, projects.page_keys, KeyPage),
    Row("DELETE", "/v1/keys/{key_id}", MEMBER, projects.revoke_key, None, 204),
    Row("GET", "/v1/project", MEMBER, projects.own_project, ProjectOut),
    Row("POST", "/v1/projects", ADMIN, projects.create_project, ProjectCreated, 201),
    Row("GET", "/v1/projects", ADMIN, projects.page_projects, ProjectPage),
    Row("GET", "/v1/projects/{project_id}", ADMIN, projects.get_project, ProjectOut),
    Row("PATCH", "/v1/projects/{project_id}", ADMIN, projects.change_project, ProjectOut),
    Row("GET", "/v1/e2b", MEMBER, host.e2b, E2BOut),
    Row("GET", "/v1/pool", ADMIN, host.pool, PoolOut),
    Row("POST", "/v1/gc", ADMIN, host.gc, GcOut),
    Row("GET", "/healthz", PUBLIC, health.alive, "text/plain"),
    Row("GET", "/readyz", PUBLIC, health.ready, "application/json"),
    Row("GET", "/metrics", ADMIN, health.metrics, "text/plain"),
    Row("GET", "/openapi.json", PUBLIC, health.openapi, "application/json"),
    Row("GET", "/docs", PUBLIC, health.docs, "text/html"),
)


def install(app: FastAPI, body_bytes_max: int) -> None:
    """Put the table's rows into the app, each behind its guard."""
    bodies = Bodies()
    for row, made in zip(ROUTES, _made(), strict=True):
        route = copy.copy(made)
        route.app = Guard(_plain(row) or made.app, row.access, _body_bytes_max(row, body_bytes_max), bodies)
        app.router.routes.append(route)


@functools.cache
def _made() -> list[APIRoute]:
    """Return the rows as FastAPI has them. Once for all apps of a process: it takes a quarter of a second."""
    router = APIRouter()
    for row in ROUTES:
        router.add_api_route(
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
    return cast("list[APIRoute]", router.routes)


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

"""HTTP for commands and exec: made here, carried out and followed on the node."""

import json
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import IdempotencyKey, access_out, control_of, once, reply_raw
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.api.proxy import pass_on, pass_stream_on
from space.control import commands, sandboxes
from space.control.control import Control
from space.control.readiness import get_running, rouser, wake_for
from space.control.tokens import Token


async def create(request: Request, sandbox_id: str, idempotency_key: IdempotencyKey = None) -> Response:
    """Reserve a command. Nothing runs until the first attach."""
    control = control_of(request)
    sandbox = await get_running(control, caller(request).project_id, sandbox_id)
    asked_once = await once(request, idempotency_key)
    shown, token = await commands.create(control, sandbox, await request.body(), asked_once)
    return reply_raw({"command": shown, "attach": _attach(control, shown["id"], token)}, 201)


async def page(request: Request, sandbox_id: str, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None) -> Response:
    """List a sandbox's commands, newest first."""
    control = control_of(request)
    sandbox = await sandboxes.get(control, caller(request).project_id, sandbox_id)
    rows = await commands.page(control, sandbox, after=position(cursor), limit=limit)
    items = await commands.describe_all(control, sandbox, rows)
    return reply_raw({"items": items, "next_cursor": next_cursor(rows, limit)})


async def get(request: Request, command_id: str) -> Response:
    """One command, with its exit once it has ended."""
    control = control_of(request)
    row = await commands.get(control, caller(request).project_id, command_id)
    return reply_raw(await commands.describe(control, row))


async def access(request: Request, command_id: str) -> Response:
    """Where to attach to the command, with a fresh token."""
    control = control_of(request)
    row = await commands.get(control, caller(request).project_id, command_id)
    await wake_for(control, row.project_id, row.sandbox_id)
    return reply_raw(_attach(control, row.id, commands.grant_access(control, row)), 201)


async def output(request: Request, command_id: str) -> Response:
    """Replay the output as NDJSON, from given offsets; `follow=true` goes on until the end."""
    row = await commands.get(control_of(request), caller(request).project_id, command_id)
    return await pass_on(request, f"/v1/commands/{row.id}/output")


async def signal(request: Request, command_id: str) -> Response:
    """Send a signal to everything the command started."""
    row = await commands.get(control_of(request), caller(request).project_id, command_id)
    await wake_for(control_of(request), row.project_id, row.sandbox_id)
    return await pass_on(request, f"/v1/commands/{row.id}/signal")


async def stdin(request: Request, command_id: str) -> Response:
    """Feed the command's stdin with the body as it is."""
    row = await commands.get(control_of(request), caller(request).project_id, command_id)
    await wake_for(control_of(request), row.project_id, row.sandbox_id)
    return await pass_stream_on(request, f"/v1/commands/{row.id}/stdin")


async def exec_(request: Request, sandbox_id: str) -> Response:
    """Run a program to its end and return its output; `Accept: application/x-ndjson` streams it."""
    control = control_of(request)
    sandbox = await get_running(control, caller(request).project_id, sandbox_id)
    return await pass_on(request, f"/v1/sandboxes/{sandbox.id}/exec", rouser(control, sandbox))


def _attach(control: Control, command_id: str, token: Token) -> dict[str, Any]:
    base = control.settings.data_plane_url
    url = "ws" + base.removeprefix("http") + f"/v1/commands/{command_id}/attach"
    return json.loads(access_out(url, token).model_dump_json())

"""HTTP for sandboxes: create, look, change, the lifecycle verbs, access and usage."""

import asyncio
from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response

from space import tracing
from space.api.access import caller
from space.api.answers import (
    IdempotencyKey,
    Prefer,
    accepted,
    access_out,
    control_of,
    once,
    operation_out,
    reply,
    sandbox_out,
    wait_s,
)
from space.api.bodies import SandboxChange
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.api.sandbox_bodies import SandboxCreate
from space.api.schemas import Accepted, SandboxPage
from space.control import operations, sandboxes, verbs
from space.control.control import Control
from space.control.creation import NewSandbox, request_create
from space.control.grants import NewGrant
from space.control.readiness import wait_ready
from space.control.volumes import WantedVolume
from space.errors import InvalidRequest
from space.model.operation import Operation, OperationState
from space.model.sandbox import TRANSITIONS, Sandbox, State

METADATA_PREFIX = "metadata."
FILTERS_MAX = 16


async def create(
    request: Request, body: SandboxCreate, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Make a sandbox."""
    control, key = control_of(request), caller(request)
    wanted = NewSandbox(
        template=body.template,
        resources=body.resources.model_dump(exclude_unset=True),
        name=body.name,
        metadata=body.metadata,
        env=body.env,
        driver=body.driver,
        timeout_s=body.timeout_s,
        on_timeout=body.on_timeout,
        idle_timeout_s=body.idle_timeout_s,
        on_idle=body.on_idle,
        wake_on_request=body.wake_on_request,
        policy=body.policy,
        volumes=tuple(WantedVolume(one.name, one.path) for one in body.volumes),
        grants=tuple(NewGrant(one.secret, one.terms(), one.env, one.expires_in_s) for one in body.grants),
    )
    asked_once = await once(request, idempotency_key)
    sandbox, operation = await request_create(control, key.project_id, wanted, asked_once)
    return await _accepted(control, sandbox, operation, wait_s(prefer), done=201)


async def page(
    request: Request,
    state: Annotated[list[State] | None, Query(description="Only these states.")] = None,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Response:
    """List sandboxes, newest first. `metadata.KEY=VALUE` in the query selects by metadata."""
    found = await sandboxes.page(
        control_of(request),
        caller(request).project_id,
        states=state or (),
        metadata=_metadata_filter(request),
        after=position(cursor),
        limit=limit,
    )
    return reply(SandboxPage(items=[sandbox_out(s) for s in found], next_cursor=next_cursor(found, limit)))


async def get(request: Request, sandbox_id: str) -> Response:
    """One sandbox."""
    return reply(sandbox_out(await sandboxes.get(control_of(request), caller(request).project_id, sandbox_id)))


async def change(request: Request, sandbox_id: str, body: SandboxChange) -> Response:
    """Change name, metadata, deadline or idle policy."""
    wanted = {name: getattr(body, name) for name in body.model_fields_set}
    changed = await sandboxes.change(control_of(request), caller(request).project_id, sandbox_id, wanted)
    return reply(sandbox_out(changed))


async def pause(
    request: Request, sandbox_id: str, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Stop the CPUs; everything stays in memory."""
    return await _verb(request, sandbox_id, "pause", prefer, idempotency_key)


async def resume(
    request: Request, sandbox_id: str, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Let the CPUs of a paused sandbox go on."""
    return await _verb(request, sandbox_id, "resume", prefer, idempotency_key)


async def suspend(
    request: Request, sandbox_id: str, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Save memory and disk and release the host's resources."""
    return await _verb(request, sandbox_id, "suspend", prefer, idempotency_key)


async def wake(
    request: Request, sandbox_id: str, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Make it run again by whichever way applies; a running one is awake already."""
    return await _verb(request, sandbox_id, "wake", prefer, idempotency_key)


async def stop(
    request: Request, sandbox_id: str, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """End the machine and keep the disk."""
    return await _verb(request, sandbox_id, "stop", prefer, idempotency_key)


async def start(
    request: Request, sandbox_id: str, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Boot a stopped or failed sandbox afresh on its disk."""
    return await _verb(request, sandbox_id, "start", prefer, idempotency_key)


async def delete(request: Request, sandbox_id: str, prefer: Prefer = None) -> Response:
    """Delete for good, whatever its state."""
    return await _verb(request, sandbox_id, "delete", prefer)


async def access(request: Request, sandbox_id: str) -> Response:
    """A token for the sandbox's data plane, good for an hour."""
    control = control_of(request)
    sandbox = await sandboxes.get(control, caller(request).project_id, sandbox_id)
    token = sandboxes.grant_access(control, sandbox)
    return reply(access_out(control.settings.data_plane_url, token), 201)


async def _verb(request: Request, sandbox_id: str, verb: str, prefer: str | None, key: str | None = None) -> Response:
    control = control_of(request)
    asked_once = await once(request, key)
    sandbox, operation = await verbs.request(
        control, caller(request).project_id, sandbox_id, verb, asked_once=asked_once
    )
    return await _accepted(control, sandbox, operation, wait_s(prefer), done=200)


async def _accepted(control: Control, sandbox: Sandbox, operation: Operation, seconds: float, *, done: int) -> Response:
    """Answer with sandbox and operation: at once, or after waiting for the operation's end and readiness."""
    tracing.note(sandbox=sandbox.id, operation=operation.id)
    ends = asyncio.get_running_loop().time() + seconds
    if seconds > 0:
        operation, left = await operations.wait_both(control, sandbox.project_id, operation.id, seconds)
        sandbox = left or sandbox
        sandbox = await wait_ready(control, sandbox, operation, ends - asyncio.get_running_loop().time())
    there = operation.state == OperationState.SUCCEEDED and _is_there(sandbox, operation)
    answer = Accepted(sandbox=sandbox_out(sandbox), operation=operation_out(operation))
    return accepted(answer, operation, seconds, done=done if there else 202)


def _is_there(sandbox: Sandbox, operation: Operation) -> bool:
    target = TRANSITIONS[operation.request["verb"]].target
    return target != State.RUNNING or sandbox.ready or sandbox.state != State.RUNNING


def _metadata_filter(request: Request) -> dict[str, str]:
    wanted: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if not name.startswith(METADATA_PREFIX):
            continue
        key = name.removeprefix(METADATA_PREFIX)
        if not key or "\0" in key + value or key in wanted or len(wanted) >= FILTERS_MAX:
            raise InvalidRequest(
                f"metadata: A filter is metadata.KEY=VALUE, each key once, at most {FILTERS_MAX}.", field="metadata"
            )
        wanted[key] = value
    return wanted

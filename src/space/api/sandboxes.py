"""HTTP for sandboxes: create, look, change, the lifecycle verbs, access and usage."""

import asyncio
from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import (
    IdempotencyKey,
    Prefer,
    access_out,
    control_of,
    once,
    operation_out,
    reply,
    sandbox_out,
    wait_s,
)
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.api.schemas import Accepted, MetricsOut, SampleOut, SandboxChange, SandboxCreate, SandboxPage
from space.control import operations, sandboxes
from space.control.control import Control
from space.control.readiness import wait_ready
from space.control.sandboxes import NewSandbox
from space.control.usage import sample
from space.error_wire import class_of_kind
from space.errors import Conflict, HostError, InvalidRequest, SpaceError
from space.model.operation import Operation, OperationState
from space.model.sandbox import TRANSITIONS, Resources, Sandbox, State

METADATA_PREFIX = "metadata."
FILTERS_MAX = 16


async def create(
    request: Request, body: SandboxCreate, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Make a sandbox."""
    control, key = control_of(request), caller(request)
    wanted = NewSandbox(
        template=body.template,
        resources=Resources(**body.resources.model_dump()),
        name=body.name,
        metadata=body.metadata,
        env=body.env,
        driver=body.driver,
        timeout_s=body.timeout_s,
        on_timeout=body.on_timeout,
        idle_timeout_s=body.idle_timeout_s,
        on_idle=body.on_idle,
        wake_on_request=body.wake_on_request,
    )
    asked_once = await once(request, idempotency_key)
    sandbox, operation = await sandboxes.request_create(control, key.project_id, wanted, asked_once)
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


async def pause(request: Request, sandbox_id: str, prefer: Prefer = None) -> Response:
    """Stop the CPUs; everything stays in memory."""
    return await _verb(request, sandbox_id, "pause", prefer)


async def resume(request: Request, sandbox_id: str, prefer: Prefer = None) -> Response:
    """Let the CPUs of a paused sandbox go on."""
    return await _verb(request, sandbox_id, "resume", prefer)


async def suspend(request: Request, sandbox_id: str, prefer: Prefer = None) -> Response:
    """Save memory and disk and release the host's resources."""
    return await _verb(request, sandbox_id, "suspend", prefer)


async def wake(request: Request, sandbox_id: str, prefer: Prefer = None) -> Response:
    """Make it run again by whichever way applies; a running one is awake already."""
    return await _verb(request, sandbox_id, "wake", prefer)


async def stop(request: Request, sandbox_id: str, prefer: Prefer = None) -> Response:
    """End the machine and keep the disk."""
    return await _verb(request, sandbox_id, "stop", prefer)


async def start(request: Request, sandbox_id: str, prefer: Prefer = None) -> Response:
    """Boot a stopped or failed sandbox afresh on its disk."""
    return await _verb(request, sandbox_id, "start", prefer)


async def delete(request: Request, sandbox_id: str, prefer: Prefer = None) -> Response:
    """Delete for good, whatever its state."""
    return await _verb(request, sandbox_id, "delete", prefer)


async def access(request: Request, sandbox_id: str) -> Response:
    """A token for the sandbox's data plane, good for an hour."""
    control = control_of(request)
    sandbox = await sandboxes.get(control, caller(request).project_id, sandbox_id)
    token = sandboxes.grant_access(control, sandbox)
    return reply(access_out(control.settings.data_plane_url, token), 201)


async def metrics(request: Request, sandbox_id: str) -> Response:
    """Usage now and over the last hour."""
    control = control_of(request)
    sandbox = await sandboxes.get(control, caller(request).project_id, sandbox_id)
    now = None
    if sandbox.state in {State.RUNNING, State.PAUSED}:
        now = sample((await control.node.inspect(sandbox.id)).get("usage"), control.now())
    return reply(
        MetricsOut(
            now=None if now is None else SampleOut.model_validate(now),
            history=[SampleOut.model_validate(taken) for taken in control.history.of(sandbox.id)],
        )
    )


async def _verb(request: Request, sandbox_id: str, verb: str, prefer: str | None) -> Response:
    control = control_of(request)
    sandbox, operation = await sandboxes.request(control, caller(request).project_id, sandbox_id, verb)
    return await _accepted(control, sandbox, operation, wait_s(prefer), done=200)


async def _accepted(control: Control, sandbox: Sandbox, operation: Operation, seconds: float, *, done: int) -> Response:
    """Answer with sandbox and operation: at once, or after waiting for the operation's end and readiness."""
    ends = asyncio.get_running_loop().time() + seconds
    status, headers = 202, {}
    if seconds > 0:
        headers["Preference-Applied"] = f"wait={seconds:g}"
        operation, left = await operations.wait_both(control, sandbox.project_id, operation.id, seconds)
        sandbox = left or sandbox
        sandbox = await wait_ready(control, sandbox, operation, ends - asyncio.get_running_loop().time())
    if operation.state == OperationState.SUCCEEDED and _is_there(sandbox, operation):
        status = done if seconds > 0 else 202
    elif seconds > 0 and operation.state in {OperationState.FAILED, OperationState.CANCELLED}:
        raise _as_error(operation)
    answer = Accepted(sandbox=sandbox_out(sandbox), operation=operation_out(operation))
    return reply(answer, status, {"Location": f"/v1/operations/{operation.id}", **headers})


def _is_there(sandbox: Sandbox, operation: Operation) -> bool:
    target = TRANSITIONS[operation.request["verb"]].target
    return target != State.RUNNING or sandbox.ready or sandbox.state != State.RUNNING


def _as_error(operation: Operation) -> SpaceError:
    """Return the error that an operation ended with, for a caller who waited for it."""
    ids = {"sandbox_id": operation.sandbox_id, "operation_id": operation.id}
    failure = operation.error
    if operation.state == OperationState.CANCELLED or failure is None:
        return Conflict("The operation was cancelled: the sandbox was deleted meanwhile.", code="cancelled", **ids)
    cls = class_of_kind(failure.kind) or HostError
    return cls(failure.message, code=failure.code, **ids)


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

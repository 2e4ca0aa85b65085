"""From what control returns to JSON, and the two request headers that several handlers share."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Header, Request
from fastapi.responses import Response
from pydantic import BaseModel

from space.api.schemas import AccessOut, KeyOut, OperationOut, SandboxOut
from space.control.control import Control
from space.control.once import Once, fingerprint
from space.control.operations import error_of
from space.control.projects import ShownKey
from space.control.tokens import Token
from space.errors import InvalidRequest
from space.model.operation import Operation, OperationState
from space.model.project import Key
from space.model.sandbox import Sandbox

WAIT_S_MAX = 300.0
IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")

Prefer = Annotated[
    str | None, Header(description="`wait=N`: hold the answer until it is done, at most N seconds (300).")
]
IdempotencyKey = Annotated[
    str | None,
    Header(description="The same key with the same body within 24 h gets what the first request made."),
]


def control_of(request: Request) -> Control:
    return request.app.state.control


def reply(model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a model as JSON; rendered once, by pydantic's own writer."""
    return Response(model.model_dump_json(), status, headers, "application/json")


def reply_raw(value: Mapping[str, Any], status: int = 200) -> Response:
    """Return JSON that another part of SPACE has composed."""
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")


def accepted(answer: BaseModel, operation: Operation, waited_s: float, *, done: int) -> Response:
    """Answer for an operation: ``done`` if it was waited for and succeeded, else 202; raise what it failed with."""
    headers = {"Location": f"/v1/operations/{operation.id}"}
    if waited_s > 0:
        headers["Preference-Applied"] = f"wait={waited_s:g}"
        if operation.state in {OperationState.FAILED, OperationState.CANCELLED}:
            raise error_of(operation)
    succeeded = waited_s > 0 and operation.state == OperationState.SUCCEEDED
    return reply(answer, done if succeeded else 202, headers)


def sandbox_out(sandbox: Sandbox) -> SandboxOut:
    return SandboxOut.model_validate(sandbox)


def operation_out(operation: Operation) -> OperationOut:
    return OperationOut.model_validate(operation)


def key_out(key: Key, secret: str | None = None) -> KeyOut:
    return KeyOut(
        id=key.id,
        project_id=key.project_id,
        name=key.name,
        role=key.role,
        created_at=key.created_at,
        last_used_at=key.last_used_at,
        key=secret,
    )


def shown_key_out(shown: ShownKey) -> KeyOut:
    return key_out(shown.key, shown.secret)


def access_out(url: str, token: Token) -> AccessOut:
    return AccessOut(url=url, token=token.text, expires_at=token.expires_at)


def wait_s(prefer: str | None) -> float:
    """Return the seconds that a Prefer header asks to be waited, 0 for none; nonsense is ignored (RFC 7240)."""
    for preference in (prefer or "").split(","):
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip().lower() == "wait":
            try:
                return min(max(float(value.strip().strip('"')), 0.0), WAIT_S_MAX)
            except ValueError:
                return 0.0
    return 0.0


async def once(request: Request, key: str | None) -> Once | None:
    """Return the request as one that may be repeated, when it has an Idempotency-Key."""
    if key is None:
        return None
    if not IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidRequest(
            "Idempotency-Key: It must be 1 to 255 printable ASCII characters.", field="idempotency-key"
        )
    raw = await request.body()
    try:
        body = json.loads(raw) if raw else None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("The body is not valid JSON.", code="malformed-json", field="body") from error
    return Once(key, fingerprint(request.method, request.url.path, body))

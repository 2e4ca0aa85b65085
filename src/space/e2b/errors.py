"""How an error of ours is told to E2B's clients: by status on the control plane and for files, by code in an RPC."""

from typing import Any

from space import errors
from space.errors import InvalidRequest, SandboxError, SpaceError

STATUS_BY_CLASS: dict[type[SpaceError], int] = {
    errors.InvalidRequest: 400,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.RequestError: 400,
    errors.LimitExceeded: 429,
    errors.SandboxError: 500,
    errors.HostFull: 503,
    errors.Unavailable: 503,
    errors.HostError: 500,
    errors.OutcomeUnknown: 500,
    SpaceError: 500,
}
STATUS_BY_CODE = {
    "unimplemented": 501,
    "sandbox-gone": 502,
    "port-closed": 502,
    "bad-answer": 502,
    "disk-full": 507,
    "body-too-large": 413,
}
CODE_BY_STATUS = {
    400: "invalid_argument",
    401: "unauthenticated",
    403: "permission_denied",
    404: "not_found",
    409: "failed_precondition",
    413: "resource_exhausted",
    429: "resource_exhausted",
    501: "unimplemented",
    502: "unavailable",
    503: "unavailable",
    504: "deadline_exceeded",
    507: "resource_exhausted",
}
RPC_CODE_BY_CODE = {
    "command-ended": "not_found",
    "no-stdin": "failed_precondition",
    "is-a-directory": "invalid_argument",
    "not-a-directory": "invalid_argument",
    "not-a-file": "invalid_argument",
    "file-exists": "already_exists",
    "timed-out": "deadline_exceeded",
    "wrong-state": "unavailable",
}
"""Codes of ours that mean more in an RPC than their status."""
HTTP_STATUS = {
    "invalid_argument": 400,
    "failed_precondition": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "resource_exhausted": 429,
    "internal": 500,
    "unimplemented": 501,
    "unavailable": 503,
    "deadline_exceeded": 504,
}
"""The HTTP status of a code, for RPCs with a single answer."""


def gone(sandbox_id: str) -> SandboxError:
    """Return the error for a sandbox that is deleted, unknown, or paused and not to be woken."""
    return SandboxError("The sandbox was not found", code="sandbox-gone", sandboxId=sandbox_id)


def port_closed(sandbox_id: str, port: int) -> SandboxError:
    """Return the error for a port of a running sandbox that nobody listens on."""
    message = "The sandbox is running but port is not open"
    return SandboxError(message, code="port-closed", sandboxId=sandbox_id, port=port)


def status_of(error: SpaceError) -> int:
    by_code = STATUS_BY_CODE.get(str(error.code))
    return by_code or next(STATUS_BY_CLASS[cls] for cls in type(error).__mro__ if cls in STATUS_BY_CLASS)


def answer(error: SpaceError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers. Clients repeat by themselves what they are not told to leave."""
    status = status_of(error)
    body: dict[str, Any] = {"code": status, "message": error.message}
    body |= {name: error.details[name] for name in ("sandboxId", "port") if name in error.details}
    headers: dict[str, str] = {}
    if status in {429, 502, 503, 504}:
        headers["should-retry"] = "true" if isinstance(error, errors.Unavailable) else "false"
    if error.retryable:
        headers["retry-after"] = str(max(1, round(error.retry_after_s or 1)))
    return status, body, headers


def rpc(error: SpaceError) -> dict[str, str]:
    """Return ``{code, message}`` of an RPC's error."""
    if isinstance(error, InvalidRequest) and error.details.get("field") in {"user", "owner"}:
        return {"code": "unauthenticated", "message": error.message}
    if error.code == "wrong-state":
        error = gone("")  # It fell asleep after it was seen running.
    code = RPC_CODE_BY_CODE.get(str(error.code)) or CODE_BY_STATUS.get(status_of(error), "internal")
    return {"code": code, "message": error.message}

"""How an error leaves the node: its HTTP status and its JSON. Knows nothing of requests or of the api's own table."""

import re
import secrets
from typing import Any

from space import errors

STATUS_BY_CODE: dict[str, int] = {
    "malformed-json": 400,
    "body-too-large": 413,
    "range-not-satisfiable": 416,
    "subprotocol-needed": 400,
    "file-not-found": 404,
    "permission-denied": 403,
    "file-exists": 409,
    "is-a-directory": 409,
    "not-a-directory": 409,
    "directory-not-empty": 409,
    "file-too-large": 413,
    "disk-full": 507,
    "program-not-found": 422,
    "machine-not-running": 409,
    "not-ready": 503,
}

STATUS_BY_CLASS: dict[type[errors.SpaceError], int] = {
    errors.InvalidRequest: 422,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.RequestError: 400,
    errors.LimitExceeded: 429,
    errors.GuestError: 502,
    errors.MachineLost: 503,
    errors.SandboxError: 502,
    errors.HostFull: 503,
    errors.Unavailable: 503,
    errors.HostError: 500,
    errors.OutcomeUnknown: 504,
    errors.SpaceError: 500,
}

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def http_status(error: errors.SpaceError) -> int:
    """Return the status for an error: by its code where that says more, else by the nearest class of the tree."""
    by_code = STATUS_BY_CODE.get(error.code)
    if by_code is not None:
        return by_code
    return next(STATUS_BY_CLASS[cls] for cls in type(error).__mro__ if cls in STATUS_BY_CLASS)


def error_body(error: errors.SpaceError, request_id: str) -> dict[str, Any]:
    """Return ``{"error": {code, message, details, request_id}}``."""
    return {
        "error": {
            "code": error.code,
            "message": error.message,
            "details": error.details,
            "request_id": request_id,
        }
    }


def request_id(given: str | None) -> str:
    """Return the caller's request id when it is a harmless one, else a fresh one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req{secrets.token_hex(8)}"


def _classes() -> dict[str, type[errors.SpaceError]]:
    found: dict[str, type[errors.SpaceError]] = {}
    pending = [errors.SpaceError]
    while pending:
        cls = pending.pop()
        found[str(cls.code)] = cls
        pending.extend(cls.__subclasses__())
    return found


CLASS_BY_CODE = _classes()


def error_from_wire(wire: Any, fallback: type[errors.SpaceError]) -> errors.SpaceError:
    """Turn ``{code, message, details}`` of another part back into an error; a code no class owns gets ``fallback``."""
    if not isinstance(wire, dict):
        return fallback()
    code, message, details = wire.get("code"), wire.get("message"), wire.get("details")
    if not isinstance(code, str):
        return fallback(str(message) if message else None)
    fields = {str(k): v for k, v in details.items()} if isinstance(details, dict) else {}
    for reserved in ("message", "code"):
        fields.pop(reserved, None)
    return CLASS_BY_CODE.get(code, fallback)(str(message) if message else None, code=code, **fields)

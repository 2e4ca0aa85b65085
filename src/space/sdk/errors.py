"""An error answer of the API back into the class of `space.errors` that says who must act."""

import json
from collections.abc import Mapping
from typing import Any

from space import errors

BY_STATUS: dict[int, type[errors.SpaceError]] = {
    400: errors.InvalidRequest,
    401: errors.Unauthenticated,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.InvalidRequest,
    416: errors.InvalidRequest,
    422: errors.InvalidRequest,
    429: errors.LimitExceeded,
    500: errors.HostError,
    502: errors.SandboxError,
    503: errors.Unavailable,
    504: errors.OutcomeUnknown,
    507: errors.HostFull,
}

BY_CODE: dict[str, type[errors.SpaceError]] = {
    "machine-not-running": errors.Conflict,
    "machine-exited": errors.MachineLost,
    "oom-killed": errors.MachineLost,
    "host-lost": errors.MachineLost,
}

_UNKNOWN = "unexpected-answer"
_EXCERPT = 200


def _collect(cls: type[errors.SpaceError]) -> None:
    BY_CODE[str(cls.code)] = cls
    for below in cls.__subclasses__():
        _collect(below)


_collect(errors.SpaceError)


def from_answer(status: int, body: bytes) -> errors.SpaceError:
    """Return the error that an answer with a status ≥ 400 describes; any body will do."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    described = document.get("error") if isinstance(document, dict) else None
    if isinstance(described, dict):
        return from_wire(described, status)
    excerpt = body[:_EXCERPT].decode(errors="replace").strip()
    cls = BY_STATUS.get(status, errors.HostError if status >= 500 else errors.RequestError)
    return cls(f"The server answered {status}" + (f": {excerpt}" if excerpt else ""), code=_UNKNOWN, status=status)


def from_wire(described: Mapping[str, Any], status: int | None = None) -> errors.SpaceError:
    """Return the error for ``{code, message, details, request_id}``.

    The class is the one that owns the code; for a more particular code it is the guest's own refusal when an errno came
    with it, else what the status stands for.
    """
    code = str(described.get("code") or _UNKNOWN)
    given = described.get("details")
    details: dict[str, Any] = {str(k): v for k, v in given.items()} if isinstance(given, dict) else {}
    for reserved in ("message", "code", "result"):
        details.pop(reserved, None)
    if described.get("request_id"):
        details["request_id"] = described["request_id"]
    cls = BY_CODE.get(code)
    if cls is None:
        by_status = BY_STATUS.get(status or 0, errors.SpaceError)
        cls = errors.GuestError if "errno" in details else by_status
    return cls(str(described.get("message") or "") or None, code=code, **details)

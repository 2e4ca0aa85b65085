"""How an error travels: its HTTP status, its JSON, and back into a class of `space.errors`.

One table for all parts, so that an error means the same wherever it crosses a wire: from the broker to the node, from
the node to the api, from either to a client. Pure; knows no requests and no web framework.
"""

import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from space import errors
from space.errors import SpaceError

STATUS_BY_CODE: dict[str, int] = {
    "malformed-json": 400,
    "subprotocol-needed": 400,
    "permission-denied": 403,
    "file-not-found": 404,
    "method-not-allowed": 405,
    "body-timeout": 408,
    "directory-not-empty": 409,
    "file-exists": 409,
    "is-a-directory": 409,
    "not-a-directory": 409,
    "body-too-large": 413,
    "file-too-large": 413,
    "range-not-satisfiable": 416,
    "unimplemented": 501,
    "not-ready": 503,
    "disk-full": 507,
}
"""Codes that say more than their class."""

STATUS_BY_CLASS: dict[type[SpaceError], int] = {
    errors.InvalidRequest: 422,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.RequestError: 400,
    errors.LimitExceeded: 429,
    errors.SandboxError: 502,
    errors.MachineLost: 503,
    errors.HostFull: 503,
    errors.Unavailable: 503,
    errors.HostError: 500,
    errors.OutcomeUnknown: 504,
    SpaceError: 500,
}

CLASS_BY_STATUS: dict[int, type[SpaceError]] = {
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
"""What a status stands for when the code beside it is none of a class."""

_RESERVED = ("message", "code", "result")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def status_of(error: SpaceError) -> int:
    """Return the HTTP status of an error: by its code where that says more, else by the nearest class of the tree."""
    by_code = STATUS_BY_CODE.get(str(error.code))
    return by_code or next(STATUS_BY_CLASS[cls] for cls in type(error).__mro__ if cls in STATUS_BY_CLASS)


def class_of_status(status: int) -> type[SpaceError]:
    """Return the class that a status of 400 and above stands for."""
    return CLASS_BY_STATUS.get(status, errors.HostError if status >= 500 else errors.RequestError)


def kind_of(error: SpaceError) -> str:
    """Return the name of the error's class in the tree of `space.errors`, by which it comes back as the same class."""
    return next(cls.__name__ for cls in type(error).__mro__ if CLASS_BY_NAME.get(cls.__name__) is cls)


def class_of_kind(kind: object) -> type[SpaceError] | None:
    """Return the class of that name; None when this version knows none."""
    return CLASS_BY_NAME.get(kind) if isinstance(kind, str) else None


def render(error: SpaceError) -> dict[str, Any]:
    """Return ``{code, message, kind, details}``."""
    return {"code": str(error.code), "message": error.message, "kind": kind_of(error), "details": error.details}


def answer(error: SpaceError, request_id: str) -> dict[str, Any]:
    """Return the body of an HTTP answer: ``{"error": {code, message, kind, details, request_id}}``."""
    return {"error": {**render(error), "request_id": request_id}}


def parse(
    described: Any, fallback: type[SpaceError], by_code: Mapping[str, type[SpaceError]] | None = None
) -> SpaceError:
    """Turn ``{code, message, kind, details}`` of another part back into an error; anything at all is taken.

    The class is the one that owns the code (or has it in ``by_code``), else the one that ``kind`` names, else
    ``fallback``.
    """
    if not isinstance(described, dict):
        return fallback()
    code, message, given = described.get("code"), described.get("message"), described.get("details")
    details: dict[str, Any] = {str(k): v for k, v in given.items()} if isinstance(given, dict) else {}
    for reserved in _RESERVED:
        details.pop(reserved, None)
    text = str(message) if message else None
    if not isinstance(code, str) or not code:
        return fallback(text, **details)
    cls = CLASS_BY_CODE.get(code) or (by_code or {}).get(code) or class_of_kind(described.get("kind")) or fallback
    return cls(text, code=code, **details)


def request_id(given: str | None) -> str:
    """Return the caller's request id when it is a harmless one, else a fresh one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req{secrets.token_hex(8)}"


def _tree(cls: type[SpaceError]) -> Iterator[type[SpaceError]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _tree(below)


CLASS_BY_CODE: dict[str, type[SpaceError]] = {str(cls.code): cls for cls in _tree(SpaceError)}
CLASS_BY_NAME: dict[str, type[SpaceError]] = {cls.__name__: cls for cls in _tree(SpaceError)}

"""An error answer of the API back into the class of `space.errors` that says who must act."""

import json
from collections.abc import Mapping
from typing import Any

from space import errors
from space.error_wire import class_of_status, parse

BY_CODE: dict[str, type[errors.SpaceError]] = {
    "machine-exited": errors.MachineLost,
    "oom-killed": errors.MachineLost,
    "host-lost": errors.MachineLost,
}

_UNKNOWN = "unexpected-answer"
_EXCERPT = 200


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
    message = f"The server answered {status}" + (f": {excerpt}" if excerpt else "")
    return class_of_status(status)(message, code=_UNKNOWN, status=status)


def from_wire(described: Mapping[str, Any], status: int | None = None) -> errors.SpaceError:
    """Return the error for ``{code, message, kind, details, request_id}``.

    The class is the one that owns the code; for a more particular code it is the guest's own refusal when an errno came
    with it, else the one that ``kind`` names, else what the status stands for.
    """
    details = described.get("details")
    fallback = class_of_status(status) if status else errors.SpaceError
    if isinstance(details, dict) and "errno" in details:
        described = {**described, "kind": errors.GuestError.__name__}
    error = parse({**described, "code": str(described.get("code") or _UNKNOWN)}, fallback, BY_CODE)
    if described.get("request_id"):
        error.details["request_id"] = described["request_id"]
    return error

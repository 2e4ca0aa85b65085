"""How an error becomes an answer, whatever went wrong: one shape, and the statuses of `space.error_wire`."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from space import error_wire, errors
from space.error_wire import status_of
from space.errors import SpaceError

log = structlog.get_logger(__name__)

RETRY_AFTER_S = 1
FIELD_CHARS_MAX = 200
NAMED_MAX = 20
TOLD_MAX = 3
"""So many problems are in the message; as many as ``NAMED_MAX`` are in the details."""


def answer(error: SpaceError, request_id: str) -> JSONResponse:
    """Return the answer that tells of an error."""
    described = error_wire.answer(error, request_id)
    details = described["error"]["details"] = dict(error.details)
    headers: dict[str, str] = {}
    retry_after = details.pop("retry_after_s", RETRY_AFTER_S if error.retryable else None)
    if retry_after is not None:
        headers["Retry-After"] = str(max(1, round(float(retry_after))))
    if isinstance(error, errors.Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(described, status_of(error), headers)


def install(app: FastAPI) -> None:
    """Make the app answer in our shape, whatever went wrong."""
    app.add_exception_handler(SpaceError, _space_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)


async def _space_error(request: Request, error: Exception) -> JSONResponse:
    space_error = cast("SpaceError", error)
    if status_of(space_error) >= 500:
        log.warning("request-failed", code=space_error.code, kind=type(space_error).__name__)
    return answer(space_error, request_id(request))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    problems = cast("RequestValidationError", error).errors()
    return answer(from_validation(problems), request_id(request))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    http_error = cast("HTTPException", error)
    if isinstance(error.__cause__, SpaceError):
        return answer(error.__cause__, request_id(request))
    cls, code, message = _BY_STATUS.get(http_error.status_code, _OTHERWISE)
    headers = {name: value for name, value in (http_error.headers or {}).items() if name.lower() == "allow"}
    described = error_wire.answer(cls(message, code=code), request_id(request))
    return JSONResponse(described, http_error.status_code, headers)


_OTHERWISE = (errors.RequestError, "bad-request", "The request cannot be carried out.")
_BY_STATUS = {
    400: (errors.InvalidRequest, "malformed-json", "The body is not valid JSON."),
    404: (errors.NotFound, "not-found", "There is nothing at this path. `/docs` lists the paths there are."),
    405: (errors.RequestError, "method-not-allowed", "This path does not take that method."),
}


def from_validation(problems: Sequence[Any]) -> SpaceError:
    """Return one error for all problems of a request; values a caller sent are never part of it."""
    if any(problem["type"] == "json_invalid" for problem in problems):
        return errors.InvalidRequest("The body is not valid JSON.", code="malformed-json", field="body")
    named = [{"field": _field(problem["loc"]), "problem": _problem(problem)} for problem in problems[:NAMED_MAX]]
    first = named[0]
    told = "; ".join(f"{one['field']}: {one['problem']}" for one in named[:TOLD_MAX])
    return errors.InvalidRequest(told, field=first["field"], problems=named)


def _field(location: Sequence[Any]) -> str:
    """Write where a problem is: ``resources.cpus``; a query parameter or a header by its name."""
    parts = [str(part) for part in location if part != "[key]"]
    if len(parts) > 1 and parts[0] in {"body", "query", "path", "header"}:
        parts = parts[1:]
    return safe(".".join(parts))[:FIELD_CHARS_MAX]


def _problem(problem: Mapping[str, Any]) -> str:
    text = str(problem["msg"]).removeprefix("Value error, ")
    return "This field does not exist." if problem["type"] == "extra_forbidden" else safe(text)[:FIELD_CHARS_MAX]


def safe(text: str) -> str:
    """Return text that can be written as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def request_id(request: Request) -> str:
    return str(request.scope["state"]["request_id"])

"""Failures on their way: what the reader refuses, from the child to the node; what ended a group of tasks."""

from __future__ import annotations

from space.errors import RequestError


class Refusal(Exception):
    """What was read cannot be used. ``line`` is the Dockerfile's."""

    def __init__(self, code: str, message: str, line: int | None = None) -> None:
        self.code = code
        self.message = message
        self.line = line
        super().__init__(message)


def error_of(code: str, message: str, line: int | None) -> RequestError:
    """Return the error for a refusal; a code that is not known here is told as a Dockerfile's."""
    details = {} if line is None else {"line": line}
    match code:
        case "archive-damaged":
            return RequestError(message, code="archive-damaged", **details)
        case "context-too-large":
            return RequestError(message, code="context-too-large", **details)
        case "copy-source-missing":
            return RequestError(message, code="copy-source-missing", **details)
        case "instruction-not-supported":
            return RequestError(message, code="instruction-not-supported", **details)
        case "image-not-supported":
            return RequestError(message, code="image-not-supported", **details)
        case _:
            return RequestError(message, code="dockerfile-invalid", **details)


def innermost(error: BaseException) -> BaseException:
    """Return what a group of tasks was ended by."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

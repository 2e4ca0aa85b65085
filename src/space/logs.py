"""JSON lines on standard error, the same from every process: what happened and where, with the request's id.

Values of callers and guests are no part of it. Without `configure` an exception would be printed with the values of
all local variables, environments and tokens among them.
"""

import logging
import sys
import traceback
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(level: str, stream: TextIO | None = None) -> None:
    """Set logging up for this process, to standard error unless told otherwise; unknown levels mean info."""
    stream = stream or sys.stderr
    number = LEVELS.get(level.lower(), LEVELS["info"])
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            _place_only,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=stream, level=max(number, logging.WARNING), format='{"event": "%(name)s"}')


def _place_only(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Replace an exception by the places it went through: its message may quote a caller's values."""
    info: Any = event.pop("exc_info", None)
    if info:
        error = sys.exc_info()[1] if info is True else info
        if isinstance(error, BaseException):
            frames = traceback.extract_tb(error.__traceback__)
            event["places"] = [f"{frame.filename}:{frame.lineno}" for frame in frames[-12:]]
    return event

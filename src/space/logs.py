"""JSON lines on standard error, the same from every process: what happened and where, and for whom (`tracing.note`).

Values of callers and guests are no part of it. Without `configure` an exception would be printed with the values of
all local variables, environments and tokens among them.
"""

import asyncio
import logging
import sys
import traceback
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict

from space import tracing

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(level: str, stream: TextIO | None = None) -> None:
    """Set logging up for this process, to standard error unless told otherwise; unknown levels mean info."""
    stream = stream or sys.stderr
    number = LEVELS.get(level.lower(), LEVELS["info"])
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            tracing.add_trace_id,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            _place_only,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # One write a line: no other writer comes in between.
        logger_factory=structlog.WriteLoggerFactory(stream),
        # Not remembered by the loggers that modules hold: whoever configures again is heard by all of them.
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(stream=stream, level=max(number, logging.WARNING), format='{"event": "%(name)s"}')


def note_from_loop(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what an event loop has caught and nobody waits for: give this to ``set_exception_handler``.

    asyncio's own handler would print the exception's message and the representation of whatever it has met.
    uvloop answers a peer's last TLS records on connections that are closed already, and reports that as an error.
    """
    error = context.get("exception")
    if isinstance(error, RuntimeError) and str(error).endswith("the handler is closed"):
        structlog.get_logger().debug("connection-closed-already")
        return
    before, callback, _ = str(context.get("message", "")).partition("callback")  # its arguments come behind
    kind = None if error is None else type(error).__name__
    structlog.get_logger().error("loop-error", what=before + callback, kind=kind, exc_info=error)


def _place_only(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Replace an exception by the places it went through: its message may quote a caller's values."""
    info: Any = event.pop("exc_info", None)
    if info:
        error = sys.exc_info()[1] if info is True else info
        if isinstance(error, BaseException):
            frames = traceback.extract_tb(error.__traceback__)
            event["places"] = [f"{frame.filename}:{frame.lineno}" for frame in frames[-12:]]
    return event

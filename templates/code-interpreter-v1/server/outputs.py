"""What a kernel says while it runs a cell, as the lines that clients get. Pure."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

Event = dict[str, Any]

KEEPALIVE: Event = {"type": "keepalive"}
END: Event = {"type": "end_of_execution"}

PIECE_CHARS = 1024 * 1024
"""Of one piece of output, and of an error's texts; what is longer is told in several, or its end is."""
RESULT_BYTES_MAX = 32 * 1024 * 1024
"""Of all forms of one result together, as JSON; what is beyond is named instead."""
OMITTED = "space/omitted"

_FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
_OBJECTS = {"json", "data", "chart"}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def line(event: Event) -> bytes:
    """Return one line of NDJSON, in ASCII: what a program prints need not be text in any encoding. Numbers that JSON has
    no word for are null.
    """
    return _json(event).encode("ascii") + b"\n"


def events_of(kind: str, content: Mapping[str, Any]) -> list[Event]:
    """Return what one message of a kernel means to a client: often nothing."""
    if kind == "stream":
        name, text = "stderr" if content.get("name") == "stderr" else "stdout", str(content.get("text") or "")
        pieces = (text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS))
        return [{"type": name, "text": piece, "timestamp": time.time_ns()} for piece in pieces]
    if kind == "execute_input":
        count = content.get("execution_count")
        return [{"type": "number_of_executions", "execution_count": count}] if isinstance(count, int) else []
    if kind in {"execute_result", "display_data", "update_display_data"}:
        data = content.get("data")
        return [_result(data, main=kind == "execute_result")] if isinstance(data, dict) and data else []
    if kind == "error":
        return [error_of(content)]
    return []


def error_of(content: Mapping[str, Any]) -> Event:
    """Return the error that a message tells of."""
    return error(content.get("ename") or "", content.get("evalue") or "", content.get("traceback"))


def error(name: Any, value: Any, traceback: Any = None) -> Event:
    """Return an error as it is told; what a shell ends with has no name of its own. Of long texts the end is told."""
    lines = traceback if isinstance(traceback, list) else []
    text = _ESCAPES.sub("", "\n".join(map(str, lines)))
    texts = {"name": str(name) or "ExitStatus", "value": str(value), "traceback": text}
    return {"type": "error", **{key: value[-PIECE_CHARS:] for key, value in texts.items()}}


def _result(data: Mapping[str, Any], *, main: bool) -> Event:
    told: Event = {"type": "result", "is_main_result": main}
    extra: dict[str, Any] = {}
    omitted: list[str] = []
    left = RESULT_BYTES_MAX
    for mime, value in data.items():
        name = _FORMATS.get(mime)
        if name is not None and name not in _OBJECTS:
            value = "".join(map(str, value)) if isinstance(value, list) else str(value)
        if name == "text":
            value = _unquoted(_ESCAPES.sub("", value))[:PIECE_CHARS]
        size = len(_json(value))
        if size > left:
            omitted.append(str(mime))
            continue
        left -= size
        (extra if name is None else told)[name or mime] = value
    if omitted:
        extra[OMITTED] = omitted
    if extra:
        told["extra"] = extra
    return told


def _json(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(plain, separators=(",", ":"))


def _unquoted(text: str) -> str:
    """Return a text without the quotes that its language shows around it."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text

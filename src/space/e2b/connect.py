"""The Connect protocol with JSON, as E2B's clients speak it: frames of streams, bodies of single calls. Pure."""

import json
import struct
from collections.abc import Iterator
from typing import Any

from space.errors import InvalidRequest

STREAM_TYPE = "application/connect+json"
FRAME_BYTES_MAX = 4 * 1024 * 1024
_HEADER = struct.Struct(">BI")
_END = 2


def message(value: Any) -> bytes:
    """Return one message of a stream."""
    return _frame(0, value)


def end(error: dict[str, str] | None = None) -> bytes:
    """Return the last frame of a stream."""
    return _frame(_END, {} if error is None else {"error": error})


def _frame(flags: int, value: Any) -> bytes:
    data = json.dumps(value, separators=(",", ":")).encode("utf-8", "backslashreplace")
    return _HEADER.pack(flags, len(data)) + data


class Frames:
    """Takes a stream apart as its bytes come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that are complete. Raises ``InvalidRequest`` for what is none."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            flags, size = _HEADER.unpack_from(self._buffer)
            if size > FRAME_BYTES_MAX:
                raise InvalidRequest(f"A message may have at most {FRAME_BYTES_MAX} bytes.", code="body-too-large")
            if len(self._buffer) < _HEADER.size + size:
                return
            payload = bytes(self._buffer[_HEADER.size : _HEADER.size + size])
            del self._buffer[: _HEADER.size + size]
            if flags & _END:
                continue
            if flags:
                raise InvalidRequest("Compressed messages are not taken.")
            yield parse(payload)


def parse(data: bytes) -> dict[str, Any]:
    """Return the object that a body is; an empty one says nothing."""
    if not data.strip():
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("The message is not valid JSON.", code="malformed-json") from error
    if not isinstance(value, dict):
        raise InvalidRequest("The message must be a JSON object.", code="malformed-json")
    return value


def first(data: bytes) -> dict[str, Any]:
    """Return the one message that a client sends to begin a stream."""
    for found in Frames().feed(data):
        return found
    raise InvalidRequest("The request has no message.")

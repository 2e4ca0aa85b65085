"""The client's side of the subprotocol ``space.command.v1``, without I/O.

An `Attachment` outlives its connections: it knows how far each output stream has come, which stdin bytes the server has
made safe, and so where a new connection has to go on. It must not know sockets or event loops. A reader and a writer
may use it from two threads.
"""

import base64
import json
import struct
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from space.errors import HostError, InvalidRequest
from space.sdk.errors import from_wire
from space.sdk.types import Exit, Gap, Output, StreamName, begun_character

SUBPROTOCOL = "space.command.v1"
FRAME_DATA_BYTES_MAX = 256 * 1024
CHARACTER_BYTES_MAX = 4
STDIN_WINDOW_BYTES = 1024 * 1024
STDIN_FRAME_BYTES = 64 * 1024

_HEADER = struct.Struct(">BQ")
_STDIN = 0
_STREAMS: dict[int, StreamName] = {1: "stdout", 2: "stderr", 3: "tty"}

FRAME_BYTES_MAX = FRAME_DATA_BYTES_MAX + _HEADER.size


class Attachment:
    """One command as seen by an attached client, across reconnects."""

    def __init__(self, offsets: Mapping[StreamName, int] | None = None) -> None:
        self.offsets: dict[StreamName, int] = {"stdout": 0, "stderr": 0, "tty": 0, **(offsets or {})}
        self.exit: Exit | None = None
        self.duration_s: float | None = None
        self.started = False
        self._met = False
        self._cut: dict[StreamName, bytes] = {}
        self._lock = threading.RLock()
        self._stdin: deque[bytes] = deque()
        self._stdin_base = 0
        self._stdin_acked = 0
        self._stdin_sent = 0
        self._stdin_end = 0
        self._stdin_closed = False
        self._eof_sent = False

    # Output

    def query(self) -> dict[str, str]:
        """Return the query parameters that make a new connection go on where the last one ended."""
        return {f"{name}_from": str(offset) for name, offset in self.offsets.items() if offset}

    def disconnected(self) -> None:
        """Forget what was in flight: the next connection starts with ``started``."""
        with self._lock:
            self.started = False
            self._eof_sent = False

    def receive(self, frame: bytes | str) -> Output | Gap | None:
        """Take one frame, or one line of an NDJSON body; return what it means to the caller, None if nothing.

        Raises the error that the server reports, or ``HostError`` (code ``protocol``) when the frame is not one.
        """
        return self._receive_data(frame) if isinstance(frame, bytes) else self._receive_text(frame)

    def _receive_data(self, frame: bytes) -> Output | None:
        if len(frame) < _HEADER.size:
            raise _protocol("a binary frame shorter than its header")
        number, offset = _HEADER.unpack_from(frame)
        name = _STREAMS.get(number)
        if name is None:
            raise _protocol(f"output of unknown stream {number}")
        return self._output(name, offset, memoryview(frame)[_HEADER.size :])

    def _output(self, name: StreamName, offset: int, received: memoryview) -> Output | None:
        expected = self.offsets[name]
        if offset > expected:
            raise _protocol(f"{name} goes on at {offset} instead of {expected}")
        data = bytes(received[expected - offset :])
        if not data:
            return None
        self.offsets[name] = expected + len(data)
        cut = self._cut.get(name, b"")
        self._cut[name] = begun_character(cut + data if len(data) < CHARACTER_BYTES_MAX else data)
        return Output(name, expected, data, cut)

    def _receive_text(self, frame: str) -> Output | Gap | None:
        try:
            document = json.loads(frame)
            kind = document["type"]
        except (ValueError, TypeError, KeyError) as error:
            raise _protocol("a text frame that is not an object with a type") from error
        with self._lock:
            return self._message(kind, document)

    def _message(self, kind: str, document: Mapping[str, Any]) -> Output | Gap | None:
        try:
            if kind == "output":
                return self._output(self._known(document["stream"]), int(document["offset"]), _decoded(document))
            if kind == "started":
                self._start(int(document["stdin"]), int(document["stdin_next"]))
            elif kind == "ack":
                self._stdin_safe(int(document["stdin"]))
            elif kind == "gap":
                return self._gap(self._known(document["stream"]), int(document["to"]))
            elif kind == "exit":
                self.exit = Exit.parse(document["exit"])
                self.duration_s = document.get("duration_s")
            elif kind == "error":
                raise from_wire(document["error"])
        except (KeyError, ValueError, TypeError) as error:
            raise _protocol(f"a {kind!r} message that lacks what it must have") from error
        return None

    def _start(self, safe: int, following: int) -> None:
        if not self._met:  # Others may have written before us; what of theirs is safe is not our business.
            self._met = True
            self._stdin_base = following
            self._stdin_acked = following
            self._stdin_end += following
        self._stdin_safe(safe)
        self._stdin_sent = self._stdin_acked
        self.started = True

    def _known(self, name: Any) -> StreamName:
        if name not in self.offsets:
            raise _protocol(f"something about unknown stream {name!r}")
        return name

    def _gap(self, stream: StreamName, end: int) -> Gap | None:
        start = self.offsets[stream]
        if end <= start:
            return None
        self.offsets[stream] = end
        self._cut.pop(stream, None)
        return Gap(stream, start, end)

    # Input

    @property
    def stdin_pending(self) -> int:
        """How many stdin bytes the server has not made safe yet."""
        return self._stdin_end - self._stdin_acked

    @property
    def stdin_room(self) -> int:
        """How many more stdin bytes may be in flight."""
        return max(0, STDIN_WINDOW_BYTES - self.stdin_pending)

    @property
    def stdin_closed(self) -> bool:
        return self._stdin_closed

    @property
    def stdin_unsent(self) -> bool:
        """Whether `next_frame` has something to give once a connection stands."""
        return self._stdin_sent < self._stdin_end or (self._stdin_closed and not self._eof_sent)

    def feed(self, data: bytes) -> None:
        """Queue stdin bytes; the caller keeps within ``stdin_room``."""
        if self._stdin_closed:
            raise InvalidRequest("The command's stdin is closed.", code="stdin-closed")
        if self.exit is not None:
            raise InvalidRequest("The command has ended.", code="command-ended")
        with self._lock:
            for start in range(0, len(data), STDIN_FRAME_BYTES):
                self._stdin.append(data[start : start + STDIN_FRAME_BYTES])
            self._stdin_end += len(data)

    def close_stdin(self) -> None:
        """Let ``stdin-eof`` follow the bytes queued so far."""
        self._stdin_closed = True

    def next_frame(self) -> bytes | str | None:
        """Return the next frame to send on the present connection, or None when there is none now."""
        with self._lock:
            if not self.started:
                return None
            if self._stdin_sent < self._stdin_end:
                offset, data = self._unsent()
                self._stdin_sent = offset + len(data)
                return _HEADER.pack(_STDIN, offset) + data
            if self._stdin_closed and not self._eof_sent:
                self._eof_sent = True
                return json.dumps({"type": "stdin-eof"})
            return None

    def _unsent(self) -> tuple[int, bytes]:
        offset = self._stdin_acked
        for chunk in self._stdin:
            if offset + len(chunk) > self._stdin_sent:
                return self._stdin_sent, chunk[self._stdin_sent - offset :]
            offset += len(chunk)
        raise _protocol("stdin bytes were lost on the way")

    def _stdin_safe(self, offset: int) -> None:
        if offset > self._stdin_end or offset < 0:
            raise _protocol(f"stdin acknowledged up to {offset}, but {self._stdin_end} bytes were written")
        if offset < self._stdin_base:
            return
        while self._stdin and self._stdin_acked < offset:
            chunk = self._stdin.popleft()
            taken = min(len(chunk), offset - self._stdin_acked)
            self._stdin_acked += taken
            if taken < len(chunk):
                self._stdin.appendleft(chunk[taken:])
        self._stdin_sent = max(self._stdin_sent, self._stdin_acked)


def resize_frame(rows: int, cols: int) -> str:
    return json.dumps({"type": "resize", "rows": rows, "cols": cols})


def _decoded(document: Mapping[str, Any]) -> memoryview:
    data: str = document["data"]
    return memoryview(base64.b64decode(data) if document.get("encoding") == "base64" else data.encode())


def _protocol(what: str) -> HostError:
    return HostError(f"The server sent {what}.", code="protocol")

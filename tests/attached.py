"""A client of the attach WebSocket, for tests: takes frames, keeps them apart by stream, checks offsets."""

import json
import struct
from typing import Any, Self

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

HEADER = struct.Struct(">BQ")
NAMES = {1: "stdout", 2: "stderr", 3: "tty"}
SUBPROTOCOL = "space.command.v1"


class Attached:
    """One attached client. ``data`` holds what came of each stream, ``at`` where it goes on."""

    def __init__(self, url: str, at: dict[str, int] | None = None, *, patience_s: float = 30, **options: Any) -> None:
        self._connecting = connect(
            url, subprotocols=[SUBPROTOCOL], compression=None, max_size=2**20, close_timeout=1, **options
        )
        self.socket: ClientConnection = self._connecting.__enter__()
        self.patience_s = patience_s
        self.at = {"stdout": 0, "stderr": 0, "tty": 0, **(at or {})}
        self.data: dict[str, bytearray] = {name: bytearray() for name in NAMES.values()}
        self.gaps: list[dict[str, Any]] = []
        self.exit: dict[str, Any] | None = None
        self.started: dict[str, Any] | None = None
        self.stdin_safe = 0
        self.stdin_at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connecting.__exit__(None, None, None)

    def take(self, timeout_s: float | None = None) -> str:
        """Take one frame and return what it was."""
        frame = self.socket.recv(timeout_s or self.patience_s)
        if isinstance(frame, bytes):
            number, offset = HEADER.unpack_from(frame)
            name, data = NAMES[number], frame[HEADER.size :]
            assert self.started is not None, "output before `started`"
            assert offset == self.at[name], f"{name} goes on at {offset}, not at {self.at[name]}"
            assert 0 < len(data) <= 256 * 1024
            self.at[name] += len(data)
            self.data[name] += data
            return name
        message = json.loads(frame)
        kind = message["type"]
        if kind == "started":
            self.started, self.stdin_safe = message, message["stdin"]
        elif kind == "gap":
            assert message["from"] == self.at[message["stream"]]
            self.at[message["stream"]] = message["to"]
            self.gaps.append(message)
        elif kind == "exit":
            self.exit = message
        elif kind == "ack":
            self.stdin_safe = message["stdin"]
        return kind if kind != "error" else json.dumps(message["error"])

    def until(self, condition: Any) -> None:
        while not condition():
            self.take()

    def finish(self) -> dict[str, Any]:
        """Take everything up to the exit record and the server's close; return the record."""
        self.until(lambda: self.exit is not None)
        assert self.exit is not None
        with pytest.raises(ConnectionClosed) as closed:
            self.take()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000
        for name, count in self.exit["produced"].items():
            assert self.at[name] == count, f"{name} ended at {self.at[name]} of {count}"
        return self.exit["exit"]

    def until_at(self, stream: str, offset: int) -> None:
        """Take until a stream has come so far, or the command has ended."""
        self.until(lambda: self.exit or self.at[stream] > offset)

    def until_said(self, stream: str, text: bytes) -> None:
        self.until(lambda: text in self.data[stream])

    def until_closed(self) -> str:
        """Take everything until the server closes, and return what the last frame was."""
        last = ""
        while True:
            try:
                last = self.take()
            except ConnectionClosed:
                return last

    def feed(self, data: bytes, offset: int | None = None) -> None:
        start = self.stdin_at if offset is None else offset
        self.socket.send(HEADER.pack(0, start) + data)
        self.stdin_at = max(self.stdin_at, start + len(data))

    def say(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

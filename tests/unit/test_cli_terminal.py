"""The command line with a terminal of its own, against a scripted server on loopback."""

import json
import os
import pty
import select
import struct
import sys
import termios
import time
from contextlib import suppress
from fcntl import ioctl
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.command_line import CMD, ID, SPACE, ended, environment, out, server
from tests.scripted_server import ScriptedServer

__all__ = ["server"]


class Terminal:
    """`space` with a terminal of its own."""

    def __init__(self, server: ScriptedServer, *words: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [*SPACE, *words], environment(server))
        self.seen = b""

    def resize(self, rows: int, cols: int) -> None:
        ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, data: bytes) -> None:
        os.write(self.fd, data)

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + 30
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.fd], [], [], 1)[0]:
                self.seen += os.read(self.fd, 65536)

    def status(self) -> int:
        with suppress(OSError):
            while data := os.read(self.fd, 65536):
                self.seen += data
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_terminal_passes_keys_and_sizes_on_and_ends_with_the_program(server: ScriptedServer) -> None:
    heard: list[Any] = []

    async def terminal(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        await websocket.send_bytes(out(0, b"prompt$ ", 3))
        typed = 0
        while len(heard) < 3:
            message = await websocket.receive()
            if (frame := message.get("bytes")) is not None:
                heard.append(frame[9:])
                typed += len(frame) - 9
                await websocket.send_json({"type": "ack", "stdin": typed})
                await websocket.send_bytes(out(8 + 4 * (len(heard) - 1), b"ok%d " % len(heard), 3))
            else:
                heard.append(json.loads(message["text"]))
        await websocket.send_json(ended(code=3))
        await websocket.close()

    server.attach = [terminal]
    screen = Terminal(server, "shell", "demo")
    screen.wait_for(b"prompt$ ")
    screen.type(b"\x03")
    screen.wait_for(b"ok1 ")
    screen.type("é".encode())
    screen.wait_for(b"ok2 ")
    screen.resize(40, 132)
    assert screen.status() == 3
    assert heard == [b"\x03", "é".encode(), {"type": "resize", "rows": 40, "cols": 132}]
    created = server.requests(f"POST /v1/sandboxes/{ID}/commands")[0].json
    assert created["tty"]
    assert created["env"]["TERM"] == "xterm"


def test_leaving_a_terminal_says_how_to_come_back_and_coming_back_shows_its_tail(server: ScriptedServer) -> None:
    async def quiet(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        await websocket.send_bytes(out(0, b"prompt$ ", 3))
        with suppress(WebSocketDisconnect):
            while (await websocket.receive())["type"] != "websocket.disconnect":
                pass

    resized: list[Any] = []

    async def again(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 5})
        start = int(websocket.query_params["tty_from"])
        await websocket.send_bytes(out(start, b"tail$ ", 3))
        resized.append(json.loads((await websocket.receive())["text"]))
        await websocket.send_json(ended())
        await websocket.close()

    server.attach = [quiet, again]
    screen = Terminal(server, "shell", "demo")
    screen.wait_for(b"prompt$ ")
    screen.type(b"ls\x1d")
    assert screen.status() == 0
    assert f"space shell demo --attach {CMD}".encode() in screen.seen
    screen = Terminal(server, "shell", "demo", "--attach", CMD)
    screen.wait_for(b"tail$ ")
    assert screen.status() == 0
    assert server.attached[1]["tty_from"] == str(100_000 - 32 * 1024)
    assert resized[0]["type"] == "resize"

"""The command line as a process, against a scripted server on loopback."""

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.websockets import WebSocket

from tests.scripted_server import ScriptedServer, operation, sandbox

ID = sandbox()["id"]
CMD = "cmdaaaaaaaaaaaaaaaa"
SPACE = [sys.executable, "-c", "from space.cli import main; main()"]
FILES = f"/v1/sandboxes/{ID}/files"


def out(offset: int, data: bytes, stream: int = 1) -> bytes:
    return struct.pack(">BQ", stream, offset) + data


def ended(kind: str = "exited", code: int | None = 0, signal: int | None = None) -> dict[str, Any]:
    return {"type": "exit", "exit": {"kind": kind, "code": code, "signal": signal}, "produced": {}}


def says(*frames: bytes | dict[str, Any]) -> Any:
    async def conversation(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        for frame in frames:
            await (websocket.send_bytes(frame) if isinstance(frame, bytes) else websocket.send_json(frame))
        await websocket.close()

    return conversation


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        server.on("POST /v1/sandboxes", {"sandbox": sandbox(), "operation": operation()})
        server.on("GET /v1/sandboxes", {"items": [sandbox(name="demo")], "next_cursor": None})
        server.on(f"GET /v1/sandboxes/{ID}", sandbox(name="demo"))
        server.on(f"DELETE /v1/sandboxes/{ID}", {"sandbox": sandbox(state="deleted"), "operation": operation()})
        server.on(f"POST /v1/sandboxes/{ID}/access", {"url": server.url, "token": "t"})
        attach = {"url": f"{server.url.replace('http', 'ws')}/v1/commands/{CMD}/attach", "token": "t"}
        command = {"id": CMD, "sandbox_id": ID, "argv": ["x", "a b"], "state": "created", "exit": None}
        server.on(f"POST /v1/sandboxes/{ID}/commands", {"command": command, "attach": attach})
        server.on(f"GET /v1/sandboxes/{ID}/commands", {"items": [command], "next_cursor": None})
        server.on(f"GET /v1/commands/{CMD}", {**command, "produced": {"tty": 100_000}})
        yield server


def environment(server: ScriptedServer) -> dict[str, str]:
    return {**os.environ, "SPACE_URL": server.url, "SPACE_API_KEY": "sk_test", "TERM": "xterm"}


def space(
    server: ScriptedServer, *words: str, stdin: bytes | int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[bytes]:
    given: dict[str, Any] = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    return subprocess.run(
        [*SPACE, *words], **given, env=environment(server), capture_output=True, timeout=60, check=False
    )

"""A real HTTP and WebSocket server on loopback that answers as its test says. It stands for the api and for a node.

It is a script, not an imitation: it knows no rules of SPACE, only which answer follows which request.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

Answer = Response | Callable[[Request], Awaitable[Response]]
Conversation = Callable[[WebSocket], Awaitable[None]]


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    client: tuple[str, int]
    """Address and port that it came from: one connection's requests have the same."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class ScriptedServer:
    """``script`` maps ``"GET /path"`` to the answers to give in turn (the last one again and again).

    ``attach`` holds the conversations of WebSockets, one each; a response refuses.
    """

    script: dict[str, list[Answer]] = field(default_factory=dict)
    attach: list[Conversation | Response] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    attached: list[dict[str, str]] = field(default_factory=list)

    def on(self, what: str, *answers: Answer | dict[str, Any]) -> None:
        """Answer ``"METHOD /path"`` so; a dict is a 200 with that JSON."""
        self.script[what] = [JSONResponse(a) if isinstance(a, dict) else a for a in answers]

    def requests(self, what: str) -> list[Seen]:
        return [s for s in self.seen if f"{s.method} {s.path}" == what]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._socket = socket.create_server(("127.0.0.1", 0))
        app = Starlette(
            routes=[
                WebSocketRoute("/{path:path}", self._converse),
                Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
            ]
        )
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws_max_size=2**20))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve(sockets=[self._socket])))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    async def _answer(self, request: Request) -> Response:
        what = f"{request.method} {request.url.path}"
        answers = self.script.get(what, [error(404, "not-found", f"not scripted: {what}")])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        client = tuple(request.client or ())
        seen = Seen(request.method, request.url.path, dict(request.query_params), dict(request.headers), b"", client)
        self.seen.append(seen)
        if not isinstance(answer, Response):
            return await answer(request)
        seen.body = await request.body()
        return answer

    async def _converse(self, websocket: WebSocket) -> None:
        self.attached.append({**websocket.query_params, "path": websocket.url.path, **dict(websocket.headers)})
        conversation = self.attach.pop(0) if self.attach else error(404, "not-found", "not scripted")
        if isinstance(conversation, Response):
            await websocket.send_denial_response(conversation)
        else:
            await websocket.accept(subprotocol="space.command.v1")
            await conversation(websocket)


def error(
    status: int, code: str, message: str = "No.", headers: dict[str, str] | None = None, **details: Any
) -> Response:
    described = {"code": code, "message": message, "details": details, "request_id": "req1"}
    return JSONResponse({"error": described}, status_code=status, headers=headers)


def sandbox(**fields: Any) -> dict[str, Any]:
    """A sandbox as the api describes one."""
    return {
        "id": "sbxaaaaaaaaaaaaaaaa",
        "name": None,
        "template": "base",
        "template_digest": "sha256:00",
        "driver": "gvisor",
        "state": "running",
        "ready": True,
        "resources": {"cpus": 1.0, "memory_mib": 1024, "disk_mib": 4096, "pids": 1024},
        "metadata": {},
        "timeout_s": None,
        "on_timeout": "delete",
        "deadline_at": None,
        "idle_timeout_s": None,
        "on_idle": "suspend",
        "wake_on_request": False,
        "forked_from": None,
        "failure": None,
        "operation_id": "opaaaaaaaaaaaaaaaa",
        "created_at": "2026-01-02T03:04:05Z",
        **fields,
    }


def operation(state: str = "succeeded", **fields: Any) -> dict[str, Any]:
    return {
        "id": "opaaaaaaaaaaaaaaaa",
        "sandbox_id": "sbxaaaaaaaaaaaaaaaa",
        "kind": "create",
        "state": state,
        "error": None,
        "timings": {"boot": 0.1},
        "created_at": "2026-01-02T03:04:05Z",
        "started_at": None,
        "finished_at": None,
        **fields,
    }


def snapshot(**fields: Any) -> dict[str, Any]:
    """A snapshot as the api describes one."""
    return {
        "id": "snpaaaaaaaaaaaaaaaa",
        "name": None,
        "kind": "full",
        "state": "ready",
        "sandbox_id": "sbxaaaaaaaaaaaaaaaa",
        "template": "base",
        "template_digest": "sha256:00",
        "driver": "gvisor",
        "resources": {"cpus": 1.0, "memory_mib": 1024, "disk_mib": 4096, "pids": 1024},
        "bytes": 12 * 1024 * 1024,
        "failure": None,
        "operation_id": "opaaaaaaaaaaaaaaaa",
        "created_at": "2026-01-02T03:04:05Z",
        **fields,
    }

"""A control plane in this process, over a fresh store and a scripted node, for tests of control and api."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from space.api.app import build_app
from space.control import projects
from space.control.builder import Builder
from space.control.control import Control
from space.control.nodes import Node
from space.control.reaper import Reaper
from space.control.runner import Runner
from space.control.tokens import Signer
from space.settings import Settings
from space.store.database import Database
from tests.scripted_node import ScriptedNode

DEADLINE_S = 20


@dataclass
class Clock:
    """The time that the control plane sees: real, and moved forward by a test."""

    ahead: timedelta = field(default_factory=timedelta)

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def move(self, seconds: float) -> None:
        self.ahead += timedelta(seconds=seconds)


@dataclass
class Host:
    """One api process's worth of parts. ``http`` speaks as the admin of the default project."""

    settings: Settings
    control: Control
    node: ScriptedNode
    clock: Clock
    key: str
    project_id: str
    http: httpx.AsyncClient
    app: Any

    async def create(self, **fields: Any) -> str:
        answer = await self.http.post(
            "/v1/sandboxes", json={"template": "base", **fields}, headers={"Prefer": "wait=20"}
        )
        assert answer.status_code == httpx.codes.CREATED, answer.text
        return str(answer.json()["sandbox"]["id"])

    async def verb(self, sandbox: str, verb: str, **headers: str) -> httpx.Response:
        return await self.http.post(f"/v1/sandboxes/{sandbox}/{verb}", headers={"Prefer": "wait=20", **headers})

    async def snapshot(self, sandbox: str, **fields: Any) -> str:
        path = f"/v1/sandboxes/{sandbox}/snapshots"
        answer = await self.http.post(path, json=fields, headers={"Prefer": "wait=20"})
        assert answer.status_code == httpx.codes.CREATED, answer.text
        return str(answer.json()["snapshot"]["id"])

    async def fork(self, sandbox: str, **fields: Any) -> list[dict[str, Any]]:
        path = f"/v1/sandboxes/{sandbox}/fork"
        answer = await self.http.post(path, json=fields, headers={"Prefer": "wait=20"})
        assert answer.status_code == httpx.codes.CREATED, answer.text
        return answer.json()["sandboxes"]

    async def upload(self, data: bytes = b"context") -> str:
        """Upload something whole, and return its id."""
        made = await self.http.post("/v1/uploads", json={"size": len(data)})
        assert made.status_code == httpx.codes.CREATED, made.text
        sent = await self.http.put(f"/v1/uploads/{made.json()['id']}", params={"offset": 0}, content=data)
        assert sent.is_success, sent.text
        return str(made.json()["id"])

    async def build(self, name: str = "tool", **fields: Any) -> str:
        """Begin a build that the node has been told of, and return its id."""
        body = {"name": name, "source": {"kind": "template", "template": "base"}, **fields}
        made = await self.http.post("/v1/templates/builds", json=body)
        assert made.status_code == httpx.codes.ACCEPTED, made.text
        build_id = str(made.json()["id"])

        async def told() -> bool:
            return build_id in self.node.builds.specs

        await until(told, "the node to be told of the build")
        return build_id

    async def release(self, name: str = "tool", content: str = "content", **fields: Any) -> str:
        """Have a template built that has that content, and return its digest."""
        build_id = await self.build(name, **fields)
        digest = self.node.builds.succeed(build_id, content)
        ended = await self.built(build_id)
        assert ended["state"] == "succeeded", ended
        return digest

    async def built(self, build_id: str) -> dict[str, Any]:
        """Return a build once it has ended."""
        return (await self.http.get(f"/v1/builds/{build_id}", params={"wait_s": 20})).json()

    async def operation(self, operation_id: str) -> dict[str, Any]:
        """Return an operation once it has ended."""
        return (await self.http.get(f"/v1/operations/{operation_id}", params={"wait_s": 20})).json()

    async def state(self, sandbox: str) -> str:
        answer = await self.http.get(f"/v1/sandboxes/{sandbox}")
        return str(answer.json()["state"]) if answer.is_success else "not-found"

    async def other(self, name: str = "other") -> httpx.AsyncClient:
        """Return a client of another project."""
        made = await self.http.post("/v1/projects", json={"name": name})
        assert made.status_code == httpx.codes.CREATED, made.text
        return self.client(made.json()["key"])

    def client(self, key: str | None) -> httpx.AsyncClient:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers, timeout=DEADLINE_S)


@asynccontextmanager
async def control_over(settings: Settings, clock: Callable[[], datetime]) -> AsyncGenerator[Control]:
    """Open a control plane on the store that the settings name; several may be open on one store."""
    store, node = Database(settings.store), Node(settings.node_socket)
    try:
        await store.migrate()
        control = Control(settings, store, node, Signer(Ed25519PrivateKey.generate()), clock)
        yield control
        control.outbound.close()
        control.token_servers.close()
        await control.gateway.close()
    finally:
        await node.close()
        await store.close()


@asynccontextmanager
async def working(control: Control, *, reaper: bool = False) -> AsyncGenerator[None]:
    """Let the control plane's runner work and its builds be followed, and its reaper when asked for."""
    # No TaskGroup: a fixture is entered and left in different tasks.
    tasks = [asyncio.create_task(Runner(control).run()), asyncio.create_task(Builder(control).run())]
    if reaper:
        tasks.append(asyncio.create_task(Reaper(control).run()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended


def settings_in(directory: Path, **fields: Any) -> Settings:
    (directory / "data" / "api").mkdir(parents=True, exist_ok=True)
    return Settings(data_dir=directory / "data", run_dir=directory / "run", **fields)


@asynccontextmanager
async def hosting(directory: Path, *, runner: bool = True, reaper: bool = False, **fields: Any) -> AsyncGenerator[Host]:
    settings, node, clock = settings_in(directory, **fields), ScriptedNode(), Clock()
    node.now = lambda: clock().timestamp()
    async with node.listening(settings.node_socket), control_over(settings, clock) as control:
        key = await projects.bootstrap(control, lambda _: None)
        assert key is not None
        project_id = (await control.keyring.authenticate(key)).project_id
        app = build_app(control)
        host = Host(settings, control, node, clock, key, project_id, httpx.AsyncClient(), app)
        await host.http.aclose()
        host.http = host.client(key)
        if not runner:
            yield host
        else:
            async with working(control, reaper=reaper):
                yield host
        await host.http.aclose()


async def until(condition: Callable[[], Awaitable[object]], what: str = "the condition") -> None:
    """Wait for a condition, looking again and again; a deadline makes a hang a failure."""
    ends = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < ends, f"{what} did not hold within {DEADLINE_S} s"
        await asyncio.sleep(0.01)


def code(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "kind", "details", "request_id"}, error
    assert answer.headers["x-request-id"] == error["request_id"]
    return str(error["code"])

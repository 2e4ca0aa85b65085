"""A small node on a real Unix socket: it keeps a state for each machine and does what a test has told it to.

It answers as docs/architecture.md says a node does, and knows nothing of guests. A test can hold a call, let one fail, or
end a machine behind everybody's back.
"""

import asyncio
import base64
import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.scripted_builds import ScriptedBuilds

TEMPLATE = {
    "name": "base",
    "tag": "latest",
    "digest": "sha256:" + "ab" * 32,
    "defaults": {"env": {}, "workdir": "/home/user", "user": "user"},
    "driver": "gvisor",
    "bytes": 1000,
}
TARGETS = {
    "pause": "paused",
    "resume": "running",
    "suspend": "suspended",
    "wake": "running",
    "stop": "stopped",
    "start": "running",
}
SOURCES = {
    "pause": {"running", "paused"},
    "resume": {"paused", "running"},
    "suspend": {"running", "paused", "suspended"},
    "wake": {"suspended", "running"},
    "stop": {"running", "paused", "stopped", "exited"},
    "start": {"stopped", "exited", "running"},
}


@dataclass
class ScriptedNode:
    """``machines`` maps ids to states. ``calls`` has every lifecycle call in order, as ``(verb, id)``."""

    machines: dict[str, str] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    booted: Counter[str] = field(default_factory=Counter)
    wanted: dict[str, dict[str, Any]] = field(default_factory=dict)
    templates: list[dict[str, Any]] = field(default_factory=lambda: [TEMPLATE])
    drivers: tuple[str, ...] = ("gvisor", "qemu")
    builds: ScriptedBuilds = field(init=False)
    failures: dict[str, list[web.Response | None]] = field(default_factory=dict)
    holds: dict[str, asyncio.Event] = field(default_factory=dict)
    ready: bool = True
    commands: dict[str, dict[str, Any]] = field(default_factory=dict)
    passed: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    token_key: bytes | None = None
    uploaded: int = 0
    gone_clients: int = 0
    in_flight: Counter[str] = field(default_factory=Counter)
    overlaps: list[str] = field(default_factory=list)
    snapshots: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What is kept of each snapshot: its machine, kind, bytes, and the commands that ran."""
    dropped: list[str] = field(default_factory=list)
    volumes: dict[str, int] = field(default_factory=dict)
    """How many MiB each volume has."""
    volume_failures: list[web.Response | None] = field(default_factory=list)
    """What the next calls about volumes end with; None: well."""
    snapshot_bytes: int = 5 * 1024 * 1024
    active_at: dict[str, float] = field(default_factory=dict)
    """When a machine was active last; absent: long ago."""
    busy: Counter[str] = field(default_factory=Counter)
    """How many commands run in a machine."""
    asked_for_activity: int = 0
    strays: list[dict[str, Any]] = field(default_factory=list)
    spares: set[str] = field(default_factory=set)
    """Which machines are the node's own."""
    now: Callable[[], float] = time.time
    _listeners: set[asyncio.Queue[dict[str, Any]]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.builds = ScriptedBuilds(lambda: self.templates)

    # --- what a test tells it

    def fail(self, verb: str, code: str, status: int, times: int = 1) -> None:
        """Let the next calls of a verb fail before they do anything."""
        self.failures.setdefault(verb, []).extend(error(status, code) for _ in range(times))

    def hold(self, verb: str) -> asyncio.Event:
        """Let calls of a verb wait until the returned event is set."""
        return self.holds.setdefault(verb, asyncio.Event())

    def end(self, machine: str, cause: str | None = None) -> None:
        """End a machine and tell the listeners."""
        self.machines[machine] = "exited"
        if cause is not None:
            self.causes[machine] = cause
        self.tell({"machine": machine, "event": "exited", "cause": cause})

    def tell(self, event: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener.put_nowait(event)

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    # --- lifecycle

    async def boot(self, request: web.Request) -> web.Response:
        return await self._lifecycle(request, "boot")

    async def act(self, request: web.Request) -> web.Response:
        return await self._lifecycle(request, request.match_info["verb"])

    async def destroy(self, request: web.Request) -> web.Response:
        return await self._lifecycle(request, "destroy")

    async def _lifecycle(self, request: web.Request, verb: str) -> web.Response:
        machine = request.match_info["machine"]
        self.calls.append((verb, machine))
        raw = await request.read()
        self.in_flight[machine] += 1
        if self.in_flight[machine] > 1:
            self.overlaps.append(f"{verb} {machine}")
        try:
            if (hold := self.holds.get(verb)) is not None:
                await hold.wait()
            if scripted := self.failures.get(verb):
                failure = scripted.pop(0)
                if failure is not None:
                    return failure
            wanted = json.loads(raw) if raw else {}
            if verb == "snapshot":
                return self._kept(machine, request.match_info["snapshot"], wanted["kind"])
            return self._done(verb, machine, wanted)
        finally:
            self.in_flight[machine] -= 1

    def _done(self, verb: str, machine: str, wanted: dict[str, Any]) -> web.Response:
        state = self.machines.get(machine, "absent")
        if (idle_s := wanted.get("if_idle_s")) is not None and not self._is_idle(machine, idle_s):
            return error(409, "not-idle")
        if verb == "destroy":
            self.machines.pop(machine, None)
            return web.json_response({"timings": {"destroy": 0.001}, "ready": False})
        if verb == "boot":
            return self._booted(machine, state, wanted)
        if state not in SOURCES[verb]:
            return error(409, "wrong-state", state=state)
        self.machines[machine] = TARGETS[verb]
        running = TARGETS[verb] == "running"
        return web.json_response({"timings": {verb: 0.001}, "ready": running and self.ready})

    def _booted(self, machine: str, state: str, wanted: dict[str, Any]) -> web.Response:
        snapshot = wanted.get("snapshot")
        if state == "absent":
            if snapshot is not None and snapshot not in self.snapshots:
                return error(404, "not-found")
            self.booted[machine] += 1
            self.wanted[machine] = wanted
            self.machines[machine] = "running"
        driver = self.wanted[machine].get("driver") or self.drivers[0]
        answer: dict[str, Any] = {"timings": {"boot": 0.002}, "ready": self.ready, "driver": driver}
        if snapshot is not None:
            answer["commands"] = [self._inherited(machine, earlier) for earlier in self.snapshots[snapshot]["commands"]]
        return web.json_response(answer)

    def _inherited(self, machine: str, earlier: dict[str, Any]) -> dict[str, Any]:
        """A command of the snapshot goes on under an id of its own, the same one whenever it is asked."""
        digest = hashlib.sha256(f"{machine} {earlier['id']}".encode()).digest()
        command_id = "cmd" + base64.b32encode(digest).decode().lower()[:16]
        shown = {**earlier, "id": command_id, "sandbox_id": machine, "forked_from": earlier["id"]}
        return self.commands.setdefault(command_id, shown)

    def _is_idle(self, machine: str, seconds: float) -> bool:
        return not self.busy[machine] and self.now() - self.active_at.get(machine, 0) >= seconds

    # --- snapshots

    async def snapshot(self, request: web.Request) -> web.Response:
        return await self._lifecycle(request, "snapshot")

    def _kept(self, machine: str, snapshot: str, kind: str) -> web.Response:
        state = self.machines.get(machine, "absent")
        if state not in {"running", "paused", "suspended"} and (kind, state) != ("disk", "stopped"):
            return error(409, "wrong-state", state=state)
        running = [c for c in self.commands.values() if c["sandbox_id"] == machine and c["state"] == "running"]
        kept = {"machine": machine, "kind": kind, "bytes": self.snapshot_bytes, "commands": running}
        self.snapshots.setdefault(snapshot, kept)
        names = [command["id"] for command in running]
        answer = {"timings": {"checkpoint": 0.003}, "bytes": self.snapshot_bytes, "commands": names}
        return web.json_response(answer)

    async def list_snapshots(self, _request: web.Request) -> web.Response:
        listed = [{"snapshot": name, "kind": kept["kind"]} for name, kept in self.snapshots.items()]
        return web.json_response({"snapshots": listed})

    async def drop_snapshot(self, request: web.Request) -> web.Response:
        if scripted := self.failures.get("drop-snapshot"):
            failure = scripted.pop(0)
            if failure is not None:
                return failure
        snapshot = request.match_info["snapshot"]
        self.dropped.append(snapshot)
        self.snapshots.pop(snapshot, None)
        return web.json_response({})

    async def list_volumes(self, _request: web.Request) -> web.Response:
        return web.json_response({"volumes": [{"volume": name} for name in self.volumes]})

    async def make_volume(self, request: web.Request) -> web.Response:
        if self.volume_failures and (failure := self.volume_failures.pop(0)) is not None:
            return failure
        self.volumes.setdefault(request.match_info["volume"], (await request.json())["size_mib"])
        return web.json_response({})

    async def drop_volume(self, request: web.Request) -> web.Response:
        if self.volume_failures and (failure := self.volume_failures.pop(0)) is not None:
            return failure
        self.volumes.pop(request.match_info["volume"], None)
        return web.json_response({})

    async def activity(self, _request: web.Request) -> web.Response:
        self.asked_for_activity += 1
        seen = {
            machine: {
                "state": state,
                "ready": state == "running" and self.ready,
                "commands": self.busy[machine],
                "clients": 0,
                "active_at": self.active_at.get(machine, 0.0),
            }
            for machine, state in self.machines.items()
        }
        return web.json_response({"machines": seen})

    async def pool(self, _request: web.Request) -> web.Response:
        return web.json_response({"memory_mib": 0, "memory_max_mib": 512, "shapes": []})

    async def gc(self, request: web.Request) -> web.Response:
        dry_run = (await request.json())["dry_run"]
        return web.json_response({"strays": [{**stray, "removed": not dry_run} for stray in self.strays]})

    # --- what there is

    async def inspect(self, request: web.Request) -> web.Response:
        return web.json_response(self._seen(request.match_info["machine"]))

    async def list_machines(self, request: web.Request) -> web.Response:
        return web.json_response({"machines": [self._seen(machine) for machine in self.machines]})

    def _seen(self, machine: str) -> dict[str, Any]:
        state = self.machines.get(machine, "absent")
        usage = {"cpu_s": 1.5, "memory_mib": 40, "memory_peak_mib": 50, "pids": 3, "disk_mib": 10}
        return {
            "machine": machine,
            "state": state,
            "spare": machine in self.spares,
            "cause": self.causes.get(machine),
            "ready": state == "running" and self.ready,
            "usage": usage if state in {"running", "paused"} else None,
        }

    async def list_templates(self, request: web.Request) -> web.Response:
        return web.json_response({"templates": self.templates})

    async def list_drivers(self, request: web.Request) -> web.Response:
        shown = [{"name": name, "usable": True, "reason": "", "volumes": name == "gvisor"} for name in self.drivers]
        return web.json_response({"default": self.drivers[0], "drivers": shown})

    async def set_token_key(self, request: web.Request) -> web.Response:
        self.token_key = await request.read()
        return web.Response(status=204)

    async def events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            listed = [self._seen(machine) for machine in self.machines]
            await response.write(json.dumps({"machines": listed}).encode() + b"\n")
            while True:
                await response.write(json.dumps(await queue.get()).encode() + b"\n")
        finally:
            self._listeners.discard(queue)

    # --- data plane

    async def exec(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.passed.append((request.path_qs, dict(request.headers), body))
        if (refused := self._asleep(request)) is not None:
            return refused
        if (hold := self.holds.get("exec")) is not None:
            try:
                await hold.wait()
            except asyncio.CancelledError:
                self.gone_clients += 1
                raise
        if scripted := self.failures.get("exec"):
            failure = scripted.pop(0)
            if failure is not None:
                return failure
        answer = {"exit": {"kind": "exited", "code": 0, "signal": None}, "stdout": "hello\n", "stderr": ""}
        return web.json_response(answer)

    def _asleep(self, request: web.Request) -> web.Response | None:
        """Refuse what needs a machine that runs, where it is known not to."""
        state = self.machines.get(request.match_info["sandbox"], "running")
        return None if state == "running" else error(409, "wrong-state", state=state)

    async def read_file(self, request: web.Request) -> web.StreamResponse:
        self.passed.append((request.path_qs, dict(request.headers), b""))
        if (refused := self._asleep(request)) is not None:
            return refused
        size = int(request.query.get("size", "5"))
        response = web.StreamResponse(headers={"Content-Length": str(size), "Content-Type": "text/html"})
        await response.prepare(request)
        chunk = bytes(range(256)) * 1024
        try:
            while size > 0:
                await response.write(chunk[: min(size, len(chunk))])
                size -= len(chunk)
        except (ConnectionError, asyncio.CancelledError):
            self.gone_clients += 1
            raise
        return response

    async def write_file(self, request: web.Request) -> web.Response:
        if scripted := self.failures.get("write"):
            failure = scripted.pop(0)
            if failure is not None:
                return failure
        self.passed.append((request.path_qs, dict(request.headers), b""))
        async for chunk in request.content.iter_any():
            self.uploaded += len(chunk)
        return web.Response(status=204)

    async def create_command(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        if (refused := self._asleep(request)) is not None:
            return refused
        if not body.get("argv"):
            return error(422, "invalid-request", field="argv")
        command_id = request.headers["X-Space-Command"]
        shown = self.commands.setdefault(
            command_id,
            {"id": command_id, "sandbox_id": request.match_info["sandbox"], "state": "created", "exit": None, **body},
        )
        return web.json_response({"command": shown}, status=201)

    async def list_commands(self, request: web.Request) -> web.Response:
        mine = [c for c in self.commands.values() if c["sandbox_id"] == request.match_info["sandbox"]]
        return web.json_response({"items": mine})

    async def show_command(self, request: web.Request) -> web.Response:
        shown = self.commands.get(request.match_info["command"])
        return error(404, "command-not-found") if shown is None else web.json_response(shown)

    async def signal(self, request: web.Request) -> web.Response:
        self.passed.append((request.path_qs, dict(request.headers), await request.read()))
        return web.Response(status=204)

    @asynccontextmanager
    async def listening(self, socket: Path) -> AsyncGenerator["ScriptedNode"]:
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.get("/machines", self.list_machines),
                web.get("/machines/events", self.events),
                web.get("/machines/activity", self.activity),
                web.get("/machines/{machine}", self.inspect),
                web.post("/machines/{machine}/snapshots/{snapshot}", self.snapshot),
                web.get("/snapshots", self.list_snapshots),
                web.delete("/snapshots/{snapshot}", self.drop_snapshot),
                web.get("/volumes", self.list_volumes),
                web.put("/volumes/{volume}", self.make_volume),
                web.delete("/volumes/{volume}", self.drop_volume),
                web.get("/pool", self.pool),
                web.post("/gc", self.gc),
                web.put("/machines/{machine}", self.boot),
                web.delete("/machines/{machine}", self.destroy),
                web.post("/machines/{machine}/{verb}", self.act),
                web.get("/templates", self.list_templates),
                web.get("/drivers", self.list_drivers),
                *self.builds.routes(),
                web.put("/token-key", self.set_token_key),
                web.post("/v1/sandboxes/{sandbox}/exec", self.exec),
                web.post("/v1/sandboxes/{sandbox}/commands", self.create_command),
                web.get("/v1/sandboxes/{sandbox}/commands", self.list_commands),
                web.get("/v1/sandboxes/{sandbox}/files", self.read_file),
                web.put("/v1/sandboxes/{sandbox}/files", self.write_file),
                web.get("/v1/commands/{command}", self.show_command),
                web.post("/v1/commands/{command}/signal", self.signal),
            ]
        )
        # A handler is cancelled when its client goes away, so that a test sees that it did.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await asyncio.to_thread(socket.parent.mkdir, parents=True, exist_ok=True)
        await web.UnixSite(runner, str(socket)).start()
        try:
            yield self
        finally:
            await runner.cleanup()


def error(status: int, code: str, **details: Any) -> web.Response:
    return web.json_response(
        {"error": {"code": code, "message": f"As scripted: {code}.", "details": details, "request_id": "req"}},
        status=status,
    )

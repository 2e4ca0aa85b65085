"""The half of a scripted node that builds templates: it does nothing until a test says what has become of a build."""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

DEFAULTS = {"env": {"BUILT": "yes"}, "workdir": "/work", "user": "root"}


@dataclass
class ScriptedBuilds:
    """``specs`` has what the node was told of each build, ``shown`` how far it is, ``uploads`` what has come."""

    templates: Callable[[], list[dict[str, Any]]]
    specs: dict[str, dict[str, Any]] = field(default_factory=dict)
    shown: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    uploads: dict[str, bytearray] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    forgotten: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    dropped_uploads: list[str] = field(default_factory=list)
    warmed: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    cache: list[dict[str, Any]] = field(default_factory=list)
    cache_asked: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, list[web.Response]] = field(default_factory=dict)
    """What the next calls of a kind are answered before anything is done."""
    holds: dict[str, asyncio.Event] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    # --- what a test tells it

    def say(self, build: str, text: str, stream: str = "stdout") -> None:
        """Add a line to a build's log."""
        log = self.logs.setdefault(build, [])
        log.append({"n": len(log), "at": time.time(), "stream": stream, "text": text})
        self._tell()

    def progress(self, build: str, step: int, steps: int) -> None:
        self.shown[build] |= {"state": "running", "step": step, "steps": steps}

    def succeed(self, build: str, content: str = "content", **more: Any) -> str:
        """Let a build have made a template of that content; return its digest."""
        digest = "sha256:" + hashlib.sha256(content.encode()).hexdigest()
        if not any(one["digest"] == digest for one in self.templates()):
            self.templates().append({"digest": digest, "bytes": 2000})
        told = {"digest": digest, "bytes": 2000, "defaults": DEFAULTS, "packages": [{"name": "p", "version": "1"}]}
        self._end(build, {"state": "succeeded", **told, "timings": {"steps": 0.5}, **more})
        return digest

    def fail(self, build: str, code: str = "step-failed", **details: Any) -> None:
        error = {"code": code, "message": f"As scripted: {code}.", "kind": "SandboxError", "details": details}
        self._end(build, {"state": "failed", "error": error})

    def lose(self) -> None:
        """Forget everything, as a node does whose disk was lost."""
        self.specs.clear()
        self.shown.clear()

    def _end(self, build: str, shown: dict[str, Any]) -> None:
        self.shown[build] |= shown
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- builds

    async def begin(self, request: web.Request) -> web.Response:
        if (answer := await self._scripted("begin")) is not None:
            return answer
        build = request.match_info["build"]
        self.specs.setdefault(build, json.loads(await request.read()))
        self.shown.setdefault(build, {"id": build, "state": "pending", "step": 0, "steps": 0, "timings": {}})
        self.logs.setdefault(build, [])
        return web.json_response(self.shown[build], status=202)

    async def show(self, request: web.Request) -> web.Response:
        if (answer := await self._scripted("show")) is not None:
            return answer
        shown = self.shown.get(request.match_info["build"])
        return _missing("build") if shown is None else web.json_response(shown)

    async def log(self, request: web.Request) -> web.StreamResponse:
        if (answer := await self._scripted("log")) is not None:
            return answer
        build, start = request.match_info["build"], int(request.query["from"])
        if build not in self.shown:
            return _missing("build")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        while True:
            changed, ended = self._changed, self.shown[build]["state"] not in {"pending", "running"}
            for line in self.logs[build][start:]:
                await response.write(json.dumps(line).encode() + b"\n")
                start = line["n"] + 1
            if ended or request.query.get("follow") != "true":
                return response
            await changed.wait()

    async def cancel(self, request: web.Request) -> web.Response:
        if (answer := await self._scripted("cancel")) is not None:
            return answer
        shown = self.shown.get(request.match_info["build"])
        if shown is None:
            return _missing("build")
        if shown["state"] in {"pending", "running"}:
            self._end(request.match_info["build"], {"state": "cancelled"})
        return web.json_response(shown)

    async def forget(self, request: web.Request) -> web.Response:
        if (answer := await self._scripted("forget")) is not None:
            return answer
        build = request.match_info["build"]
        self.forgotten.append(build)
        self.shown.pop(build, None)
        return web.json_response({})

    # --- uploads

    async def append(self, request: web.Request) -> web.Response:
        upload, offset = request.match_info["upload"], int(request.query["offset"])
        kept = self.uploads.setdefault(upload, bytearray())
        if offset != len(kept):
            return refusal(409, "wrong-offset", "Conflict", offset=len(kept))
        async for chunk in request.content.iter_any():
            kept += chunk
        return web.json_response({"bytes": len(kept)})

    async def show_upload(self, request: web.Request) -> web.Response:
        kept = self.uploads.get(request.match_info["upload"])
        return _missing("upload") if kept is None else web.json_response({"bytes": len(kept)})

    async def drop_upload(self, request: web.Request) -> web.Response:
        if (answer := await self._scripted("drop-upload")) is not None:
            return answer
        self.dropped_uploads.append(request.match_info["upload"])
        self.uploads.pop(request.match_info["upload"], None)
        return web.json_response({})

    # --- templates

    async def drop_template(self, request: web.Request) -> web.Response:
        if (answer := await self._scripted("drop-template")) is not None:
            return answer
        digest = request.match_info["digest"]
        self.dropped.append(digest)
        self.templates()[:] = [one for one in self.templates() if one["digest"] != digest or "name" in one]
        return web.json_response({})

    async def warm(self, request: web.Request) -> web.Response:
        self.warmed.append((request.match_info["digest"], await request.json()))
        return web.json_response({"timings": {"warm": 0.25}})

    async def collect_cache(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.cache_asked.append(asked)
        removed = list(self.cache)
        if not asked["dry_run"]:
            self.cache.clear()
        return web.json_response({"removed": removed, "bytes": sum(one["bytes"] for one in removed)})

    def routes(self) -> list[web.RouteDef]:
        return [
            web.put("/builds/{build}", self.begin),
            web.get("/builds/{build}", self.show),
            web.get("/builds/{build}/log", self.log),
            web.post("/builds/{build}/cancel", self.cancel),
            web.delete("/builds/{build}", self.forget),
            web.put("/uploads/{upload}", self.append),
            web.get("/uploads/{upload}", self.show_upload),
            web.delete("/uploads/{upload}", self.drop_upload),
            web.delete("/templates/{digest}", self.drop_template),
            web.post("/templates/{digest}/warm", self.warm),
            web.post("/build-cache/gc", self.collect_cache),
        ]

    async def _scripted(self, call: str) -> web.Response | None:
        self.calls[call] += 1
        if (hold := self.holds.get(call)) is not None:
            await hold.wait()
        scripted = self.failures.get(call)
        return scripted.pop(0) if scripted else None


def _missing(what: str) -> web.Response:
    return refusal(404, f"{what}-not-found", "NotFound")


def refusal(status: int, code: str, kind: str, **details: Any) -> web.Response:
    """Return an answer that refuses, as a node gives it."""
    described = {"code": code, "message": f"As scripted: {code}.", "kind": kind, "details": details}
    return web.json_response({"error": described}, status=status)

"""All builds of this node: begun, queued, carried out, cancelled, found again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from space import error_wire
from space.errors import (
    Conflict,
    HostError,
    HostFull,
    LimitExceeded,
    NotFound,
    RequestError,
    SandboxError,
    SpaceError,
    Unavailable,
)
from space.model.build import BUILDER, TIMEOUT_S_DEFAULT, TIMEOUT_S_MAX
from space.node.adoption import rows
from space.node.broker import BrokerClient
from space.node.builds import log as logs
from space.node.builds.build import Build, Progress
from space.node.builds.builder import AGENT, Builder
from space.node.builds.cache import BuildCache
from space.node.builds.log import BuildLog, read_closed
from space.node.builds.planning import Planning
from space.node.builds.pull import Pull
from space.node.builds.reading import Reading
from space.node.builds.records import CANCELLED, FAILED, RUNNING, SUCCEEDED, BuildRecord, BuildRecords
from space.node.builds.room import free_bytes
from space.node.builds.spec import BuildSpec
from space.node.builds.uploads import Uploads
from space.node.commands import Commands
from space.node.machines import Machines
from space.node.tasks import Tasks
from space.settings import Settings

log = structlog.get_logger(__name__)

MIB = 1024 * 1024
WAITING_MAX = 256
"""Builds that may wait for their turn."""
KEPT_MAX = 600
"""Builds whose records are kept; beyond that those that ended longest ago are forgotten."""
ASK_S = 30.0
PUBLISH_S = 1830.0
DROP_S = 120.0
CANCEL_S = 30.0
CLEAN_PAUSE_S = 5.0
DEFAULTS_BYTES_MAX = 30 * 1024
SCRATCH = "scratch"


def check_defaults(defaults: dict[str, Any] | None) -> None:
    """Raise ``RequestError`` for defaults that the broker would not take, whoever they come from."""
    try:
        size = len(json.dumps(defaults, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            "A label, variable or path of the template is no text that can be kept (it has half a character).",
            code="defaults-not-text",
        ) from error
    if size > DEFAULTS_BYTES_MAX:
        raise RequestError(
            f"The template's environment, labels and other defaults have {size} bytes; {DEFAULTS_BYTES_MAX} may be.",
            code="defaults-too-large",
            bytes=size,
            limit=DEFAULTS_BYTES_MAX,
        )


@dataclass(slots=True)
class _Open:
    """A build that has not ended."""

    spec: BuildSpec
    record: BuildRecord
    log: BuildLog
    done: asyncio.Event
    task: asyncio.Task[Any] | None = None
    cancelled: bool = False
    ending: bool = False
    """Whether all that is left to do is to clear away."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What builds need of the node."""

    broker: BrokerClient
    machines: Machines
    commands: Commands
    tasks: Tasks


class Builds:
    """Begin with ``recover``; ``agent`` is what a builder's guest runs to unpack layers."""

    def __init__(self, parts: Parts, settings: Settings, agent: Sequence[str] = AGENT) -> None:
        directory = settings.node_dir / "builds"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._parts = parts
        self._settings = settings
        self._agent = agent
        self._work = directory / "work"
        self._files = BuildRecords(directory / "records")
        self._records = {record.id: record for record in self._files.load()}
        self._open: dict[str, _Open] = {}
        self._slots = asyncio.Semaphore(settings.builds_max)
        self._recovered = False
        self.cache = BuildCache(directory, parts.machines.snapshots)
        self.uploads = Uploads(directory / "uploads", settings.upload_mib_max * MIB)
        parts.machines.builders.update(record.machine for record in self._records.values() if record.machine)

    # --- for the api

    def begin(self, build: str, spec: BuildSpec) -> dict[str, Any]:
        """Begin a build, or return the one that was begun with the same spec."""
        if not self._recovered:
            raise Unavailable("The node is still looking for its builds.", code="not-ready")
        known = self._records.get(build)
        if known is not None:
            if known.fingerprint != spec.fingerprint:
                raise Conflict("That id belongs to another build.", code="build-exists")
            return known.told()
        if len(self._open) >= WAITING_MAX:
            raise LimitExceeded(f"{WAITING_MAX} builds are waiting.", code="too-many-builds", limit=WAITING_MAX)
        home = self._work / build
        home.mkdir(mode=0o700, parents=True)
        record = BuildRecord(build, spec.fingerprint, created_at=time.time())
        try:
            for upload in spec.uploads:
                self.uploads.lend(upload, home / upload)
            self._files.save(record)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
        opened = _Open(spec, record, self._new_log(build), asyncio.Event())
        self._records[build], self._open[build] = record, opened
        self._forget_oldest()
        opened.task = self._parts.tasks.spawn(self._carry_out(opened), f"build {build}")
        return record.told()

    def list(self) -> list[dict[str, Any]]:
        """Return all builds, the newest first, without what was found in them."""
        newest = sorted(self._records.values(), key=lambda record: record.created_at, reverse=True)
        return [record.told() for record in newest]

    def show(self, build: str) -> dict[str, Any]:
        """Return a build with its lineage and packages, where it has succeeded."""
        record = self._known(build)
        return {**record.told(), **(self._files.findings(build) if record.state == SUCCEEDED else {})}

    async def log(self, build: str, start: int, *, follow: bool) -> AsyncGenerator[bytes]:
        """Yield the lines of a build's log from number ``start`` on, with ``follow`` until it has ended."""
        self._known(build)
        opened = self._open.get(build)
        path = self._files.log_path(build)
        if opened is None and not path.exists():
            return
        lines = opened.log.read(start, follow=follow) if opened is not None else read_closed(path, start)
        async with contextlib.aclosing(lines):
            async for data in lines:
                yield data

    async def cancel(self, build: str) -> dict[str, Any]:
        """Cancel a build and wait, a while, until nothing is left of it; one that is being published goes on."""
        record, opened = self._known(build), self._open.get(build)
        if opened is not None:
            ending = record.publishing or opened.ending or opened.cancelled
            if not ending and opened.task is not None:
                opened.cancelled = True
                opened.task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await opened.done.wait()
        return record.told()

    async def remove(self, build: str) -> None:
        """Forget a build; one that goes on is cancelled first, and an unknown one is forgotten already."""
        if build in self._open:
            await self.cancel(build)
        if build in self._open:
            raise Conflict("The build is just coming to its end.", code="build-running")
        self._forget(build)

    def _forget(self, build: str) -> None:
        if self._records.pop(build, None) is not None:
            self._files.remove(build)

    async def drop_template(self, digest: str) -> None:
        """Leave nothing of a template, its cached steps included."""
        await self.cache.forget_template(digest)
        await self._parts.broker.call("drop-template", timeout_s=DROP_S, template=digest)

    # --- over time

    async def recover(self) -> None:
        """Clear away what a former node has left: its builds have failed, but for one that was being published."""
        await asyncio.to_thread(shutil.rmtree, self._work, ignore_errors=True)
        self._work.mkdir(mode=0o700)
        for record in [one for one in self._records.values() if not one.ended]:
            try:
                if record.publishing and record.machine is not None:
                    await self._publish(record)
                else:
                    raise HostError("The node was restarted while it built.", code="build-interrupted")
            except SpaceError as error:
                self._end(record, FAILED, error)
        for record in [one for one in self._records.values() if one.machine]:
            await self._clean(record)
        await self._recover_cache()
        self._recovered = True

    async def _recover_cache(self) -> None:
        while True:
            try:
                seen = rows(await self._parts.broker.call("snapshots", timeout_s=ASK_S), "snapshots")
                break
            except SpaceError as error:
                log.warning("snapshots cannot be listed yet", code=error.code)
                await asyncio.sleep(CLEAN_PAUSE_S)
        await self.cache.recover({str(row.get("snapshot")) for row in seen})

    # --- one build

    async def _carry_out(self, opened: _Open) -> None:
        record = opened.record
        state, error = FAILED, None
        try:
            async with self._slots:
                record.state, record.started_at = RUNNING, time.time()
                self._files.save(record)
                await self._build(opened)
            state = SUCCEEDED
        except SpaceError as failure:
            error = failure
        except asyncio.CancelledError:
            if not opened.cancelled:
                raise  # The node ends: the next one finds the record as it is.
            state, error = CANCELLED, SandboxError("The build was cancelled.", code="build-cancelled")
        except Exception:
            log.exception("build-broke", build=record.id)
            error = SpaceError("SPACE itself failed; its log says where.")
        opened.ending = True
        await self._clean(record)
        await self.cache.drop_unmade()
        await asyncio.to_thread(shutil.rmtree, self._work / record.id, ignore_errors=True)
        if error is not None:
            opened.log.write(logs.INFO, f"{error.code}: {error.message}")
        opened.log.close()
        self._note_log(opened)
        self._end(record, state, error)
        del self._open[record.id]
        opened.done.set()
        # Where the host is full, what is only kept for later goes first.
        full = isinstance(error, HostFull)
        await self.cache.collect(max_bytes=0 if full else self._settings.build_cache_mib * MIB)

    async def _build(self, opened: _Open) -> None:
        spec, record = opened.spec, opened.record
        home = self._work / record.id
        progress = Progress(opened.log, lambda: self._progressed(opened, progress))
        most = self._settings.build_image_mib_max * MIB
        reading = Reading(home, min(self._settings.upload_mib_max * MIB, free_bytes(home) // 2))
        pull = Pull(home, most, self._settings.trusted_template_registries)
        builder = self._builder(spec, record)
        timeout_s = min(spec.timeout_s or TIMEOUT_S_DEFAULT, TIMEOUT_S_MAX)
        clock = asyncio.timeout(timeout_s)
        try:
            async with clock:
                scratch = await self._scratch()
                with progress.timed("plan"):
                    plan = await Planning(spec, home, self.cache, pull, reading, progress.say).plan(scratch)
                base = plan.target.base
                record.base = {"ref": base.ref, "digest": base.digest}
                with self.cache.holding() as hold:
                    build = Build(spec, plan, scratch, home, progress)
                    record.defaults = await build.carry_out(builder, self.cache, reading, hold)
        except TimeoutError as error:
            if not clock.expired():
                raise
            raise SandboxError(f"The build did not end within {timeout_s:g} s.", code="build-timed-out") from error
        finally:
            record.timings = progress.timings
        check_defaults(record.defaults)
        self._files.save_findings(record.id, {"lineage": build.lineage(), "packages": build.packages})
        progress.begin("publish")
        record.publishing = True
        self._progressed(opened, progress)
        with progress.timed("publish"):
            await self._publish(record)
        opened.log.write(logs.INFO, f"Published {record.digest}")

    async def _publish(self, record: BuildRecord) -> None:
        """Have the stopped builder's disk published. Whatever is asked meanwhile, this goes to its end."""
        answer: Any = await self._parts.broker.call(
            "publish", timeout_s=PUBLISH_S, machine=record.machine, defaults=record.defaults
        )
        record.digest, record.bytes = answer["digest"], answer["bytes"]
        if not record.ended:
            record.state, record.finished_at = SUCCEEDED, time.time()
            record.step = record.steps
            self._files.save(record)

    def _builder(self, spec: BuildSpec, record: BuildRecord) -> Builder:
        def note(machine: str | None) -> None:
            if machine is not None:
                self._parts.machines.builders.add(machine)
            elif record.machine is not None:
                self._parts.machines.builders.discard(record.machine)
            record.machine = machine
            self._files.save(record)

        asked = spec.resources.model_dump(exclude_none=True)
        defaults = {"cpus": BUILDER.cpus, "memory_mib": BUILDER.memory_mib, "disk_mib": BUILDER.disk_mib}
        resources = {**defaults, "pids": BUILDER.pids, **asked}
        return Builder(self._parts.machines, self._parts.commands, resources, note, self._agent, spec.machine)

    async def _scratch(self) -> str:
        for row in rows(await self._parts.broker.call("templates", timeout_s=ASK_S), "templates"):
            if row.get("name") == SCRATCH:
                return str(row["digest"])
        raise HostError("The broker has no empty template to begin a build with.", code="no-scratch")

    # --- how it goes and ends

    def _progressed(self, opened: _Open, progress: Progress) -> None:
        record = opened.record
        record.step, record.steps, record.timings = progress.step, progress.steps, progress.timings
        self._note_log(opened)
        self._files.save(record)

    def _note_log(self, opened: _Open) -> None:
        build_log = opened.log
        opened.record.log = {"lines": build_log.lines, "bytes": build_log.bytes, "truncated": build_log.truncated}

    def _end(self, record: BuildRecord, state: str, error: SpaceError | None) -> None:
        record.state, record.publishing = state, False
        record.finished_at = record.finished_at or time.time()
        record.error = error_wire.render(error) if error is not None else None
        if state == SUCCEEDED:
            record.step = record.steps
        self._files.save(record)
        log.info("build-ended", build=record.id, state=state, code=None if error is None else error.code)

    async def _clean(self, record: BuildRecord) -> None:
        """Leave nothing of the builder, however long the broker takes to be there."""
        while record.machine is not None:
            try:
                await self._parts.machines.destroy(record.machine)
            except SpaceError as error:
                log.warning("builder-not-destroyed", build=record.id, code=error.code)
                await asyncio.sleep(CLEAN_PAUSE_S)
                continue
            self._parts.machines.builders.discard(record.machine)
            record.machine = None
            self._files.save(record)

    def _known(self, build: str) -> BuildRecord:
        record = self._records.get(build)
        if record is None:
            raise NotFound("There is no such build on this node.", code="build-not-found")
        return record

    def _new_log(self, build: str) -> BuildLog:
        return BuildLog(self._files.log_path(build), self._settings.build_log_mib * MIB)

    def _forget_oldest(self) -> None:
        ended = [record for record in self._records.values() if record.ended]
        if len(self._records) > KEPT_MAX and ended:
            self._forget(min(ended, key=lambda record: record.created_at).id)

"""One build, from its plan to a stopped machine whose disk is to be published."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from space.errors import HostError, RequestError
from space.node.builds import log as logs
from space.node.builds.builder import ROOT, Builder, Place
from space.node.builds.cache import BuildCache, Hold
from space.node.builds.layers import plain_tar
from space.node.builds.log import BuildLog
from space.node.builds.manifests import ImageContent, blob_path
from space.node.builds.planning import Plan
from space.node.builds.reading import Reading
from space.node.builds.sources import Base, StagePlan
from space.node.builds.spec import BuildSpec
from space.node.builds.steps import Files, Steps

LISTS_BYTES_MAX = 32 * 1024 * 1024
DPKG, APK, PASSWD = "/var/lib/dpkg/status", "/lib/apk/db/installed", "/etc/passwd"
PYTHON_PLACES = (("/usr/lib", "dist-packages"), ("/usr/lib", "site-packages"), ("/usr/local/lib", "dist-packages"))
STEPS_SHOWN_MAX = 512
PYTHON_VERSIONS_MAX, PYTHON_PACKAGES_MAX = 8, 10_000


class Progress:
    """How far a build is, as its record shows it."""

    def __init__(self, log: BuildLog, changed: Callable[[], object]) -> None:
        self.log = log
        self.step = 0
        self.steps = 0
        self.timings: dict[str, float] = {}
        self.done: list[dict[str, Any]] = []
        self._changed = changed

    def begin(self, text: str, *, line: int | None = None, cached: bool = False) -> None:
        """The next step begins, or need not."""
        self.step += 1
        self.log.write(logs.STEP, f"{self.step}/{self.steps} {text}{' (cached)' if cached else ''}")
        if len(self.done) < STEPS_SHOWN_MAX:
            self.done.append({"line": line, "text": text, "cached": cached})
        self._changed()

    def say(self, text: str) -> None:
        self.log.write(logs.INFO, text)

    @contextmanager
    def timed(self, phase: str) -> Generator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.timings[phase] = round(self.timings.get(phase, 0.0) + time.monotonic() - began, 6)


class Build:
    """Carries out a plan in ``builder``. What it takes from the cache stays there as long as ``hold`` does."""

    def __init__(self, spec: BuildSpec, plan: Plan, scratch: str, home: Path, progress: Progress) -> None:
        self._spec = spec
        self._plan = plan
        self._scratch = scratch
        self._home = home
        self._progress = progress
        self._names = itertools.count()
        self._fresh: set[str] = set()
        """Keys of what this build has made itself: with ``no_cache`` nothing else is taken."""
        self._places: dict[int, Place] = {}
        """Where the ends of stages are."""
        self.packages: list[dict[str, str]] = []

    async def carry_out(self, builder: Builder, cache: BuildCache, reading: Reading, hold: Hold) -> dict[str, Any]:
        """Bring the builder to the target's disk and stop it; return the template's defaults."""
        self._builder, self._cache, self._hold = builder, cache, hold
        self._reading = reading
        self._steps = Steps(builder, reading, self._progress.log.feed)
        self._progress.steps = sum(1 + len(stage.steps) for stage in self._plan.stages.values()) + 1
        place = await self._realise(self._plan.target)
        defaults = await self._finish(place)
        if defaults["entry"]:
            self._progress.say("Starting what is to run in every sandbox of the template")
            with self._progress.timed("entry"):
                await builder.try_entry(defaults)
            # What it did to the disk, it does in each sandbox.
            await self._finish(place)
        await builder.stop()
        self._progress.step = self._progress.steps - 1
        return defaults

    def lineage(self) -> dict[str, Any]:
        """Return where the template comes from."""
        bases = [
            {"stage": stage.name or str(stage.number), "kind": b.kind, "ref": b.ref, "digest": b.digest}
            for stage in self._plan.stages.values()
            if stage.parent is None
            for b in (stage.base,)
        ]
        config = self._plan.target.config
        command = None
        if config.entrypoint or config.cmd:
            command = {"entrypoint": config.entrypoint, "cmd": config.cmd}
        return {"source": self._spec.source.kind, "bases": bases, "steps": self._progress.done, "command": command}

    # --- stages

    async def _realise(self, stage: StagePlan) -> Place:
        """Have the disk of a stage's end, doing no more than is not there yet."""
        if stage.number not in self._places:
            self._places[stage.number] = await self._make(stage)
        return self._places[stage.number]

    async def _make(self, stage: StagePlan) -> Place:
        done, place = await self._furthest(stage)
        wanted = [step for step in stage.steps[done:] if step.get("from") is not None]
        extracted = {id(step): await self._extracted(step) for step in wanted}
        for number, step in enumerate(stage.steps[done:], done):
            self._progress.begin(step["text"], line=step.get("line"))
            with self._progress.timed("steps"):
                await self._builder.at(place)
                await self._steps.carry_out(step, extracted.get(id(step)) or self._from_context(step))
                self._progress.log.end_line()
                place = await self._keep(stage.keys[number + 1], place.template)
        return place

    async def _furthest(self, stage: StagePlan) -> tuple[int, Place]:
        """Return how many steps of a stage need not be done, and the disk behind them."""
        shown = f"FROM {stage.base.ref or stage.base.kind}"
        for done in range(len(stage.steps), 0, -1):
            if (place := self._cached(stage.keys[done])) is not None:
                self._progress.begin(shown, cached=True)
                for step in stage.steps[:done]:
                    self._progress.begin(step["text"], line=step.get("line"), cached=True)
                return done, place
        if stage.parent is not None:
            place = await self._realise(self._plan.stages[stage.parent])
            self._progress.begin(f"FROM stage {self._plan.stages[stage.parent].name or stage.parent}")
            return 0, place
        return 0, await self._base_place(stage.base, shown)

    def _cached(self, key: str, *, whole_base: bool = False) -> Place | None:
        if self._spec.no_cache and not whole_base and key not in self._fresh:
            return None
        kept = self._cache.find(key)
        if kept is None:
            return None
        self._hold.take(kept)
        return Place(kept.template, kept.snapshot)

    async def _keep(self, key: str, template: str) -> Place:
        async with self._cache.keeping(key, template) as kept:
            self._hold.take(kept)
            place = await self._builder.keep(kept)
        self._fresh.add(key)
        return place

    # --- bases

    async def _base_place(self, base: Base, shown: str) -> Place:
        if base.place is not None:
            self._progress.begin(shown)
            return base.place
        if (place := self._cached(base.key, whole_base=True)) is not None:
            self._progress.begin(shown, cached=True)
            return place
        self._progress.begin(shown)
        with self._progress.timed("unpack"):
            await self._builder.at(Place(self._scratch))
            if base.rootfs is not None:
                await self._builder.unpack(plain_tar(base.rootfs))
            if base.image is not None and base.blobs is not None:
                await self._unpack(base.image, base.blobs)
            return await self._keep(base.key, self._scratch)

    async def _unpack(self, image: ImageContent, blobs: Path) -> None:
        for number, layer in enumerate(image.layers, 1):
            self._progress.say(f"Unpacking layer {number} of {len(image.layers)}")
            path = blob_path(blobs, layer.digest)
            if not path.is_file():
                raise HostError("A layer of the image is gone from this node: build again.", code="layer-gone")
            await self._builder.unpack(plain_tar(path, digest=layer.diff_id))

    # --- what is copied

    async def _extracted(self, step: dict[str, Any]) -> Files:
        """Bring what a step copies from another stage out of that."""
        place = await self._realise(self._plan.stages[step["from"]["stage"]])
        with self._progress.timed("copy"):
            await self._builder.at(place)
            await self._builder.trust_nobody()
            try:
                found = await self._steps.extract(step["sources"], self._new_file)
            except RequestError as error:
                error.details.setdefault("line", step.get("line"))
                raise
            await self._builder.stop()
        tops = [(archive, path) for archive, path, _ in found]
        return Files(tops, [directory for _, _, directory in found], [], keep_owner=True)

    def _new_file(self) -> Path:
        return self._home / f"copied-{next(self._names)}.tar"

    def _from_context(self, step: dict[str, Any]) -> Files | None:
        if step["kind"] != "copy":
            return None
        archive = self._plan.contexts[step["upload"]]
        directories = [path in step["directories"] for path in step["sources"]]
        return Files([(archive, path) for path in step["sources"]], directories, step["ignore"], keep_owner=False)

    # --- the end

    async def _finish(self, place: Place) -> dict[str, Any]:
        """Begin with a disk, see to it that what the defaults name is there, and look what is installed; return the
        defaults.
        """
        with self._progress.timed("finish"):
            await self._builder.at(place)
            await self._builder.trust_nobody()
            return await self._defaults()

    async def _defaults(self) -> dict[str, Any]:
        config, asked = self._plan.target.config, self._spec.defaults
        workdir = asked.workdir or config.workdir
        await self._steps.carry_out({"kind": "workdir", "path": workdir, "user": config.user}, None)
        self.packages = await self._list_packages()
        user = asked.user or config.user or await self._root_name()
        base = self._plan.target.base.defaults
        entry = asked.entry.model_dump(exclude_none=True) if asked.entry is not None else base.get("entry")
        resources = asked.resources.model_dump(exclude_none=True) if asked.resources is not None else {}
        return {
            "env": {**config.environment(), **asked.env},
            "workdir": workdir,
            "user": user,
            "entry": entry,
            "resources": {**base.get("resources", {}), **resources},
            "ports": config.ports if asked.ports is None else sorted(set(asked.ports)),
            "labels": {**config.labels, **asked.labels},
        }

    async def _root_name(self) -> str:
        """Return what root is called: without an entry that names it, its number."""
        accounts = await self._builder.read(PASSWD, LISTS_BYTES_MAX) or b""
        return "root" if any(line.startswith(b"root:") for line in accounts.split(b"\n")) else ROOT

    async def _list_packages(self) -> list[dict[str, str]]:
        asked: dict[str, Any] = {"python": await self._python_packages()}
        for name, path in (("deb", DPKG), ("apk", APK)):
            data = await self._builder.read(path, LISTS_BYTES_MAX)
            asked[name] = None
            if data is not None:
                file = self._home / f"packages-{name}"
                file.write_bytes(data)
                asked[name] = str(file)
        answer = await self._reading.ask("packages", asked)
        found: list[dict[str, str]] = answer["packages"]
        return found

    async def _python_packages(self) -> list[str]:
        names: list[str] = []
        for top, below in PYTHON_PLACES:
            versions = [name for name in await self._builder.names(top) if name.startswith("python3")]
            for version in versions[:PYTHON_VERSIONS_MAX]:
                found = await self._builder.names(f"{top}/{version}/{below}")
                names += [name for name in found if name.endswith((".dist-info", ".egg-info"))]
                if len(names) > PYTHON_PACKAGES_MAX:
                    return names[:PYTHON_PACKAGES_MAX]
        return names

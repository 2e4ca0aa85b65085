"""From what was asked for to stages on known bases: contexts are read, images resolved and fetched. No machine yet."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from space.errors import InvalidRequest, SpaceError
from space.node.builds.builder import Place
from space.node.builds.cache import BuildCache
from space.node.builds.layers import digest_of
from space.node.builds.manifests import ImageContent, Layer, blob_path
from space.node.builds.pull import Access, Pull
from space.node.builds.reading import Reading
from space.node.builds.references import parse_reference
from space.node.builds.sources import Base, StagePlan, config_of, key_of_base, rest_of, step_of
from space.node.builds.spec import (
    BuildSpec,
    DockerfileSource,
    FileSource,
    ImageSource,
    SnapshotSource,
    TemplateBase,
    TemplateSource,
)
from space.node.builds.stages import Config
from space.node.records import write_json

_OUTSIDE = 1000
"""Stages of this number and above are images and templates that are only copied from."""


@dataclass(slots=True)
class Plan:
    """All that is to be done. The target's stage is the last one."""

    stages: dict[int, StagePlan]
    target: StagePlan
    contexts: dict[str, str]
    """Plain tars by upload."""


class Planning:
    """Plans one build. ``home`` is its own directory; ``say`` tells its log."""

    def __init__(
        self, spec: BuildSpec, home: Path, cache: BuildCache, pull: Pull, reading: Reading, say: Callable[[str], object]
    ) -> None:
        self._spec = spec
        self._home = home
        self._cache = cache
        self._pull = pull
        self._reading = reading
        self._say = say

    async def plan(self, scratch: str) -> Plan:
        """Return the plan. ``scratch`` is the digest of the empty template."""
        source = self._spec.source
        if self._spec.build_args and not isinstance(source, DockerfileSource):
            raise InvalidRequest("`build_args` are for a Dockerfile.", field="build_args")
        if isinstance(source, DockerfileSource):
            plan = await self._of_dockerfile(source, scratch)
        else:
            base = await self._base(source)
            stage = StagePlan(0, "", base, [], Config.of(base.config))
            plan = Plan({0: stage}, stage, {})
        await self._add_steps(plan)
        for stage in sorted(plan.stages.values(), key=lambda one: (one.number < _OUTSIDE, one.number)):
            stage.seal(plan.stages, self._spec.scope)
        return plan

    # --- bases

    async def _base(self, source: ImageSource | FileSource | TemplateSource | SnapshotSource) -> Base:
        match source:
            case ImageSource():
                return await self._image(source.reference, source.access)
            case TemplateSource():
                return self._template(source, source.ref)
            case SnapshotSource():
                base = self._template(TemplateBase(digest=source.template_digest, defaults=source.defaults), None)
                base.kind, base.key = "snapshot", key_of_base("snapshot", source.snapshot)
                base.ref, base.place = f"snapshot:{source.snapshot}", Place(source.template_digest, source.snapshot)
                return base
            case _:
                upload = self._home / source.upload
                digest = await digest_of(upload)
                if source.kind == "rootfs":
                    return Base("rootfs", key_of_base("rootfs", digest), digest=digest, rootfs=upload)
                # What an archive does not hold must not come from what others have brought.
                blobs = self._home / "blobs"
                content = await self._pull.unpack(upload, blobs)
                key = key_of_base("archive", digest)
                return Base("archive", key, digest=digest, image=content, blobs=blobs, config=content.config)

    def _template(self, template: TemplateBase, ref: str | None) -> Base:
        return Base(
            "template",
            key_of_base("template", template.digest),
            ref=ref,
            digest=template.digest,
            place=Place(template.digest),
            config=config_of(template.defaults),
            defaults=rest_of(template.defaults),
        )

    async def _image(self, text: str, access: Access) -> Base:
        """Ask the registry for an image, and fetch it unless all that is needed of it is here."""
        reference = parse_reference(text)
        self._say(f"Resolving {text}")
        digest = await self._pull.resolve(reference, access)
        repository = reference.repository
        key, blobs = key_of_base("image", f"{repository} {digest}"), self._cache.blobs(repository)
        noted = blobs / f"{digest.removeprefix('sha256:')}.json"
        content = _noted(noted)
        if content is None or not self._is_here(key, content, blobs):
            self._say(f"Fetching {text} ({digest})")
            with self._cache.pulling():
                content = await self._pull.fetch(reference, digest, access, blobs)
            write_json(noted, asdict(content))
        return Base("image", key, ref=text, digest=digest, image=content, blobs=blobs, config=content.config)

    def _is_here(self, key: str, content: ImageContent, blobs: Path) -> bool:
        """Whether an image was unpacked before, or can be without its registry."""
        whole = all(blob_path(blobs, layer.digest).is_file() for layer in content.layers)
        return whole or self._cache.find(key) is not None

    # --- a Dockerfile

    async def _of_dockerfile(self, source: DockerfileSource, scratch: str) -> Plan:
        common = {
            "dockerfile": source.dockerfile,
            "build_args": self._spec.build_args,
            "target": self._spec.target,
            "ignore": [f"{source.dockerfile}.dockerignore", ".dockerignore"],
        }
        outline = await self._reading.ask("outline", {**self._plain(source.upload), **common})
        bases = {f"space:{name}": self._ours(name) for name in outline["templates"]}
        for reference in outline["images"]:
            bases[reference] = await self._image(reference, source.access)
        configs = {name.removeprefix("space:"): base.config for name, base in bases.items()}
        evaluated = await self._reading.ask("plan", {**common, "archive": outline["archive"], "configs": configs})
        stages: dict[int, StagePlan] = {}
        outside = itertools.count(_OUTSIDE)
        for told in evaluated["stages"]:
            base, parent = self._base_of(told["base"], bases, scratch), told["base"].get("stage")
            if parent is not None:
                base = stages[parent].base
            stage = StagePlan(told["number"], told["name"], base, told["steps"], Config.of(told["config"]), parent)
            for step in stage.steps:
                if step["kind"] != "copy":
                    continue
                step["upload"], step["ignore"] = source.upload, common["ignore"]
                if step["from"] is not None and step["from"]["kind"] != "stage":
                    number = next(outside)
                    copied = self._base_of(step["from"], bases, scratch)
                    stages[number] = StagePlan(number, step["from"]["ref"], copied, [], Config.of(copied.config))
                    step["from"] = {"kind": "stage", "stage": number}
            stages[stage.number] = stage
        target = stages[evaluated["stages"][-1]["number"]]
        return Plan(stages, target, {source.upload: outline["archive"]})

    def _base_of(self, told: dict[str, Any], bases: dict[str, Base], scratch: str) -> Base:
        match told["kind"]:
            case "image":
                return bases[told["ref"]]
            case "template":
                return bases[f"space:{told['ref']}"]
            case _:
                return Base("scratch", key_of_base("scratch", scratch), digest=scratch, place=Place(scratch))

    def _ours(self, name: str) -> Base:
        known = self._spec.templates
        template = known.get(name) or known.get(name if ":" in name else f"{name}:latest")
        if template is None:
            raise InvalidRequest(f"There is no template {name[:100]!r} here.", code="unknown-template", field="source")
        return self._template(template, f"space:{name}")

    def _plain(self, upload: str) -> dict[str, Any]:
        return {
            "upload": str(self._home / upload),
            "plain": str(self._home / f"{upload}.tar"),
            "bytes_max": self._reading.bytes_max,
        }

    # --- further steps

    async def _add_steps(self, plan: Plan) -> None:
        stage = plan.target
        if self._spec.shell is not None:
            stage.config.shell = list(self._spec.shell)
        for number, asked in enumerate(self._spec.steps):
            step = step_of(asked, stage.config)
            if step is None:
                continue
            step["asked"] = number
            if step["kind"] == "copy":
                step = await self._selected(step, plan)
            stage.steps.append(step)

    async def _selected(self, step: dict[str, Any], plan: Plan) -> dict[str, Any]:
        try:
            answer = await self._reading.ask("select", {**self._plain(step["upload"]), "step": step})
        except SpaceError as error:
            error.details |= {"step": step["text"], "asked": step["asked"]}
            raise
        selected: dict[str, Any] = answer["step"]
        plan.contexts[selected["upload"]] = answer["archive"]
        return selected


def _noted(path: Path) -> ImageContent | None:
    """Return what was noted of an image."""
    try:
        value = json.loads(path.read_bytes())
        return ImageContent(tuple(Layer(**layer) for layer in value["layers"]), value["config"])
    except (OSError, ValueError, TypeError, KeyError):
        return None

"""The stages of a build, each on a base, and the keys that name their disks. Knows no machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from space.node.builds.builder import Place
from space.node.builds.manifests import ImageContent
from space.node.builds.spec import Defaults, Step
from space.node.builds.stages import Config, canonical

_VERSION = "1"
_OF_A_USER = ("HOME", "USER", "LOGNAME", "SHELL")
"""Variables that the guest sets itself for whoever a command is run by."""


@dataclass(slots=True)
class Base:
    """The disk below a stage, named by ``key``: at ``place``, or yet to be unpacked of ``image`` or ``rootfs``."""

    kind: str
    key: str
    ref: str | None = None
    digest: str | None = None
    place: Place | None = None
    image: ImageContent | None = None
    blobs: Path | None = None
    """Where the image's layers are."""
    rootfs: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    """Of a template: what of its defaults is no container's configuration."""


@dataclass(slots=True)
class StagePlan:
    """One stage: ``keys`` name the disk after the base and after each step."""

    number: int
    name: str
    base: Base
    steps: list[dict[str, Any]]
    config: Config
    parent: int | None = None
    """The stage whose last disk it begins with, if that is one."""
    keys: list[str] = field(default_factory=list)

    def seal(self, stages: Mapping[int, StagePlan], scope: str) -> None:
        """Name the disks, once those of the stages before are named.

        Those that steps made are for one ``scope`` alone: they may hold what the next one who does the same is not to
        see, as a key.
        """
        self.keys = [self.base.key if self.parent is None else stages[self.parent].keys[-1]]
        for step in self.steps:
            source = step.get("from")
            copied = stages[source["stage"]].keys[-1] if source is not None else ""
            whole = [_VERSION, scope, self.keys[-1], canonical({**step, "from": None}), copied]
            self.keys.append(_key(*whole))


def key_of_base(kind: str, identity: str) -> str:
    return _key(_VERSION, kind, identity)


def config_of(defaults: Defaults) -> dict[str, Any]:
    """Return a template's defaults as a container's configuration."""
    return {
        "account": (defaults.user or "").partition(":")[0],
        "about": {name: defaults.env[name] for name in _OF_A_USER if name in defaults.env},
        "env": defaults.env,
        "workdir": defaults.workdir,
        "user": defaults.user,
        "ports": defaults.ports,
        "labels": defaults.labels or {},
    }


def rest_of(defaults: Defaults) -> dict[str, Any]:
    """Return what of a template's defaults is no container's configuration."""
    return {
        "entry": defaults.entry.model_dump(exclude_none=True) if defaults.entry is not None else None,
        "resources": defaults.resources.model_dump(exclude_none=True) if defaults.resources is not None else {},
    }


def step_of(asked: Step, config: Config) -> dict[str, Any] | None:
    """Return the step that was asked for, and change the configuration as it says; None: that is all it does."""
    if asked.run is not None:
        argv = asked.run if isinstance(asked.run, list) else [*config.shell, asked.run]
        shown = asked.run if isinstance(asked.run, str) else json.dumps(asked.run)
        return {**config.run_step(argv, {}), "line": None, "text": f"run {shown}"[:400]}
    if asked.env is not None:
        config.env.update(asked.env)
    elif asked.user is not None:
        config.user = asked.user
    elif asked.workdir is not None:
        config.workdir = _joined(config.workdir, asked.workdir)
        return {
            "kind": "workdir",
            "path": config.workdir,
            "user": config.user,
            "line": None,
            "text": f"workdir {config.workdir}"[:400],
        }
    elif (copy := asked.copy_) is not None:
        to = _joined(config.workdir, copy.to)
        return {
            "kind": "copy",
            "from": None,
            "upload": copy.upload,
            "sources": list(copy.sources),
            "keep_links": copy.keep_links,
            "files": [],
            "to": to,
            "into": copy.to.endswith("/") or len(copy.sources) > 1,
            "unpack": False,
            "owner": copy.owner,
            "mode": int(copy.mode, 8) if copy.mode is not None else None,
            "exclude": [],
            "ignore": [],
            "line": None,
            "text": f"copy {' '.join(copy.sources)} {copy.to}"[:400],
        }
    return None


def _joined(workdir: str, path: str) -> str:
    return Config.of({"workdir": f"{workdir}/{path}" if not path.startswith("/") else path}).workdir


def _key(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

"""Templates and builds as the API tells of them, and what a build is asked for. Frozen values, no I/O."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Self, TypedDict

from space.errors import InvalidRequest
from space.sdk.egress import PolicyReference
from space.sdk.options import given
from space.sdk.requests import present
from space.sdk.types import Failure, Json, Snapshot, parse_time

BuildState = Literal["pending", "running", "succeeded", "failed", "cancelled"]
BUILD_OVER: frozenset[BuildState] = frozenset({"succeeded", "failed", "cancelled"})
SOURCES = ("image", "dockerfile", "archive", "rootfs", "template", "snapshot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A template: one of the project's own, or one that the installation brings along (``builtin``).

    Give it to ``Sandbox.create`` in place of a name: the sandbox begins from exactly this content.
    """

    digest: str
    name: str | None = None
    tag: str | None = None
    """What it was asked for by, or listed as."""
    builtin: bool = False
    bytes: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] | None = None
    build_id: str | None = None
    tags: tuple[str, ...] = ()
    """Everything that points to it; known of one that was asked for, not of a list's."""
    lineage: Mapping[str, Any] = field(default_factory=dict)
    packages: tuple[Mapping[str, Any], ...] | None = None
    created_at: datetime | None = None
    untagged_at: datetime | None = None
    deleted_at: datetime | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @property
    def reference(self) -> str:
        """What stands for it where a template's name is expected: its digest."""
        return self.digest

    @classmethod
    def parse(cls, data: Json) -> Self:
        packages = data.get("packages")
        return cls(
            digest=data["digest"],
            name=data.get("name"),
            tag=data.get("tag"),
            builtin=bool(data.get("builtin")),
            bytes=data.get("bytes") or 0,
            defaults=data.get("defaults") or {},
            source=data.get("source") or {},
            base=data.get("base"),
            build_id=data.get("build_id"),
            tags=tuple(data.get("tags") or ()),
            lineage=data.get("lineage") or {},
            packages=None if packages is None else tuple(packages),
            created_at=parse_time(data.get("created_at")),
            untagged_at=parse_time(data.get("untagged_at")),
            deleted_at=parse_time(data.get("deleted_at")),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TagMove:
    """One entry of a name's history: a tag was ``previous`` and became ``digest``; None: there was, is, none."""

    number: int
    tag: str
    digest: str | None = None
    previous: str | None = None
    build_id: str | None = None
    created_at: datetime | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            number=data["number"],
            tag=data["tag"],
            digest=data.get("digest"),
            previous=data.get("previous"),
            build_id=data.get("build_id"),
            created_at=parse_time(data.get("created_at")),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A release, the images that it and its bases came from, and those that the installation does not trust now."""

    digest: str
    tags: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    untrusted: tuple[str, ...] = ()
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        lists = {name: tuple(data.get(name) or ()) for name in ("tags", "images", "untrusted")}
        return cls(digest=data["digest"], **lists, raw=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """The making of a template. When it has ``succeeded``, ``name:tag`` was moved to ``digest``."""

    id: str
    name: str
    tag: str
    state: BuildState
    source: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    steps: int | None = None
    digest: str | None = None
    bytes: int = 0
    base: Mapping[str, Any] | None = None
    failure: Failure | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @property
    def over(self) -> bool:
        return self.state in BUILD_OVER

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            id=data["id"],
            name=data["name"],
            tag=data["tag"],
            state=data["state"],
            source=data.get("source") or {},
            step=data.get("step"),
            steps=data.get("steps"),
            digest=data.get("digest"),
            bytes=data.get("bytes") or 0,
            base=data.get("base"),
            failure=Failure.parse(data.get("failure")),
            timings=data.get("timings") or {},
            created_at=parse_time(data.get("created_at")),
            started_at=parse_time(data.get("started_at")),
            finished_at=parse_time(data.get("finished_at")),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a build's log: a ``step`` that begins, what a command wrote (``stdout``, ``stderr``), or ``info``."""

    n: int
    stream: str
    text: str
    at: datetime | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        at = data.get("at")
        moment = datetime.fromtimestamp(at, UTC) if isinstance(at, int | float) else None
        return cls(n=data["n"], stream=data.get("stream") or "info", text=data.get("text") or "", at=moment, raw=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryAuth:
    """Credentials for an image registry. They are kept in memory until the image has been pulled, and nowhere else."""

    username: str
    password: str = field(repr=False)
    registry: str | None = None
    """``host`` or ``host:port``; needed for a Dockerfile, which may name several."""


class BuildOptions(TypedDict, total=False):
    """What a template is built from, which is one of the first six, and how."""

    image: str
    """An image of a registry: ``host/name:tag``, or with ``@sha256:…``."""
    dockerfile: str | os.PathLike[str]
    """A directory with a Dockerfile, which is sent without what its .dockerignore leaves out."""
    archive: str | os.PathLike[str]
    """An image as an OCI or ``docker save`` archive, a file."""
    rootfs: str | os.PathLike[str]
    """A tar of a root file system, a file."""
    template: str | Template
    """Another template."""
    snapshot: str | Snapshot
    """A snapshot of kind ``disk``, or its id."""
    file: str
    """The Dockerfile's place in the directory; ``Dockerfile`` otherwise."""
    build_args: Mapping[str, str]
    """Of the Dockerfile. Not for secrets: they may be in the template."""
    target: str
    """The Dockerfile's stage that becomes the template; the last one otherwise."""
    steps: Sequence[Mapping[str, Any]]
    """What is done to the source, in order: ``{"run": "apt-get …"}``, ``{"copy": {"sources": […], "to": …}}``,
    ``{"env": {…}}``, ``{"workdir": …}``, ``{"user": …}``."""
    context: str | os.PathLike[str]
    """The directory that steps copy from."""
    env: Mapping[str, str]
    """Environment of sandboxes of the template, over the source's."""
    workdir: str
    """Where commands of its sandboxes begin."""
    user: str
    """Who runs them."""
    start: str | Sequence[str]
    """A command that is started once, and runs on in every sandbox of the template."""
    ready: str | Sequence[str]
    """A command that ends with status 0 once what was started is up."""
    ready_timeout_s: float
    """How long that may take; 60 s otherwise."""
    cpus: float
    """How many cores sandboxes of the template have that name none."""
    memory_mib: int
    """How much memory."""
    disk_mib: int
    """How much disk."""
    ports: Sequence[int]
    """On which ports there are servers in it."""
    labels: Mapping[str, str]
    """Anything to know it by."""
    builder: Mapping[str, Any]
    """``cpus``, ``memory_mib``, ``disk_mib`` and ``pids`` of the machine that builds."""
    policy: PolicyReference
    """What may leave sandboxes of the template that have no policy of their own."""
    build_policy: PolicyReference
    """What may leave the machine that builds; the project's otherwise."""
    timeout_s: float
    """How long the build may take; half an hour otherwise."""
    no_cache: bool
    """Do every step again."""
    auth: RegistryAuth
    """Credentials for the registry of ``image``, or of an image in the Dockerfile."""
    ca_pem: str
    """Certificates of a private authority that the registry's is from, as PEM."""


_DEFAULTS = ("env", "workdir", "user", "ports", "labels", "policy")
_RESOURCES = ("cpus", "memory_mib", "disk_mib")


def build_body(name: str, options: BuildOptions, uploads: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of ``POST /v1/templates/builds``; ``uploads`` has the id of what was sent of each option."""
    label, _, tag = name.partition(":")
    chosen = given(options, BuildOptions)
    resources = {key: chosen[key] for key in _RESOURCES if key in chosen}
    entry = present(
        start=_command(chosen.get("start")),
        ready=_command(chosen.get("ready")),
        timeout_s=chosen.get("ready_timeout_s"),
    )
    defaults = {key: chosen[key] for key in _DEFAULTS if key in chosen}
    if "ports" in defaults:
        defaults["ports"] = list(defaults["ports"])
    return {
        "name": label,
        **present(tag=tag or None),
        "source": _source(options, uploads),
        **present(
            steps=[_step(step, uploads) for step in options.get("steps", ())] or None,
            defaults={**defaults, **present(resources=resources or None, entry=entry or None)} or None,
            build_args=options.get("build_args"),
            target=options.get("target"),
            resources=options.get("builder"),
            policy=options.get("build_policy"),
            timeout_s=options.get("timeout_s"),
            no_cache=options.get("no_cache") or None,
        ),
    }


def source_of(options: BuildOptions) -> str:
    """Return which of the sources is given. Raises ``TypeError`` for an unknown option, or not exactly one source."""
    known = given(options, BuildOptions)
    found = [name for name in SOURCES if known.get(name) is not None]
    if len(found) != 1:
        raise TypeError(f"A template is built from exactly one of {', '.join(SOURCES)}.")
    return found[0]


def context_of(options: BuildOptions) -> str | os.PathLike[str] | None:
    """Return the directory that steps copy from, if any copies. Raises ``TypeError`` when it is not given."""
    if not any("copy" in step for step in options.get("steps", ())):
        return None
    directory = options.get("context")
    if directory is None:
        raise TypeError("A step copies something: give the directory it is in as `context`.")
    return directory


def _source(options: BuildOptions, uploads: Mapping[str, str]) -> dict[str, Any]:
    kind = source_of(options)
    auth = options.get("auth")
    told = None if auth is None else present(username=auth.username, password=auth.password, registry=auth.registry)
    pulling = present(auth=told, ca_pem=options.get("ca_pem"))
    if pulling and kind not in {"image", "dockerfile"}:
        raise InvalidRequest("`auth` and `ca_pem` are for images and Dockerfiles alone.")
    given_as: Any = options.get(kind)
    match kind:
        case "image":
            return {"kind": kind, "reference": given_as, **pulling}
        case "dockerfile":
            return {"kind": kind, "upload": uploads[kind], **present(dockerfile=options.get("file")), **pulling}
        case "template":
            return {"kind": kind, "template": given_as.reference if isinstance(given_as, Template) else given_as}
        case "snapshot":
            return {"kind": kind, "snapshot": given_as.id if isinstance(given_as, Snapshot) else given_as}
        case _:
            return {"kind": kind, "upload": uploads[kind]}


def _step(step: Mapping[str, Any], uploads: Mapping[str, str]) -> dict[str, Any]:
    return {**step, "copy": {**step["copy"], "upload": uploads["context"]}} if "copy" in step else dict(step)


def _command(command: str | Sequence[str] | None) -> str | list[str] | None:
    return command if command is None or isinstance(command, str) else list(command)

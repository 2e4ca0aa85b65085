"""What a template is: a starting root filesystem, known by its content's digest, and defaults. And how it is named."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

TAG_DEFAULT = "latest"
OURS = "space:"
"""Before a template's name where an image's could stand, as behind FROM in a Dockerfile."""
NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
TAG = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}"
RESERVED = frozenset({"audit"})
"""Names that mean something else in a path of the api."""
_REFERENCE = re.compile(rf"(?P<name>{NAME})(?::(?P<tag>{TAG}))?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_RESOURCES: dict[str, tuple[type[int] | type[float], float]] = {
    "cpus": (float, 0.05),
    "memory_mib": (int, 64),
    "disk_mib": (int, 64),
    "pids": (int, 16),
}


@dataclass(frozen=True, slots=True)
class Template:
    """One that the installation brings along: ``name:tag`` points to ``digest``. It is nobody's and everybody's.

    ``defaults`` has ``env``, ``workdir`` and ``user``, and may have ``entry``, ``resources``, ``ports`` and ``labels``.
    ``seen_at`` is since when the reference has pointed to that digest.
    """

    name: str
    tag: str
    digest: str
    seen_at: datetime
    defaults: dict[str, Any] = field(default_factory=dict)
    driver: str | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """Content that a project has published, once for each project and digest. Tags point to it, or none does any more.

    ``source`` says what it was built from, ``base`` (``{ref, digest}``) what that began with, ``lineage`` how it came
    about (``images`` in it are those that it and its bases came from), and ``packages`` what is installed in it.
    """

    project_id: str
    digest: str
    created_at: datetime
    defaults: dict[str, Any] = field(default_factory=dict)
    bytes: int = 0
    source: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] | None = None
    lineage: dict[str, Any] = field(default_factory=dict)
    packages: list[Any] | None = None
    build_id: str | None = None
    untagged_at: datetime | None = None
    """Since when no tag points to it; None while one does."""
    deleted_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Tag:
    """Where ``name:tag`` of a project points now."""

    project_id: str
    name: str
    tag: str
    digest: str
    moved_at: datetime


@dataclass(frozen=True, slots=True)
class TagMove:
    """One entry of a name's history: ``tag`` was ``previous`` and became ``digest``; None: there was, is, none."""

    number: int
    tag: str
    digest: str | None
    previous: str | None
    build_id: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a reference means now. ``own`` is false of what the installation brings along."""

    digest: str
    defaults: dict[str, Any]
    driver: str | None
    own: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """How a caller names a template: by ``digest``, or by ``name`` and ``tag``."""

    name: str | None = None
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        return self.digest or f"{self.name}:{self.tag}"


def parse_reference(text: str) -> Reference | None:
    """Read ``name``, ``name:tag`` or ``sha256:…``; None when it is none of them. No tag means ``latest``."""
    if is_digest(text):
        return Reference(digest=text)
    match = _REFERENCE.fullmatch(text)
    if match is None:
        return None
    return Reference(name=match["name"], tag=match["tag"] or TAG_DEFAULT)


def is_digest(text: object) -> bool:
    """Whether it is ``sha256:`` and 64 hexadecimal digits."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def default_resources(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources that sandboxes get which name none: those of a template's defaults that make sense."""
    named: Any = defaults.get("resources")
    if not isinstance(named, Mapping):
        return {}
    found: dict[str, Any] = {}
    for name, (kind, least) in _RESOURCES.items():
        value: Any = cast("Mapping[str, Any]", named).get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value < 1 << 40:
            found[name] = kind(value)
    return found


def registry_of(image: str) -> str | None:
    """Return the registry (``host`` or ``host:port``) that an image reference names; None when it names none.

    As every tool reads it: what stands before the first slash is a registry when it has a dot or a colon in it, or is
    ``localhost``.
    """
    first, slash, _ = image.partition("/")
    is_host = "." in first or ":" in first or first == "localhost"
    return first.lower() if slash and is_host else None


def is_trusted(image: str, registries: Collection[str] | None) -> bool:
    """Whether templates may be built from an image. Without a list from any, with one from exactly those registries."""
    return registries is None or registry_of(image) in {registry.lower() for registry in registries}

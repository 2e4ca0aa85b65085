"""What an installation's keeper looks at: projects with their quotas and keys, the warm pool, strays. Frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from space.sdk.types import Json, parse_time


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key's record. ``key`` is the secret itself; only the answer to its creation has it."""

    id: str
    name: str | None = None
    created_at: datetime | None = None
    last_used_at: datetime | None = None
    key: str | None = field(default=None, repr=False)
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            id=data["id"],
            name=data.get("name"),
            created_at=parse_time(data.get("created_at")),
            last_used_at=parse_time(data.get("last_used_at")),
            key=data.get("key"),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What all sandboxes of a project may have together, or have now. As a limit, None means none."""

    sandboxes: int | None = None
    cpus: float | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any] | None) -> Self:
        data = data or {}
        return cls(
            sandboxes=data.get("sandboxes"),
            cpus=data.get("cpus"),
            memory_mib=data.get("memory_mib"),
            disk_mib=data.get("disk_mib"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project with its limits and what it uses. ``key``, its first API key, is in the answer to its creation only."""

    id: str
    name: str
    quota: Quota = field(default_factory=Quota)
    used: Quota = field(default_factory=Quota)
    created_at: datetime | None = None
    key: str | None = field(default=None, repr=False)
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            id=data["id"],
            name=data["name"],
            quota=Quota.parse(data.get("quota")),
            used=Quota.parse(data.get("used")),
            created_at=parse_time(data.get("created_at")),
            key=data.get("key"),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """The machines kept ready for one template, driver and size, and how sandboxes of that shape have come about."""

    template_digest: str
    driver: str
    memory_mib: int
    warm: bool = False
    """Whether there is a warm snapshot of the template to restore machines from."""
    idle: int = 0
    filling: int = 0
    target: int = 0
    claims: int = 0
    """Sandboxes that took a machine that was ready."""
    restores: int = 0
    """Sandboxes restored from the warm snapshot because none was ready."""
    boots: int = 0

    @classmethod
    def parse(cls, data: Json) -> Self:
        counts = ("idle", "filling", "target", "claims", "restores", "boots")
        return cls(
            template_digest=data["template_digest"],
            driver=data["driver"],
            memory_mib=data["memory_mib"],
            warm=bool(data.get("warm")),
            **{name: int(data.get(name) or 0) for name in counts},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The warm pool: the memory its machines are reckoned with, how much they may have, and its shapes."""

    memory_mib: int = 0
    memory_max_mib: int = 0
    shapes: tuple[PoolShape, ...] = ()
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            memory_mib=data.get("memory_mib") or 0,
            memory_max_mib=data.get("memory_max_mib") or 0,
            shapes=tuple(PoolShape.parse(shape) for shape in data.get("shapes") or ()),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """Something on the host that bears the installation's names and belongs to no sandbox."""

    kind: str
    name: str
    removed: bool = False
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(kind=data["kind"], name=data["name"], removed=bool(data.get("removed")), raw=data)

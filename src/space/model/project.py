"""Who owns things: a project, and the API keys that act for it."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class Role(StrEnum):
    """What a key may do. An admin may also create projects; neither sees into another project."""

    MEMBER = "member"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Quota:
    """What all sandboxes of a project may take together; None: as much as there is."""

    sandboxes: int | None = None
    cpus: float | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Used:
    """What they take: memory and cpus of those that have a machine; disks, and bytes of snapshots, until deleted."""

    sandboxes: int = 0
    cpus: float = 0.0
    memory_mib: int = 0
    disk_mib: int = 0


@dataclass(frozen=True, slots=True)
class Project:
    id: str
    name: str
    created_at: datetime
    quota: Quota = Quota()


@dataclass(frozen=True, slots=True)
class Key:
    """One API key as the store knows it: never the key itself, only its SHA-256."""

    id: str
    project_id: str
    name: str
    role: Role
    hash: str
    created_at: datetime
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None

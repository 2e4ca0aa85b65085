"""What a snapshot is: an immutable point in the life of a sandbox, from which new ones start."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from space.model.sandbox import Failure, Resources

REFERENCE_PREFIX = "snapshot:"


class SnapshotKind(StrEnum):
    """``full`` keeps memory, processes and file system; ``disk`` the file system alone."""

    DISK = "disk"
    FULL = "full"


class SnapshotState(StrEnum):
    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot as the store knows it. It outlives its sandbox.

    ``bytes`` is what it takes; while it is being made, the most that it can take. A ``hidden`` one belongs to the fork
    that is its operation. ``dropped`` says that the node has nothing of it any more.
    """

    id: str
    project_id: str
    sandbox_id: str
    kind: SnapshotKind
    state: SnapshotState
    template: str
    template_digest: str
    driver: str
    resources: Resources
    operation_id: str
    created_at: datetime
    updated_at: datetime
    name: str | None = None
    bytes: int = 0
    failure: Failure | None = None
    hidden: bool = False
    dropped: bool = False
    details: dict[str, Any] = field(default_factory=dict)

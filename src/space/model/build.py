"""What a build is: the making of a template, from what a caller gave to a digest."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from space.model.sandbox import Failure, Resources

TIMEOUT_S_DEFAULT = 1800.0
TIMEOUT_S_MAX = 6 * 3600.0
BUILDER = Resources(cpus=1.0, memory_mib=1024, disk_mib=8192, pids=1024)
"""What a builder gets of what its request does not name."""


class BuildState(StrEnum):
    """A build that is ``pending`` waits for its turn."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN = frozenset({BuildState.PENDING, BuildState.RUNNING})


@dataclass(frozen=True, slots=True)
class Build:
    """One build as the store knows it. Its log is the node's.

    ``spec`` is what the node is told, without the credentials for a registry (``needs_auth`` says that there are some):
    these are nowhere but in memory. ``source`` is what a caller may see of it.
    """

    id: str
    project_id: str
    name: str
    tag: str
    state: BuildState
    resources: Resources
    timeout_s: float
    created_at: datetime
    updated_at: datetime
    source: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    needs_auth: bool = False
    snapshot_id: str | None = None
    """The snapshot it begins with."""
    uploads: tuple[str, ...] = ()
    """What it reads."""
    digests: tuple[str, ...] = ()
    """The templates that it may need."""
    sent: bool = False
    """Whether the node has been told of it."""
    cancelling: bool = False
    """Whether somebody wants it to end."""
    step: int | None = None
    steps: int | None = None
    digest: str | None = None
    bytes: int = 0
    base: dict[str, Any] | None = None
    failure: Failure | None = None
    timings: dict[str, float] = field(default_factory=dict)
    lease_owner: str | None = None
    lease_until: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    abandoned: bool = False
    """Whether it is over for us while the node may still be at it."""
    policy: str | dict[str, Any] | None = None
    """What may leave the machine that builds; None: as the project has it."""
    template_policy: str | dict[str, Any] | None = None
    """What may leave sandboxes of the template that comes of it, unless they have a policy of their own."""
    more_tags: tuple[str, ...] = ()
    """Further tags of the name that point to what was made."""


@dataclass(frozen=True, slots=True)
class AskedBuild:
    """A build that was asked for before it was said of what: the build that is begun then has its id.

    ``resources`` are those of the template. ``numbers`` are the asker's own numbers of the steps of the build.
    """

    id: str
    project_id: str
    name: str
    tags: list[str]
    created_at: datetime
    resources: dict[str, Any] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)

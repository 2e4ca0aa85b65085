"""What a sandbox is, which states it has, and which may follow which. The only place that says so."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

OnTimeout = Literal["delete", "suspend", "stop"]
OnIdle = Literal["pause", "suspend", "stop", "delete"]


class State(StrEnum):
    """States in passing end in -ing; the others rest."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    WAKING = "waking"
    STOPPING = "stopping"
    STOPPED = "stopped"
    STARTING = "starting"
    DELETING = "deleting"
    DELETED = "deleted"
    FAILED = "failed"


RESTING = frozenset({State.RUNNING, State.PAUSED, State.SUSPENDED, State.STOPPED, State.FAILED, State.DELETED})


WITH_MEMORY = frozenset({State.RUNNING, State.PAUSED, State.SUSPENDED})
"""Where a sandbox's memory and processes are there to be copied, with the machine or in its image."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One lifecycle verb: where it may start, the state while it runs, and where it ends.

    A verb without ``passing`` and ``target`` leaves the sandbox in the state it is in; other verbs must wait for it.
    """

    verb: str
    sources: frozenset[State]
    passing: State | None = None
    target: State | None = None

    @property
    def stays(self) -> bool:
        return self.passing is None


def _transition(
    verb: str, sources: AbstractSet[State], passing: State | None = None, target: State | None = None
) -> Transition:
    return Transition(verb, frozenset(sources), passing, target)


TRANSITIONS: dict[str, Transition] = {
    t.verb: t
    for t in (
        _transition("create", {State.CREATING}, State.CREATING, State.RUNNING),
        _transition("pause", {State.RUNNING}, State.PAUSING, State.PAUSED),
        _transition("resume", {State.PAUSED}, State.RESUMING, State.RUNNING),
        _transition("suspend", {State.RUNNING, State.PAUSED}, State.SUSPENDING, State.SUSPENDED),
        _transition("wake", {State.SUSPENDED, State.FAILED}, State.WAKING, State.RUNNING),
        _transition("stop", {State.RUNNING, State.PAUSED}, State.STOPPING, State.STOPPED),
        _transition("start", {State.STOPPED, State.FAILED}, State.STARTING, State.RUNNING),
        _transition("delete", set(State) - {State.DELETED}, State.DELETING, State.DELETED),
        _transition("snapshot", WITH_MEMORY | {State.STOPPED}),
        _transition("fork", WITH_MEMORY),
    )
}

# `wake` takes whichever path the state allows; a running sandbox is awake already.
WAKE_BY_STATE: dict[State, str] = {State.PAUSED: "resume", State.SUSPENDED: "wake", State.STOPPED: "start"}


@dataclass(frozen=True, slots=True)
class Resources:
    """Limits of one sandbox. ``cpus`` in cores, sizes in MiB, ``pids`` a count of processes and threads.

    ``io_weight`` (1 to 1000) is its share of a busy disk beside other sandboxes.
    """

    cpus: float = 1.0
    memory_mib: int = 1024
    disk_mib: int = 4096
    pids: int = 1024
    io_weight: int = 100


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sandbox or an operation failed: a stable code, a sentence, a class in `space.errors`, and details."""

    code: str
    message: str
    kind: str = "HostError"
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One sandbox as the store knows it."""

    id: str
    project_id: str
    template: str
    template_digest: str
    driver: str
    state: State
    resources: Resources
    created_at: datetime
    updated_at: datetime
    name: str | None = None
    ready: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    on_timeout: OnTimeout = "delete"
    deadline_at: datetime | None = None
    idle_timeout_s: float | None = None
    on_idle: OnIdle = "suspend"
    wake_on_request: bool = False
    failure: Failure | None = None
    operation_id: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    snapshot_id: str | None = None
    """The snapshot it began from."""
    forked_from: str | None = None
    """The sandbox whose state it began with."""
    policy: str | dict[str, Any] | None = None
    """Its own policy of what may leave it: a document, or a name; None: its template's or its project's."""
    egress_generation: int = 1
    """Counts the changes of what may leave it: of the policy that it has, and of its grants."""

    @property
    def volumes(self) -> list[dict[str, str]]:
        """What it mounts, as ``{volume, name, path}``; a name may be another volume's by now."""
        return self.details.get("volumes", [])

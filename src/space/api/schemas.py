"""What answers look like."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from space.api.bodies import TtyBody
from space.model.operation import OperationState
from space.model.project import Role
from space.model.sandbox import OnIdle, OnTimeout, State
from space.model.snapshot import SnapshotKind, SnapshotState


class Out(BaseModel):
    """An answer's body."""

    model_config = ConfigDict(from_attributes=True)


class FailureOut(Out):
    """Why something failed. `kind` is the class of error that `code` belongs to."""

    code: str
    message: str
    kind: str
    details: dict[str, Any]


class ResourcesOut(Out):
    cpus: float
    memory_mib: int
    disk_mib: int
    pids: int
    io_weight: int


class MountOut(Out):
    """A volume in a sandbox."""

    name: str
    """What it was called when the sandbox, or the one whose memory it began with, was made."""
    path: str


class SandboxOut(Out):
    """A sandbox. `ready` is true once its guest agent has answered."""

    id: str
    name: str | None
    template: str
    template_digest: str
    driver: str
    state: State
    ready: bool
    resources: ResourcesOut
    metadata: dict[str, str]
    timeout_s: float | None
    on_timeout: OnTimeout
    deadline_at: datetime | None
    idle_timeout_s: float | None
    on_idle: OnIdle
    wake_on_request: bool
    failure: FailureOut | None
    operation_id: str | None
    """The operation that has it, or had it last."""
    forked_from: str | None
    """The sandbox whose state it began with."""
    volumes: list[MountOut]
    created_at: datetime
    updated_at: datetime


class VolumeOut(Out):
    """A volume. `sandboxes` says how many mount it."""

    id: str
    name: str
    size_mib: int
    sandboxes: int
    created_at: datetime


class SnapshotOut(Out):
    """A kept point of a sandbox, which may be gone by now.

    `bytes` is what it takes; while it is being made, the most it can take.
    """

    id: str
    name: str | None
    kind: SnapshotKind
    state: SnapshotState
    sandbox_id: str
    template: str
    template_digest: str
    driver: str
    resources: ResourcesOut
    bytes: int
    failure: FailureOut | None
    operation_id: str
    created_at: datetime


class OperationOut(Out):
    """One lifecycle change. `timings` maps a phase to seconds."""

    id: str
    sandbox_id: str
    kind: str
    state: OperationState
    error: FailureOut | None
    timings: dict[str, float]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class Accepted(Out):
    sandbox: SandboxOut
    operation: OperationOut


class Forked(Out):
    sandboxes: list[SandboxOut]
    operation: OperationOut


class SnapshotAccepted(Out):
    snapshot: SnapshotOut
    operation: OperationOut


class AccessOut(Out):
    """Where the data plane is, and a token for it."""

    url: str
    token: str
    expires_at: datetime


class ExitOut(Out):
    kind: Literal["exited", "signaled", "timed-out", "oom-killed", "lost"]
    code: int | None
    signal: int | None


class E2BOut(Out):
    url: str | None
    """The base of both planes; null when E2B's clients are not served here."""
    domain: str | None
    """Where the clients find everything by name: `api.{domain}`, and each port as `{port}-{sandbox}.{domain}`."""


class CommandOut(Out):
    id: str
    sandbox_id: str
    argv: list[str]
    cwd: str | None
    env_names: list[str]
    user: str | None
    stdin: bool
    tty: TtyBody | None
    timeout_s: float | None
    output_mib: int
    tag: str | None = None
    pid: int | None = None
    """Of its first process, in the sandbox, once it has been started."""
    state: Literal["created", "running", "ended"]
    exit: ExitOut | None
    created_at: datetime
    forked_from: str | None = None
    """The command that it is the continuation of, in the sandbox that this one was forked from."""


class CommandCreated(Out):
    command: CommandOut
    attach: AccessOut


class ExecOut(Out):
    exit: ExitOut
    stdout: str
    stderr: str
    stdout_bytes: int
    stderr_bytes: int
    truncated: bool
    encoding: Literal["utf-8", "base64"]
    duration_s: float


class FileOut(Out):
    """What there is at a path. In a list `path` is relative to the directory."""

    name: str
    path: str
    type: Literal["file", "directory", "symlink", "fifo", "socket", "block", "character"]
    size: int
    mode: str
    user: str | None
    group: str | None
    uid: int
    gid: int
    modified_at: datetime | None
    target: str | None
    """Of a symbolic link: what it says."""


class FileList(Out):
    """What is in a directory, in no order."""

    entries: list[FileOut]


class FileWritten(Out):
    """A file that was written; `created` says whether it was not there before."""

    size: int
    created: bool


class DirectoryMade(Out):
    created: bool


class Unpacked(Out):
    """An archive that was unpacked; `skipped` entries would have come to lie elsewhere."""

    entries: int
    bytes: int
    skipped: int


class KeyOut(Out):
    """An API key. `key` is the secret itself, in the answer to its making and never again."""

    id: str
    project_id: str
    name: str
    role: Role
    created_at: datetime
    last_used_at: datetime | None
    key: str | None = None


class QuotaOut(Out):
    """What all sandboxes of a project may take together; null: no limit."""

    sandboxes: int | None
    cpus: float | None
    memory_mib: int | None
    disk_mib: int | None


class UsedOut(Out):
    """What they take: cpus and memory of those that have a machine; disks and snapshots until they are deleted."""

    sandboxes: int
    cpus: float
    memory_mib: int
    disk_mib: int


class ProjectOut(Out):
    id: str
    name: str
    created_at: datetime
    quota: QuotaOut
    used: UsedOut


class ProjectCreated(ProjectOut):
    """A project that was just made; `key` is its first API key, a member's, shown here and never again."""

    key: str | None


class SampleOut(Out):
    """Usage at one moment. `cpu_s`, `memory_peak_mib` and `oom_kills` count from the machine's start, and begin anew
    when it is woken or started; `pids` are tasks of the host.
    """

    at: datetime
    cpu_s: float | None
    memory_mib: float | None
    memory_peak_mib: float | None
    disk_mib: float | None
    pids: int | None
    oom_kills: int | None


class MetricsOut(Out):
    """`now` is null when the sandbox has no machine; `history` has what was asked for, oldest first."""

    now: SampleOut | None
    history: list[SampleOut]


class PoolShapeOut(Out):
    template_digest: str
    driver: str
    memory_mib: int
    warm: bool
    """Whether there is a snapshot of the template to restore machines from."""
    idle: int
    filling: int
    target: int
    claims: int
    restores: int
    boots: int


class PoolOut(Out):
    """Machines that are kept ready, by template, driver and size."""

    memory_mib: int
    memory_max_mib: int
    shapes: list[PoolShapeOut]


class StrayOut(Out):
    """Something that belonged to nobody."""

    kind: str
    name: str
    removed: bool


class GcOut(Out):
    strays: list[StrayOut]


class Page(Out):
    next_cursor: str | None


class SandboxPage(Page):
    items: list[SandboxOut]


class VolumePage(Page):
    items: list[VolumeOut]


class SnapshotPage(Page):
    items: list[SnapshotOut]


class ProjectPage(Page):
    items: list[ProjectOut]


class OperationPage(Page):
    items: list[OperationOut]


class CommandPage(Page):
    items: list[CommandOut]


class KeyPage(Page):
    items: list[KeyOut]


class ErrorOut(Out):
    """What went wrong. `kind` is the class of error that `code` belongs to, and says who must act."""

    code: str
    message: str
    kind: str
    details: dict[str, Any]
    request_id: str


class ErrorAnswer(Out):
    error: ErrorOut

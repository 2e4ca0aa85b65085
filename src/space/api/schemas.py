"""What requests and answers look like. Strict: an unknown field, or a value of another type, is named in an error."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from space.model.operation import OperationState
from space.model.project import Role
from space.model.sandbox import OnIdle, OnTimeout, Resources, State

FIELDS_MAX = 64
"""Members that an object of any request may have, known or not."""
METADATA_PAIRS_MAX = 64
METADATA_KEY_MAX = 128
METADATA_VALUE_BYTES_MAX = 1024
ENV_BYTES_MAX = 128 * 1024
ENV_VARIABLES_MAX = 2048
"""With a template's and a command's own ones still fewer than a guest takes."""
SECONDS_MAX = 365 * 24 * 3600
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
DEFAULTS = Resources()


def _metadata_value(text: str) -> str:
    if len(text.encode()) > METADATA_VALUE_BYTES_MAX:
        raise ValueError(f"may have at most {METADATA_VALUE_BYTES_MAX} bytes")
    return _without_nul(text)


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain NUL")
    return text


def _variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError("is not the name of an environment variable: empty, or with = or NUL in it")
    return name


def _env(env: dict[str, str]) -> dict[str, str]:
    if sum(len(name.encode()) + len(value.encode()) + 2 for name, value in env.items()) > ENV_BYTES_MAX:
        raise ValueError(f"may have at most {ENV_BYTES_MAX} bytes in all")
    return env


def _few(value: Any, most: int) -> Any:
    """Count an object's members before looking at any.

    Of a million wrong ones each would be described, which takes seconds in which nobody else is answered.
    """
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"may have at most {most} members")
    return value


Name = Annotated[str, StringConstraints(pattern=NAME)]
Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False)]
MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=METADATA_KEY_MAX), AfterValidator(_without_nul)]
Metadata = Annotated[
    dict[MetadataKey, Annotated[str, AfterValidator(_metadata_value)]],
    Field(max_length=METADATA_PAIRS_MAX),
    BeforeValidator(lambda value: _few(value, METADATA_PAIRS_MAX)),
]
Env = Annotated[
    dict[Annotated[str, AfterValidator(_variable)], Annotated[str, AfterValidator(_without_nul)]],
    AfterValidator(_env),
    BeforeValidator(lambda value: _few(value, ENV_VARIABLES_MAX)),
]


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        return _few(value, FIELDS_MAX)


class ResourcesBody(Body):
    """Limits of the machine: `cpus` in cores, sizes in MiB, `pids` processes and threads together."""

    cpus: Annotated[float, Field(ge=0.05, allow_inf_nan=False)] = DEFAULTS.cpus
    memory_mib: Annotated[int, Field(ge=64)] = DEFAULTS.memory_mib
    disk_mib: Annotated[int, Field(ge=64)] = DEFAULTS.disk_mib
    pids: Annotated[int, Field(ge=16)] = DEFAULTS.pids


class SandboxCreate(Body):
    """A sandbox to be made."""

    template: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """`name`, `name:tag` or `sha256:…`."""
    name: Name | None = None
    metadata: Metadata = {}
    env: Env = {}
    """Environment of every command; kept to the byte, never expanded, not shown again."""
    resources: ResourcesBody = ResourcesBody()
    driver: Literal["gvisor", "firecracker", "qemu"] | None = None
    timeout_s: Seconds | None = None
    """Seconds that the sandbox may run before `on_timeout`; begins again at wake and start. None: no limit."""
    on_timeout: OnTimeout = "delete"
    idle_timeout_s: Seconds | None = None
    """Kept and shown; not acted upon yet."""
    on_idle: OnIdle = "suspend"
    wake_on_request: bool = False
    """Whether a command or file request wakes the sandbox when it is paused, suspended or stopped."""


class SandboxChange(Body):
    """What to change; absent fields stay. `metadata` is replaced as a whole, `timeout_s` counts from now."""

    name: Name | None = None
    metadata: Metadata = {}
    timeout_s: Seconds | None = None
    on_timeout: OnTimeout = "delete"
    idle_timeout_s: Seconds | None = None
    on_idle: OnIdle = "suspend"
    wake_on_request: bool = False


class KeyCreate(Body):
    name: Name = "key"
    role: Role = Field(default=Role.MEMBER, strict=False)
    """An admin's key may also create projects. Only an admin can make one."""


class ProjectCreate(Body):
    name: Name


class TtyBody(Body):
    rows: Annotated[int, Field(ge=1, le=10_000)] = 24
    cols: Annotated[int, Field(ge=1, le=10_000)] = 80


class CommandCreate(Body):
    """A program: `argv` exactly, or `command` as shell text. The node checks it; this describes it."""

    argv: list[str] | None = None
    command: str | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    stdin: bool = False
    tty: TtyBody | None = None
    timeout_s: Seconds | None = None
    output_mib: Annotated[int, Field(ge=1, le=256)] = 16


class Exec(Body):
    """A program to be run to its end."""

    argv: list[str] | None = None
    command: str | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    stdin_text: str | None = None
    timeout_s: Seconds | None = None
    output_mib: Annotated[int, Field(ge=1, le=256)] = 16


class SignalBody(Body):
    signal: str | int
    tree: bool = True
    """Everything the command started, or only its first process."""


class DirectoryBody(Body):
    """A directory to be made. The node checks it; this describes it."""

    path: str
    mode: str | None = None
    """Permission bits in octal, such as 755."""
    parents: bool = True
    """Those above it too; and one that is there is fine."""
    user: str | None = None


class MoveBody(Body):
    """What to move, and where to. The node checks it; this describes it."""

    source: str
    destination: str
    overwrite: bool = True
    """Replace a file at the destination."""
    user: str | None = None


class Out(BaseModel):
    """An answer's body."""

    model_config = ConfigDict(from_attributes=True)


class FailureOut(Out):
    """Why something failed. `kind` is the class of error that `code` belongs to."""

    code: str
    message: str
    kind: str


class ResourcesOut(Out):
    cpus: float
    memory_mib: int
    disk_mib: int
    pids: int


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
    created_at: datetime
    updated_at: datetime


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


class AccessOut(Out):
    """Where the data plane is, and a token for it."""

    url: str
    token: str
    expires_at: datetime


class ExitOut(Out):
    kind: Literal["exited", "signaled", "timed-out", "oom-killed", "lost"]
    code: int | None
    signal: int | None


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
    state: Literal["created", "running", "ended"]
    exit: ExitOut | None
    created_at: datetime


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


class TemplateOut(Out):
    """One release of a template."""

    name: str
    tag: str
    digest: str
    defaults: dict[str, Any]
    driver: str | None
    bytes: int


class KeyOut(Out):
    """An API key. `key` is the secret itself, in the answer to its making and never again."""

    id: str
    project_id: str
    name: str
    role: Role
    created_at: datetime
    last_used_at: datetime | None
    key: str | None = None


class ProjectOut(Out):
    id: str
    name: str
    created_at: datetime


class ProjectCreated(ProjectOut):
    """A project that was just made; `key` is its first API key, a member's, shown here and never again."""

    key: str | None


class SampleOut(Out):
    """Usage at one moment; `cpu_s` counts from the machine's start."""

    at: datetime
    cpu_s: float | None
    memory_mib: float | None
    memory_peak_mib: float | None
    pids: float | None
    disk_mib: float | None


class MetricsOut(Out):
    """`now` is null when the sandbox has no machine; `history` has the last hour, one sample in 15 s."""

    now: SampleOut | None
    history: list[SampleOut]


class Page(Out):
    next_cursor: str | None


class SandboxPage(Page):
    items: list[SandboxOut]


class OperationPage(Page):
    items: list[OperationOut]


class CommandPage(Page):
    items: list[CommandOut]


class TemplatePage(Page):
    items: list[TemplateOut]


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

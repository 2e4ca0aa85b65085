"""What requests look like. Strict: an unknown field, or a value of another type, is named in an error."""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from space.model.project import Role
from space.model.sandbox import OnIdle, OnTimeout, Resources
from space.model.snapshot import SnapshotKind

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
FORKS_MAX = 64


def _metadata_value(text: str) -> str:
    if len(text.encode()) > METADATA_VALUE_BYTES_MAX:
        raise ValueError(f"may have at most {METADATA_VALUE_BYTES_MAX} bytes")
    return without_nul(text)


def without_nul(text: str) -> str:
    """Refuse what no program can be given."""
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
MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=METADATA_KEY_MAX), AfterValidator(without_nul)]
Metadata = Annotated[
    dict[MetadataKey, Annotated[str, AfterValidator(_metadata_value)]],
    Field(max_length=METADATA_PAIRS_MAX),
    BeforeValidator(lambda value: _few(value, METADATA_PAIRS_MAX)),
]
Env = Annotated[
    dict[Annotated[str, AfterValidator(_variable)], Annotated[str, AfterValidator(without_nul)]],
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
    """Limits of the machine: `cpus` in cores, sizes in MiB, `pids` processes and threads together.

    `io_weight` is its share of a busy disk beside other sandboxes. What is left out is the snapshot's, or what the
    template says.
    """

    cpus: Annotated[float, Field(ge=0.05, allow_inf_nan=False)] = DEFAULTS.cpus
    memory_mib: Annotated[int, Field(ge=64)] = DEFAULTS.memory_mib
    disk_mib: Annotated[int, Field(ge=64)] = DEFAULTS.disk_mib
    pids: Annotated[int, Field(ge=16)] = DEFAULTS.pids
    io_weight: Annotated[int, Field(ge=1, le=1000)] = DEFAULTS.io_weight


class SandboxChange(Body):
    """What to change; absent fields stay. `metadata` is replaced as a whole.

    `timeout_s` counts from now, and null means never; `idle_timeout_s` too.
    """

    name: Name | None = None
    metadata: Metadata = {}
    timeout_s: Seconds | None = None
    on_timeout: OnTimeout = "delete"
    idle_timeout_s: Seconds | None = None
    on_idle: OnIdle = "suspend"
    wake_on_request: bool = False


class SandboxFork(Body):
    """Sandboxes that go on from this one's state. What is left out is as in the source, but for the name."""

    count: Annotated[int, Field(ge=1, le=FORKS_MAX)] = 1
    name: Name | None = None
    """All of them have it."""
    metadata: Metadata = {}
    env: Env = {}
    """Environment of commands that begin from now on, in place of the source's."""
    timeout_s: Seconds | None = None
    on_timeout: OnTimeout = "delete"
    idle_timeout_s: Seconds | None = None
    on_idle: OnIdle = "suspend"
    wake_on_request: bool = False


class SnapshotCreate(Body):
    """A point to be kept."""

    name: Name | None = None
    kind: SnapshotKind = Field(default=SnapshotKind.FULL, strict=False)
    """`full`: memory, processes and files; `disk`: files alone."""


class QuotaBody(Body):
    """Limits to be changed; null takes one away."""

    sandboxes: Annotated[int, Field(ge=0, le=1 << 30)] | None = None
    cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    memory_mib: Annotated[int, Field(ge=0, le=1 << 40)] | None = None
    disk_mib: Annotated[int, Field(ge=0, le=1 << 40)] | None = None


class ProjectChange(Body):
    quota: QuotaBody


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
    tag: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """A name of the caller's own."""
    wait_output: bool = False
    """End only when all output is closed, also by what the program left running."""


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

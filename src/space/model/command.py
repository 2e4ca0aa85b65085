"""What a command is: one program run in a sandbox, and how it ended."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

OUTPUT_MIB_DEFAULT = 16


class ExitKind(StrEnum):
    EXITED = "exited"
    SIGNALED = "signaled"
    TIMED_OUT = "timed-out"
    OOM_KILLED = "oom-killed"
    LOST = "lost"


class CommandState(StrEnum):
    CREATED = "created"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Tty:
    rows: int = 24
    cols: int = 80


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A program to run. ``argv`` is exact; shell text is turned into ``["/bin/sh", "-c", text]`` before it gets here.

    ``user`` None means the template's default user, ``cwd`` None its working directory. ``timeout_s`` None means none.
    ``output_mib`` is how much of each stream is kept for replay (commands) or returned (exec).
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    stdin: bool = False
    tty: Tty | None = None
    timeout_s: float | None = None
    output_mib: int = OUTPUT_MIB_DEFAULT
    tag: str | None = None
    """A name of the caller's own."""
    wait_output: bool = False
    """Whether it ends only when all its output is closed, also by what it left running."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a command ended. ``code`` is set when it exited, ``signal`` when a signal ended it."""

    kind: ExitKind
    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """One command as the store knows it; its state and exit are the node's to tell."""

    id: str
    project_id: str
    sandbox_id: str
    spec: CommandSpec
    created_at: datetime

"""What the API's answers are to a program: frozen values, read leniently (unknown fields are kept in ``raw``)."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Self

from space.errors import CommandFailed

Json = dict[str, Any]

State = Literal[
    "creating",
    "running",
    "pausing",
    "paused",
    "resuming",
    "suspending",
    "suspended",
    "waking",
    "stopping",
    "stopped",
    "starting",
    "deleting",
    "deleted",
    "failed",
]
OperationState = Literal["pending", "running", "succeeded", "failed", "cancelled"]
CommandState = Literal["created", "running", "ended"]
ExitKind = Literal["exited", "signaled", "timed-out", "oom-killed", "lost"]
StreamName = Literal["stdout", "stderr", "tty"]
OnTimeout = Literal["delete", "suspend", "stop"]
OnIdle = Literal["pause", "suspend", "stop", "delete"]
SnapshotKind = Literal["full", "disk"]
SnapshotState = Literal["creating", "ready", "failed", "deleted"]

FINISHED: frozenset[OperationState] = frozenset({"succeeded", "failed", "cancelled"})
SIGNAL_BASE = 128
STATUS_TIMED_OUT = 124
STATUS_OOM_KILLED = 137
STATUS_LOST = 125


@dataclass(frozen=True, slots=True)
class Tty:
    """The size of a terminal."""

    rows: int = 24
    cols: int = 80


@dataclass(frozen=True, slots=True)
class Exit:
    """How a command ended. ``code`` is set when it exited by itself, ``signal`` when a signal ended it."""

    kind: ExitKind
    code: int | None = None
    signal: int | None = None

    @property
    def ok(self) -> bool:
        return self.kind == "exited" and self.code == 0

    @property
    def status(self) -> int:
        """One number as a shell would give: the code, 128 + signal, 124 timed out, 137 out of memory, 125 lost."""
        if self.kind == "timed-out":
            return STATUS_TIMED_OUT
        if self.kind == "oom-killed":
            return STATUS_OOM_KILLED
        if self.kind == "exited" and self.code is not None:
            return self.code
        if self.kind == "signaled" and self.signal is not None:
            return SIGNAL_BASE + self.signal
        return STATUS_LOST

    def __str__(self) -> str:
        if self.kind == "exited":
            return f"exited with {self.code}"
        if self.kind == "signaled":
            return f"ended by signal {self.signal}"
        return self.kind

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        return cls(kind=data["kind"], code=data.get("code"), signal=data.get("signal"))


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A command that has ended, with what it wrote. ``truncated`` says that it wrote more than the limit."""

    exit: Exit
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    truncated: bool = False
    duration_s: float | None = None

    @property
    def stdout(self) -> str:
        """Standard output as text; bytes that are not UTF-8 become U+FFFD (``stdout_bytes`` has them as they are)."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode(errors="replace")

    @property
    def ok(self) -> bool:
        return self.exit.ok

    def check(self) -> Self:
        """Return the result itself, or raise ``CommandFailed`` (which carries it) unless the command exited with 0."""
        if not self.ok:
            tail = self.stderr.strip().splitlines()[-1:] or [""]
            message = f"The command {self.exit}" + (f": {tail[0]}" if tail[0] else "")
            raise CommandFailed(message, result=self)
        return self

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        decode = base64.b64decode if data.get("encoding") == "base64" else str.encode
        return cls(
            exit=Exit.parse(data["exit"]),
            stdout_bytes=decode(data["stdout"]),
            stderr_bytes=decode(data["stderr"]),
            truncated=bool(data.get("truncated")),
            duration_s=data.get("duration_s"),
        )


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that a command wrote."""

    stream: StreamName
    offset: int
    data: bytes
    cut: bytes = field(default=b"", repr=False)
    """The beginning of a character that the chunk before this one ended in."""

    @property
    def text(self) -> str:
        """The text of this chunk: a character that is cut in two belongs to the later one as a whole."""
        whole = self.cut + self.data
        return whole[: len(whole) - len(begun_character(whole))].decode(errors="replace")


def begun_character(data: bytes) -> bytes:
    """Return the bytes at the end that are a character of UTF-8 only when more follow: three at most."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if byte & 0xC0 != 0x80:  # Not a continuation, so a character begins (or is) here.
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return data[len(data) - length :] if needed > length else b""
    return b""


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes ``start`` to ``end`` of a stream are no longer kept by the server."""

    stream: StreamName
    start: int
    end: int

    @property
    def data(self) -> bytes:
        """Nothing: so that joining the ``data`` of all events gives what is there."""
        return b""

    @property
    def text(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something failed: a stable code, a sentence, and the name of the error's class."""

    code: str
    message: str
    kind: str | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any] | None) -> Self | None:
        if not data:
            return None
        return cls(code=data.get("code", "failed"), message=data.get("message", ""), kind=data.get("kind"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """An exposed port of a sandbox.

    ``url`` is its own host, ``api_url`` the same by a path of the data plane: both take ``token`` as ``X-Space-Token``.
    ``browser_url`` lets a browser in. Who lists ports gets no token.
    """

    port: int
    public: bool
    url: str
    api_url: str
    host: str | None = None
    token: str | None = field(default=None, repr=False)
    expires_at: datetime | None = None
    browser_url: str | None = field(default=None, repr=False)
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            port=data["port"],
            public=data["public"],
            url=data["url"],
            api_url=data["api_url"],
            host=data.get("host"),
            token=data.get("token"),
            expires_at=parse_time(data.get("expires_at")),
            browser_url=data.get("browser_url"),
            raw=data,
        )


@dataclass(frozen=True, slots=True)
class Resources:
    """Limits of a sandbox: cores, sizes in MiB, a count of processes and threads, a share of a busy disk."""

    cpus: float | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    pids: int | None = None
    io_weight: int | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any] | None) -> Self:
        data = data or {}
        return cls(
            data.get("cpus"), data.get("memory_mib"), data.get("disk_mib"), data.get("pids"), data.get("io_weight")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """A sandbox as the API described it at one moment."""

    id: str
    state: State
    ready: bool = False
    name: str | None = None
    template: str | None = None
    template_digest: str | None = None
    driver: str | None = None
    resources: Resources = field(default_factory=Resources)
    metadata: dict[str, str] = field(default_factory=dict)
    created_at: datetime | None = None
    deadline_at: datetime | None = None
    timeout_s: float | None = None
    on_timeout: OnTimeout | None = None
    idle_timeout_s: float | None = None
    on_idle: OnIdle | None = None
    wake_on_request: bool = False
    forked_from: str | None = None
    """The sandbox whose state it began with."""
    failure: Failure | None = None
    operation_id: str | None = None
    """The lifecycle change that was asked for last."""
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            id=data["id"],
            state=data["state"],
            ready=bool(data.get("ready")),
            name=data.get("name"),
            template=data.get("template"),
            template_digest=data.get("template_digest"),
            driver=data.get("driver"),
            resources=Resources.parse(data.get("resources")),
            metadata=data.get("metadata") or {},
            created_at=parse_time(data.get("created_at")),
            deadline_at=parse_time(data.get("deadline_at")),
            timeout_s=data.get("timeout_s"),
            on_timeout=data.get("on_timeout"),
            idle_timeout_s=data.get("idle_timeout_s"),
            on_idle=data.get("on_idle"),
            wake_on_request=bool(data.get("wake_on_request")),
            forked_from=data.get("forked_from"),
            failure=Failure.parse(data.get("failure")),
            operation_id=data.get("operation_id"),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A kept moment of a sandbox: ``full`` with memory and processes, or its ``disk`` alone.

    Give it to ``Sandbox.create`` in the template's place.
    """

    id: str
    kind: SnapshotKind
    state: SnapshotState
    name: str | None = None
    sandbox_id: str | None = None
    template: str | None = None
    template_digest: str | None = None
    driver: str | None = None
    resources: Resources = field(default_factory=Resources)
    bytes: int | None = None
    failure: Failure | None = None
    operation_id: str | None = None
    created_at: datetime | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @property
    def reference(self) -> str:
        """What stands for it where a template's name is expected: ``snapshot:ID``."""
        return f"snapshot:{self.id}"

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            id=data["id"],
            kind=data["kind"],
            state=data["state"],
            name=data.get("name"),
            sandbox_id=data.get("sandbox_id"),
            template=data.get("template"),
            template_digest=data.get("template_digest"),
            driver=data.get("driver"),
            resources=Resources.parse(data.get("resources")),
            bytes=data.get("bytes"),
            failure=Failure.parse(data.get("failure")),
            operation_id=data.get("operation_id"),
            created_at=parse_time(data.get("created_at")),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One lifecycle change. ``timings`` maps a phase to seconds."""

    id: str
    kind: str
    state: OperationState
    sandbox_id: str | None = None
    error: Failure | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    timings: dict[str, float] = field(default_factory=dict)
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            id=data["id"],
            kind=data["kind"],
            state=data["state"],
            sandbox_id=data.get("sandbox_id"),
            error=Failure.parse(data.get("error")),
            created_at=parse_time(data.get("created_at")),
            started_at=parse_time(data.get("started_at")),
            finished_at=parse_time(data.get("finished_at")),
            timings=data.get("timings") or {},
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandInfo:
    """A command as the server described it at one moment."""

    id: str
    state: CommandState
    sandbox_id: str | None = None
    argv: tuple[str, ...] = ()
    tty: Tty | None = None
    exit: Exit | None = None
    produced: dict[StreamName, int] = field(default_factory=dict)
    """How many bytes each stream has had so far."""
    forked_from: str | None = None
    """The command that it is the continuation of, in the sandbox that this one was forked from."""
    created_at: datetime | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        ended, tty = data.get("exit"), data.get("tty")
        return cls(
            id=data["id"],
            state=data.get("state", "created"),
            sandbox_id=data.get("sandbox_id"),
            argv=tuple(data.get("argv") or ()),
            tty=Tty(tty.get("rows", 24), tty.get("cols", 80)) if isinstance(tty, dict) else None,
            exit=Exit.parse(ended) if ended else None,
            produced=data.get("produced") or {},
            forked_from=data.get("forked_from"),
            created_at=parse_time(data.get("created_at")),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """One file, directory or link in a sandbox. ``mode`` holds permission bits only (``0o644``)."""

    name: str
    path: str
    type: str
    size: int = 0
    mode: int = 0
    uid: int | None = None
    gid: int | None = None
    user: str | None = None
    group: str | None = None
    modified_at: datetime | None = None
    target: str | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        mode = data.get("mode", 0)
        path = str(data.get("path") or data.get("name", ""))
        return cls(
            name=str(data.get("name") or path.rstrip("/").rpartition("/")[2]),
            path=path,
            type=data["type"],
            size=data.get("size") or 0,
            mode=(int(mode, 8) if isinstance(mode, str) else mode) & 0o7777,
            uid=data.get("uid"),
            gid=data.get("gid"),
            user=data.get("user"),
            group=data.get("group"),
            modified_at=parse_time(data.get("modified_at")),
            target=data.get("target"),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One state change of a sandbox, from ``client.events()``."""

    type: str
    id: str | None = None
    data: Json = field(default_factory=dict)


def parse_time(text: str | None) -> datetime | None:
    """Read an RFC 3339 time."""
    return datetime.fromisoformat(text) if text else None

"""The options of creating sandboxes and commands, and the request bodies they become. No I/O."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from space.sdk.egress import NewGrant, PolicyReference
from space.sdk.requests import present
from space.sdk.types import OnIdle, OnTimeout, Snapshot, Tty

if TYPE_CHECKING:
    from space.sdk.templates import Template


class SandboxOptions(TypedDict, total=False):
    """How a sandbox is made. Whatever is left out is the server's default."""

    name: str
    """A name for people, also found by the command line; it need not be unique."""
    metadata: Mapping[str, str]
    """Anything the application wants to find it by: up to 64 pairs."""
    env: Mapping[str, str]
    """Environment of every command."""
    cpus: float
    """How many cores it may use; fractions are allowed."""
    memory_mib: int
    """How much memory it may use."""
    disk_mib: int
    """How much it may write to its disk."""
    pids: int
    """How many processes and threads it may have together."""
    io_weight: int
    """Its share of a busy disk beside other sandboxes, 1 to 1000."""
    driver: str
    """How it becomes a machine, such as ``gvisor``; otherwise the strongest way that works on the host."""
    timeout_s: float | None
    """Seconds until ``on_timeout`` happens, counted from creation, wake and start; None: never."""
    on_timeout: OnTimeout
    """What happens then: ``delete``, ``suspend`` or ``stop``."""
    idle_timeout_s: float | None
    """Seconds without a running command, an open connection or a transfer until ``on_idle`` happens; None: never."""
    on_idle: OnIdle
    """What happens then: ``pause``, ``suspend``, ``stop`` or ``delete``."""
    wake_on_request: bool
    """Wake a paused, suspended or stopped sandbox when a command or file request arrives."""
    policy: PolicyReference
    """What may leave it: a policy's document, a preset, or a policy's name; its template's or project's otherwise."""
    grants: Sequence[NewGrant]
    """Secrets that are placed into its requests, without being in it."""
    volumes: Mapping[str, str]
    """Volumes that it mounts: where, by their names, such as ``{"data": "/data"}``."""


class ForkOptions(TypedDict, total=False):
    """What a fork has of its own. Whatever is left out is as it is in the source, but for the name, which is none."""

    name: str
    """A name for people; all forks of one call have it."""
    metadata: Mapping[str, str]
    """Anything the application wants to find them by."""
    env: Mapping[str, str]
    """Environment of commands started from now on, in place of the source's."""
    timeout_s: float | None
    """Seconds until ``on_timeout`` happens; None: never."""
    on_timeout: OnTimeout
    """What happens then: ``delete``, ``suspend`` or ``stop``."""
    idle_timeout_s: float | None
    """Seconds without activity until ``on_idle`` happens; None: never."""
    on_idle: OnIdle
    """What happens then: ``pause``, ``suspend``, ``stop`` or ``delete``."""
    wake_on_request: bool
    """Wake a sleeping fork when a command or file request arrives."""


class SandboxChanges(TypedDict, total=False):
    """What can be changed of a sandbox. Whatever is left out stays."""

    name: str | None
    """Its name; None: none any more."""
    metadata: Mapping[str, str]
    """All of its metadata."""
    timeout_s: float | None
    """Seconds from now until ``on_timeout`` happens; None: never."""
    on_timeout: OnTimeout
    """What happens then: ``delete``, ``suspend`` or ``stop``."""
    idle_timeout_s: float | None
    """Seconds without activity until ``on_idle`` happens; None: never."""
    on_idle: OnIdle
    """What happens then: ``pause``, ``suspend``, ``stop`` or ``delete``."""
    wake_on_request: bool
    """Wake it when it sleeps and a command or file request arrives."""


class CommandOptions(TypedDict, total=False):
    """How a command runs."""

    cwd: str
    """The directory it starts in; the template's otherwise."""
    env: Mapping[str, str]
    """Its environment, over that of the sandbox; kept to the byte, never expanded."""
    user: str
    """Who runs it: ``name``, ``uid``, ``name:group`` or ``uid:gid``; the template's user otherwise."""
    timeout_s: float
    """After so many seconds everything the command started is killed; the exit's kind is then ``timed-out``."""
    output_mib: int
    """How much of each stream is returned (``run``) or kept for replay (``start``)."""


_RESOURCES = ("cpus", "memory_mib", "disk_mib", "pids", "io_weight")


def sandbox_body(template: "str | Snapshot | Template", options: SandboxOptions) -> dict[str, Any]:
    """Return the body of ``POST /v1/sandboxes``. Raises ``TypeError`` for an option that does not exist."""
    chosen = _known(options, SandboxOptions)
    resources = {name: chosen.pop(name) for name in _RESOURCES if name in chosen}
    if "volumes" in chosen:
        chosen["volumes"] = [{"name": name, "path": path} for name, path in chosen["volumes"].items()]
    start = template if isinstance(template, str) else template.reference
    return {"template": start, **chosen, **({"resources": resources} if resources else {})}


def fork_body(count: int, options: ForkOptions) -> dict[str, Any]:
    """Return the body of ``POST …/fork``. Raises ``TypeError`` for an option that does not exist."""
    return {"count": count, **given(options, ForkOptions)}


def change_body(changes: SandboxChanges) -> dict[str, Any]:
    """Return the body of ``PATCH /v1/sandboxes/{id}``. Raises ``TypeError`` for something that cannot be changed."""
    return given(changes, SandboxChanges)


def command_body(
    command: str | Sequence[str], options: CommandOptions, *, stdin: bool | None = None, tty: Tty | None = None
) -> dict[str, Any]:
    """Return the body of ``…/commands`` and ``…/exec``: text goes through the sandbox's shell, a sequence does not."""
    program = {"command": command} if isinstance(command, str) else {"argv": list(command)}
    terminal = {"rows": tty.rows, "cols": tty.cols} if tty else None
    return {**program, **_known(options, CommandOptions), **present(stdin=stdin, tty=terminal)}


def _known(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the options that have a value: None is as good as left out."""
    return present(**given(options, kind))


def given(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the options as they are, None too, where it says something of its own: never, or no longer."""
    for name in options:
        if name not in kind.__annotations__:
            raise TypeError(f"There is no option {name!r}; there are {', '.join(sorted(kind.__annotations__))}.")
    return dict(options)

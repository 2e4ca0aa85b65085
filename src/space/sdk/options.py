"""The options of creating sandboxes and commands, and the request bodies they become. No I/O."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from space.sdk.requests import present
from space.sdk.types import OnIdle, OnTimeout, Tty


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
    driver: str
    """How it becomes a machine, such as ``gvisor``; otherwise the strongest way that works on the host."""
    timeout_s: float
    """Seconds until ``on_timeout`` happens, counted from creation; ``update`` of the sandbox moves it."""
    on_timeout: OnTimeout
    """What happens then: ``delete``, ``suspend`` or ``stop``."""
    idle_timeout_s: float
    """Kept and shown; not acted upon yet."""
    on_idle: OnIdle
    """Kept and shown; not acted upon yet."""
    wake_on_request: bool
    """Wake a paused, suspended or stopped sandbox when a command or file request arrives."""


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


_RESOURCES = ("cpus", "memory_mib", "disk_mib", "pids")


def sandbox_body(template: str, options: SandboxOptions) -> dict[str, Any]:
    """Return the body of ``POST /v1/sandboxes``. Raises ``TypeError`` for an option that does not exist."""
    given = _known(options, SandboxOptions)
    resources = {name: given.pop(name) for name in _RESOURCES if name in given}
    return {"template": template, **given, **({"resources": resources} if resources else {})}


def command_body(
    command: str | Sequence[str], options: CommandOptions, *, stdin: bool | None = None, tty: Tty | None = None
) -> dict[str, Any]:
    """Return the body of ``…/commands`` and ``…/exec``: text goes through the sandbox's shell, a sequence does not."""
    program = {"command": command} if isinstance(command, str) else {"argv": list(command)}
    terminal = {"rows": tty.rows, "cols": tty.cols} if tty else None
    return {**program, **_known(options, CommandOptions), **present(stdin=stdin, tty=terminal)}


def _known(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    for name in options:
        if name not in kind.__annotations__:
            raise TypeError(f"There is no option {name!r}; there are {', '.join(sorted(kind.__annotations__))}.")
    return present(**options)

"""The options of creating sandboxes and commands, and the request bodies they become. No I/O."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from space.sdk.requests import present
from space.sdk.types import OnIdle, OnTimeout, Tty


class SandboxOptions(TypedDict, total=False):
    """How a sandbox is made. Whatever is left out is the server's default."""

    name: str
    metadata: Mapping[str, str]
    env: Mapping[str, str]
    """Environment of every command."""
    cpus: float
    memory_mib: int
    disk_mib: int
    pids: int
    driver: str
    timeout_s: float
    """Seconds until ``on_timeout`` happens, counted from creation; `AsyncSandbox.update` moves it."""
    on_timeout: OnTimeout
    idle_timeout_s: float
    on_idle: OnIdle
    wake_on_request: bool
    """Wake a paused, suspended or stopped sandbox when a command or file request arrives."""


class CommandOptions(TypedDict, total=False):
    """How a command runs."""

    cwd: str
    env: Mapping[str, str]
    user: str
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

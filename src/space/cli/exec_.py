"""`space exec`."""

from typing import TYPE_CHECKING, Any

import typer

from space.cli import streaming, terminal
from space.cli.failures import PLATFORM, fail, program_status
from space.cli.targets import (
    CwdOption,
    EnvOption,
    NoStdinOption,
    ProgramArgument,
    SandboxArgument,
    TimeoutOption,
    TtyOption,
    UserOption,
    find,
    open_client,
    pairs,
)
from space.errors import SpaceError

if TYPE_CHECKING:
    from space import Command, Sandbox


def exec_(
    sandbox: SandboxArgument,
    program: ProgramArgument,
    env: EnvOption = [],
    user: UserOption = None,
    cwd: CwdOption = None,
    timeout: TimeoutOption = None,
    no_stdin: NoStdinOption = False,
    tty: TtyOption = False,
) -> None:
    """Run a program in a sandbox.

    Its output is passed on as it comes; standard input too, when that is a pipe or a file. The status is the program's
    own; 128 + N when signal N ended it, 124 when --timeout did, 125 when SPACE failed, 127 when there is no such
    program.
    """
    variables = pairs(env, "--env")
    try:
        with open_client() as client:
            stdin = not no_stdin and streaming.stdin_is_for_programs()
            command = start(
                find(client, sandbox),
                program,
                stdin=stdin,
                tty=tty,
                env=variables,
                user=user,
                cwd=cwd,
                timeout_s=timeout,
            )
            if tty:
                terminal.hand_over(command)
                status = command.exit.status if command.exit else PLATFORM
            else:
                status = streaming.run_through(command, stdin=stdin)
    except SpaceError as error:
        fail(error, program_status(error))
    raise typer.Exit(status)


def start(sandbox: "Sandbox", program: list[str], *, stdin: bool, tty: bool, **options: Any) -> "Command":
    """Start a program whose words are given, in a terminal like this one if asked for."""
    if tty and not terminal.is_terminal():
        raise typer.BadParameter("there is no terminal here", param_hint="--tty")
    words = program[1:] if program[:1] == ["--"] else program
    given = {name: value for name, value in options.items() if value}
    return sandbox.start(words, stdin=stdin, tty=terminal.size() if tty else None, **given)

"""`space exec`."""

import sys
from typing import TYPE_CHECKING, Any

import typer

from space.cli import show, streaming, terminal
from space.cli.failures import PLATFORM, fail, program_status
from space.cli.targets import (
    CwdOption,
    EnvOption,
    JsonOption,
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
    as_json: JsonOption = False,
) -> None:
    """Run a program in a sandbox.

    Its output is passed on as it comes; standard input too, when that is a pipe or a file. The status is the program's
    own; 128 + N when signal N ended it, 124 when --timeout did, 125 when SPACE failed, 127 when there is no such
    program.
    """
    options = {"env": pairs(env, "--env"), "user": user, "cwd": cwd, "timeout_s": timeout}
    try:
        with open_client() as client:
            status = carry_out(find(client, sandbox), program, options, stdin=not no_stdin, tty=tty, as_json=as_json)
    except SpaceError as error:
        fail(error, program_status(error))
    raise typer.Exit(status)


def carry_out(
    sandbox: "Sandbox", program: list[str], options: dict[str, Any], *, stdin: bool, tty: bool, as_json: bool
) -> int:
    """Run a program as the command line asked for; return the status to exit with."""
    stdin = stdin and streaming.stdin_is_for_programs()
    if as_json:
        return _run_for_programs(sandbox, program, options, stdin=stdin)
    command = start(sandbox, program, stdin=stdin, tty=tty, **options)
    if not tty:
        return streaming.run_through(command, stdin=stdin)
    terminal.hand_over(command)
    return command.exit.status if command.exit else PLATFORM


def _run_for_programs(sandbox: "Sandbox", program: list[str], options: dict[str, Any], *, stdin: bool) -> int:
    data = sys.stdin.buffer.read() if stdin else None
    result = sandbox.run(_words(program), stdin=data, **_given(options))
    ended = {"kind": result.exit.kind, "code": result.exit.code, "signal": result.exit.signal}
    output = {"stdout": result.stdout, "stderr": result.stderr, "truncated": result.truncated}
    show.document({"exit": ended, **output, "duration_s": result.duration_s})
    return result.exit.status


def _words(program: list[str]) -> list[str]:
    return program[1:] if program[:1] == ["--"] else program


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value}


def start(sandbox: "Sandbox", program: list[str], *, stdin: bool, tty: bool, **options: Any) -> "Command":
    """Start a program whose words are given, in a terminal like this one if asked for."""
    if tty and not terminal.is_terminal():
        raise typer.BadParameter("there is no terminal here", param_hint="--tty")
    return sandbox.start(_words(program), stdin=stdin, tty=terminal.size() if tty else None, **_given(options))

"""`space shell`."""

import os
import sys
from typing import Annotated

import typer

from space.cli import terminal
from space.cli.exec_ import start
from space.cli.failures import PLATFORM, USAGE
from space.cli.targets import CwdOption, EnvOption, SandboxArgument, UserOption, find, open_client, pairs

SHELL = ["/bin/sh", "-c", "if [ -x /bin/bash ]; then exec /bin/bash -l; else exec /bin/sh -l; fi"]
TAIL_BYTES = 32 * 1024
"""How much of a terminal's past is shown to whoever comes back to it."""


def shell(
    sandbox: SandboxArgument,
    program: Annotated[
        list[str] | None, typer.Argument(metavar="[--] [PROGRAM ARGUMENT...]", help="Default: bash, or sh.")
    ] = None,
    attach: Annotated[
        str | None, typer.Option("--attach", "-a", metavar="COMMAND", help="Come back to a terminal that was left.")
    ] = None,
    env: EnvOption = [],
    user: UserOption = None,
    cwd: CwdOption = None,
) -> None:
    """Open a terminal in a sandbox. Ctrl-] leaves it running, and says how to come back.

    Everything else that is typed goes to the program, Ctrl-C and Ctrl-D too. The status is the program's own.
    """
    if not terminal.is_terminal():
        print("space: `space shell` needs a terminal, in and out.", file=sys.stderr)
        print("       `space exec SANDBOX -- PROGRAM` works without one.", file=sys.stderr)
        raise typer.Exit(USAGE)
    with open_client() as client:
        found = find(client, sandbox)
        if attach:
            command = found.command(attach, tail_bytes=TAIL_BYTES)
        else:
            variables = {"TERM": os.environ.get("TERM", "xterm-256color"), **pairs(env, "--env")}
            command = start(found, program or SHELL, stdin=True, tty=True, env=variables, user=user, cwd=cwd)
        if not terminal.hand_over(command, redraw=bool(attach)):
            print(
                f"\r\nspace: left running. Come back with: space shell {sandbox} --attach {command.id}", file=sys.stderr
            )
            return
        raise typer.Exit(command.exit.status if command.exit else PLATFORM)

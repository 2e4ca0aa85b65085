"""`space resume`."""

from typing import Annotated

import typer

from space.cli.lifecycle import change
from space.cli.targets import JsonOption, SandboxArguments


def resume(
    sandboxes: SandboxArguments,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the operation's id at once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Let paused sandboxes go on."""
    change(sandboxes, "resume", as_json=as_json, wait=not no_wait)

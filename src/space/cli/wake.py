"""`space wake`."""

from typing import Annotated

import typer

from space.cli.lifecycle import change
from space.cli.targets import JsonOption, SandboxArguments


def wake(
    sandboxes: SandboxArguments,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the operation's id at once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make paused, suspended or stopped sandboxes run again."""
    change(sandboxes, "wake", as_json=as_json, wait=not no_wait)

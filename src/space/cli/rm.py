"""`space rm`."""

from typing import Annotated

import typer

from space.cli.lifecycle import change
from space.cli.targets import JsonOption, SandboxArguments


def rm(
    sandboxes: SandboxArguments,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the operation's id at once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete sandboxes with everything in them, whatever their state."""
    change(sandboxes, "delete", as_json=as_json, wait=not no_wait)

"""`space pause`."""

from typing import Annotated

import typer

from space.cli.lifecycle import change
from space.cli.targets import JsonOption, SandboxArguments


def pause(
    sandboxes: SandboxArguments,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the operation's id at once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop the sandboxes' CPUs; their memory stays where it is."""
    change(sandboxes, "pause", as_json=as_json, wait=not no_wait)

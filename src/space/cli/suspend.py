"""`space suspend`."""

from typing import Annotated

import typer

from space.cli.lifecycle import change
from space.cli.targets import JsonOption, SandboxArguments


def suspend(
    sandboxes: SandboxArguments,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the operation's id at once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Save memory to disk and give the host's memory back."""
    change(sandboxes, "suspend", as_json=as_json, wait=not no_wait)

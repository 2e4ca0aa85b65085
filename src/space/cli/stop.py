"""`space stop`."""

from typing import Annotated

import typer

from space.cli.lifecycle import change
from space.cli.targets import JsonOption, SandboxArguments


def stop(
    sandboxes: SandboxArguments,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the operation's id at once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """End all processes of the sandboxes; their disks are kept."""
    change(sandboxes, "stop", as_json=as_json, wait=not no_wait)

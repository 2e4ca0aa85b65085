"""`space inspect`."""

from typing import Annotated, Any

import typer

from space.cli import show
from space.cli.targets import JsonOption, complete_sandbox, find, open_client


def inspect(
    thing: Annotated[
        str,
        typer.Argument(
            metavar="THING",
            help="A sandbox's id or name, or a command's or operation's id.",
            autocompletion=complete_sandbox,
        ),
    ],
    metrics: Annotated[bool, typer.Option("--metrics", help="Also what the sandbox uses now.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show all about a sandbox, a command or an operation."""
    with open_client() as client:
        found: dict[str, Any]
        if thing.startswith("cmd"):
            found = client.command_info(thing).raw
        elif thing.startswith("op"):
            found = client.operations.get(thing).raw
        else:
            sandbox = find(client, thing)
            found = dict(sandbox.info.raw)
            if metrics:
                found["usage"] = sandbox.metrics()["now"]
    if as_json:
        show.document(found)
    else:
        show.fields(found)

"""`space keys`."""

import sys
from typing import Annotated

import typer

from space.cli import show
from space.cli.targets import JsonOption, open_client

app = typer.Typer(name="keys", help="Make, list and revoke API keys of the project.", no_args_is_help=True)


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="What it is for.")] = None, as_json: JsonOption = False
) -> None:
    """Make a key and print it. It is shown this once."""
    with open_client() as client:
        key = client.keys.create(name)
    if as_json:
        show.document(key.raw)
    else:
        print(f"space: key {key.id}; keep what follows, it is not shown again", file=sys.stderr)
        print(key.key)


@app.command()
def ls(as_json: JsonOption = False) -> None:
    """List the project's keys, without their secrets."""
    with open_client() as client:
        found = list(client.keys.list())
    if as_json:
        show.document([key.raw for key in found])
    else:
        show.table(
            ["KEY", "NAME", "CREATED", "LAST USED"],
            [[k.id, k.name or "-", show.ago(k.created_at), show.ago(k.last_used_at)] for k in found],
        )


@app.command()
def revoke(key: Annotated[str, typer.Argument(metavar="KEY", help="The key's id (not the key itself).")]) -> None:
    """Make a key worthless at once."""
    with open_client() as client:
        client.keys.revoke(key)

"""`space volume`."""

from typing import Annotated

import typer

from space.cli import show
from space.cli.targets import JsonOption, open_client

app = typer.Typer(
    name="volume", help="Directories that outlive sandboxes and are shared by them.", no_args_is_help=True
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What it is called.")]


@app.command()
def create(
    name: NameArgument,
    size: Annotated[int | None, typer.Option("--size", metavar="MIB", min=16, help="How much it holds.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a volume. `space create --volume NAME:PATH` mounts it."""
    with open_client() as client:
        made = client.volumes.create(name, size_mib=size)
    if as_json:
        show.document(made.raw)
    else:
        print(made.name)


@app.command()
def ls(as_json: JsonOption = False) -> None:
    """List the project's volumes, newest first."""
    with open_client() as client:
        found = list(client.volumes.list())
    if as_json:
        show.document([one.raw for one in found])
    else:
        show.table(
            ["VOLUME", "SIZE", "SANDBOXES", "MADE"],
            [[v.name, f"{v.size_mib} MiB", str(v.sandboxes), show.ago(v.created_at)] for v in found],
        )


@app.command()
def rm(name: NameArgument) -> None:
    """Delete a volume with all that is in it. It is refused while a sandbox mounts it."""
    with open_client() as client:
        client.volumes.delete(name)

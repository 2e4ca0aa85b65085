"""`space snapshot`."""

import re
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from space.cli import show
from space.cli.failures import ERROR, tell
from space.cli.targets import JsonOption, SandboxArgument, find, open_client
from space.errors import InvalidRequest, NotFound, SpaceError

if TYPE_CHECKING:
    from space import Client, Snapshot

app = typer.Typer(
    name="snapshot", help="Keep moments of sandboxes, and list, show and delete them.", no_args_is_help=True
)
_ID = re.compile(r"snp[a-z2-7]{16}")
_PREFIX = "snapshot:"


@app.command()
def create(
    sandbox: SandboxArgument,
    name: Annotated[str | None, typer.Argument(help="What to call it.")] = None,
    kind: Annotated[
        str, typer.Option("--kind", metavar="full|disk", help="With memory and processes, or the files alone.")
    ] = "full",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until it is kept.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Keep a sandbox's present state, and print the snapshot's id.

    `space create snapshot:ID` makes a sandbox that goes on from it.
    """
    with open_client() as client:
        source = find(client, sandbox)
        made = source.snapshot(name, kind=cast("Any", kind), wait_s=None if no_wait else 300.0)
    if as_json:
        show.document(made.raw)
    else:
        print(made.id)


@app.command()
def ls(as_json: JsonOption = False) -> None:
    """List the project's snapshots, newest first."""
    with open_client() as client:
        found = list(client.snapshots.list())
    if as_json:
        show.document([one.raw for one in found])
    else:
        show.table(
            ["SNAPSHOT", "NAME", "KIND", "STATE", "SIZE", "SANDBOX", "CREATED"],
            [
                [s.id, s.name or "-", s.kind, s.state, show.size(s.bytes), s.sandbox_id or "-", show.ago(s.created_at)]
                for s in found
            ],
        )


SnapshotArgument = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Its id, or its name.")]


@app.command()
def inspect(snapshot: SnapshotArgument, as_json: JsonOption = False) -> None:
    """Show all about a snapshot."""
    with open_client() as client:
        found = find_snapshot(client, snapshot).raw
    if as_json:
        show.document(found)
    else:
        show.fields(found)


@app.command()
def rm(
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="Ids or names.")],
    as_json: JsonOption = False,
) -> None:
    """Delete snapshots. Sandboxes that were made from them live on.

    One that fails does not keep the others; the status is 1 then.
    """
    failed = False
    with open_client() as client:
        for name in snapshots:
            try:
                found = find_snapshot(client, name)
                client.snapshots.delete(found)
            except SpaceError as error:
                tell(error)
                failed = True
            else:
                if as_json:
                    show.document({"id": found.id, "state": "deleted"})
    if failed:
        raise typer.Exit(ERROR)


def find_snapshot(client: "Client", text: str) -> "Snapshot":
    """Return the snapshot with that id (``snapshot:`` may stand in front), or the only one with that name."""
    text = text.removeprefix(_PREFIX)
    if _ID.fullmatch(text):
        return client.snapshots.get(text)
    found = list(client.snapshots.list(name=text))
    if not found:
        raise NotFound(f"There is no snapshot {text!r}.", snapshot=text)
    if len(found) > 1:
        ids = ", ".join(one.id for one in found)
        raise InvalidRequest(f"{len(found)} snapshots are named {text!r}: {ids}.", code="ambiguous-name")
    return found[0]

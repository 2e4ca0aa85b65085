"""`space ls`."""

from typing import Annotated, Any, cast

import typer

from space.cli import show
from space.cli.targets import JsonOption, MetadataOption, open_client, pairs


def ls(
    state: Annotated[str | None, typer.Option("--state", help="Only those in this state.")] = None,
    metadata: MetadataOption = [],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only ids.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the project's sandboxes, newest first."""
    with open_client() as client:
        found = list(client.sandboxes(state=cast("Any", state), metadata=pairs(metadata, "--metadata")))
    if as_json:
        show.document([info.raw for info in found])
    elif quiet:
        for info in found:
            print(info.id)
    else:
        show.table(
            ["SANDBOX", "NAME", "STATE", "TEMPLATE", "DRIVER", "CREATED"],
            [[i.id, i.name or "-", i.state, i.template or "-", i.driver or "-", show.ago(i.created_at)] for i in found],
        )

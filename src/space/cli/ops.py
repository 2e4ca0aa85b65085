"""`space ops`."""

from typing import Annotated

import typer

from space.cli import show
from space.cli.targets import JsonOption, open_client


def ops(
    operation: Annotated[str | None, typer.Argument(metavar="OPERATION", help="One operation's id.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has finished; status 1 when it failed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List lifecycle changes, newest first, or show one with its timings."""
    if wait and operation is None:
        raise typer.BadParameter("say which operation", param_hint="OPERATION")
    with open_client() as client:
        if operation is None:
            found = list(client.operations.list())
        else:
            found = [client.operations.wait(operation) if wait else client.operations.get(operation)]
    if as_json:
        raw = [one.raw for one in found]
        show.document(raw if operation is None else raw[0])
    elif operation is not None:
        show.fields(found[0].raw)
    else:
        show.table(
            ["OPERATION", "KIND", "STATE", "SANDBOX", "CREATED", "ERROR"],
            [
                [o.id, o.kind, o.state, o.sandbox_id or "-", show.ago(o.created_at), o.error.code if o.error else "-"]
                for o in found
            ],
        )

"""`space down`."""

from typing import Annotated

import typer

from space.cli.supervision import supervise


def down(
    keep_machines: Annotated[
        bool,
        typer.Option("--keep-machines", help="Leave the sandboxes' machines running; `space up` finds them again."),
    ] = False,
) -> None:
    """Stop SPACE on this machine; data stays. scripts/down also unmounts and sweeps."""
    if not keep_machines:
        supervise("stop-sandboxes")
    supervise("stop")

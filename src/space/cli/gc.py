"""`space gc`."""

from typing import Annotated

import typer

from space.cli import show
from space.cli.targets import JsonOption, open_client

DAY_S = 24 * 3600
MIB = 1024 * 1024


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show it.")] = False,
    untagged_days: Annotated[
        float | None,
        typer.Option(
            "--untagged-days",
            min=0,
            help="Also releases of templates that no tag has pointed to for so long and nothing is made from.",
        ),
    ] = None,
    cache_days: Annotated[
        float | None, typer.Option("--cache-days", min=0, help="Also kept steps of builds not used for so long.")
    ] = None,
    cache_mib: Annotated[
        int | None, typer.Option("--cache-mib", min=0, help="Also kept steps beyond so much, the oldest first.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what on the host bears SPACE's names and belongs to nobody, and show it.

    SPACE does so by itself from time to time, but for what the options name. Status 0 whether or not there was
    something.
    """
    with open_client() as client:
        found = client.gc(
            dry_run=dry_run,
            untagged_s=None if untagged_days is None else untagged_days * DAY_S,
            cache_age_s=None if cache_days is None else cache_days * DAY_S,
            cache_bytes_max=None if cache_mib is None else cache_mib * MIB,
        )
    if as_json:
        show.document([stray.raw for stray in found])
    else:
        show.table(["KIND", "NAME", "REMOVED"], [[one.kind, one.name, "yes" if one.removed else "no"] for one in found])

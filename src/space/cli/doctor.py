"""`space doctor`."""

import os
import sys

import typer

from space.cli.supervision import as_root
from space.cli.targets import JsonOption


def doctor(as_json: JsonOption = False) -> None:
    """Say what this host can do and what it lacks.

    Status 1 when something is missing that SPACE needs (FAIL); it can do without what a note is about.
    """
    if os.geteuid() != 0:
        print("space: not root, so some things cannot be tried: `sudo space doctor` can.", file=sys.stderr)
    raise typer.Exit(as_root("space.broker.doctor", *(["--json"] if as_json else []), root=False))

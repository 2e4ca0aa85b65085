"""`space up`."""

import sys

from space.cli.supervision import supervise


def up() -> None:
    """Start SPACE on this machine.

    It must have been set up before with scripts/up. Returns when everything is ready.
    """
    print("space: starting; that takes some seconds.", file=sys.stderr)
    supervise("start")
    print("space: everything is ready. `space down` stops it.", file=sys.stderr)

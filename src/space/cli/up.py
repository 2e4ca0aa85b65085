"""`space up`."""

from space.cli.supervision import supervise


def up() -> None:
    """Start SPACE on this machine.

    It must have been set up before with scripts/up. Returns when everything is ready.
    """
    supervise("start")

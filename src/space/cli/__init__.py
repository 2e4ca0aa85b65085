"""The command line `space`: one module for each subcommand. Imports only the SDK, and that late, to start fast."""

__all__ = ["main"]


def main() -> None:
    """Run the command line that this process was started with, and exit with its status."""
    from space.cli.app import run

    run()

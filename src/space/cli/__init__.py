"""The space command."""


def main() -> None:
    """Run the command line."""

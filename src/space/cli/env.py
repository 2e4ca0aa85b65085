"""`space env`."""

import shlex

from space.cli import show
from space.cli.targets import JsonOption


def env(as_json: JsonOption = False) -> None:
    """Print SPACE_URL and SPACE_API_KEY for a shell to eval."""
    from space.sdk.config import find_credentials

    found = find_credentials()
    if as_json:
        show.document({"SPACE_URL": found.url, "SPACE_API_KEY": found.api_key})
        return
    print(f"export SPACE_URL={shlex.quote(found.url)}")
    print(f"export SPACE_API_KEY={shlex.quote(found.api_key)}")

"""`space env`."""

import shlex
from typing import Annotated

import typer

from space.cli import show
from space.cli.targets import JsonOption, open_client

E2BOption = Annotated[bool, typer.Option("--e2b", help="What E2B's clients need to use this installation.")]


def env(e2b: E2BOption = False, as_json: JsonOption = False) -> None:
    """Print SPACE_URL and SPACE_API_KEY for a shell to eval, or what E2B's clients read instead."""
    if e2b:
        with open_client() as client:
            variables = client.e2b_environment()
    else:
        from space.sdk.config import find_credentials

        found = find_credentials()
        variables = {"SPACE_URL": found.url, "SPACE_API_KEY": found.api_key}
    if as_json:
        show.document(variables)
        return
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")

"""`space secret`."""

from enum import StrEnum
from typing import Annotated, Any, cast

import typer

from space.cli import show
from space.cli.failures import ERROR
from space.cli.governing import read_value
from space.cli.targets import JsonOption, open_client

app = typer.Typer(
    name="secret", help="Keep values that requests get without sandboxes having them.", no_args_is_help=True
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What it is called.")]


class Kind(StrEnum):
    TEXT = "text"
    BASIC = "basic"
    AWS = "aws"
    OAUTH = "oauth"


@app.command("set")
def set_one(
    name: NameArgument,
    kind: Annotated[Kind, typer.Option("--kind", help="What it is; all but text are JSON objects.")] = Kind.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Keep a secret, or give it its next value, which every request gets from then on.

    The value is read from standard input, or asked for at a terminal; never from the command line. Of `basic` it has
    username and password, of `aws` access_key_id, secret_access_key and perhaps session_token, of `oauth` token_url,
    client_id, and client_secret or refresh_token.
    """
    value = read_value(kind)
    with open_client() as client:
        kept = client.secrets.set(name, value, kind=cast("Any", str(kind)))
    if as_json:
        show.document(kept.raw)
    else:
        print(f"{kept.name} version {kept.version}")


@app.command()
def ls(as_json: JsonOption = False) -> None:
    """List the project's secrets, newest first, without their values."""
    with open_client() as client:
        found = list(client.secrets.list())
    if as_json:
        show.document([one.raw for one in found])
    else:
        show.table(
            ["SECRET", "KIND", "VERSION", "GRANTS", "STATE", "CHANGED"],
            [[s.name, s.kind, str(s.version), str(s.grants), _state(s.failure), show.ago(s.updated_at)] for s in found],
        )


@app.command()
def rm(name: NameArgument) -> None:
    """Delete a secret and revoke its grants: no request gets it any more."""
    with open_client() as client:
        client.secrets.delete(name)


@app.command("rotate-key")
def rotate_key(as_json: JsonOption = False) -> None:
    """Seal everybody's secrets with a new key, as an admin. The status is 1 when some could not be opened."""
    with open_client() as client:
        done = client.secrets.rotate_key()
    if as_json:
        show.document(done)
    else:
        print(f"Secrets sealed with {done['key_id']}: {done['sealed']}; failed: {done['failed']}")
    if done["failed"]:
        raise typer.Exit(ERROR)


def _state(failure: Any) -> str:
    return "ok" if failure is None else str(failure.code)

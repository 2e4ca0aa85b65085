"""`space cp`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from space.cli.targets import UserOption, find, open_client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from space import Sandbox

CHUNK_BYTES = 128 * 1024


def cp(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A local path, `-` for standard input, or SANDBOX:PATH.")
    ],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A local path, `-` for standard output, or SANDBOX:PATH.")
    ],
    user: UserOption = None,
) -> None:
    """Copy files and directories into or out of a sandbox.

    Into a directory that exists the source goes under its own name, as with cp. Write local paths that have a colon as
    ./PATH. Links that would lead out of the target are left out, and named.
    """
    from_sandbox, to_sandbox = remote(source), remote(target)
    if (from_sandbox is None) == (to_sandbox is None):
        raise typer.BadParameter("one of both must be SANDBOX:PATH, and the other local", param_hint="SOURCE TARGET")
    with open_client() as client:
        if to_sandbox:
            _upload(find(client, to_sandbox[0]), source, to_sandbox[1], user)
        elif from_sandbox:
            _download(find(client, from_sandbox[0]), from_sandbox[1], target, user)


def remote(text: str) -> tuple[str, str] | None:
    """Return sandbox and path of ``SANDBOX:PATH``, None for a local path."""
    name, colon, path = text.partition(":")
    return (name, path) if colon and name and path and "/" not in name else None


def _upload(sandbox: "Sandbox", local: str, path: str, user: str | None) -> None:
    if local == "-":
        sandbox.files.write_stream(path, _chunks(sys.stdin.buffer), user=user)
        return
    source = Path(local)
    if not source.exists():
        raise typer.BadParameter(f"{local} does not exist", param_hint="SOURCE")
    sandbox.files.upload(source, _under(sandbox, path, source.resolve().name, user), user=user)


def _under(sandbox: "Sandbox", path: str, name: str, user: str | None) -> str:
    """Return where something of that name goes: into the path when that is a directory."""
    is_directory = path.endswith("/") or (
        sandbox.files.exists(path, user=user) and sandbox.files.stat(path, user=user).type == "directory"
    )
    return f"{path.rstrip('/')}/{name}" if is_directory else path


def _download(sandbox: "Sandbox", path: str, local: str, user: str | None) -> None:
    if local == "-":
        for chunk in sandbox.files.read_stream(path, user=user):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        return
    target = Path(local)
    if target.is_dir():
        target /= path.rstrip("/").rpartition("/")[2] or "root"
    for name in sandbox.files.download(path, target, user=user):
        print(f"space: left out the link {name!r}, which leads out of {target}", file=sys.stderr)


def _chunks(file: BinaryIO) -> "Iterator[bytes]":
    while chunk := file.read(CHUNK_BYTES):
        yield chunk

"""What the lifecycle subcommands share: ask for the change, wait for its end, say how it went."""

import sys
import time
from typing import TYPE_CHECKING, Literal

import typer

from space.cli import show
from space.cli.failures import ERROR, tell
from space.cli.targets import find, open_client
from space.errors import SpaceError

if TYPE_CHECKING:
    from space import Client, Operation, Sandbox

Verb = Literal["pause", "resume", "suspend", "wake", "stop", "start", "delete"]


def change(names: list[str], verb: Verb, *, as_json: bool, wait: bool = True) -> None:
    """Carry the verb out on each sandbox. One that fails does not keep the others; the status is 1 then."""
    failed = False
    with open_client() as client:
        for name in names:
            try:
                _change_one(client, name, verb, as_json=as_json, wait=wait)
            except SpaceError as error:
                tell(error)
                failed = True
    if failed:
        raise typer.Exit(ERROR)


def _change_one(client: "Client", name: str, verb: Verb, *, as_json: bool, wait: bool) -> None:
    sandbox = find(client, name)
    began = time.monotonic()
    operation = _ask(sandbox, verb, wait=wait)
    if as_json:
        show.document(operation.raw)
    elif not wait:
        print(operation.id)
    else:
        state = "deleted" if verb == "delete" else sandbox.state
        print(f"{name}: {state} ({time.monotonic() - began:.2f} s)", file=sys.stderr)


def _ask(sandbox: "Sandbox", verb: Verb, *, wait: bool) -> "Operation":
    calls = {
        "pause": sandbox.pause,
        "resume": sandbox.resume,
        "suspend": sandbox.suspend,
        "wake": sandbox.wake,
        "stop": sandbox.stop,
        "start": sandbox.boot,
        "delete": sandbox.delete,
    }
    return calls[verb]() if wait else calls[verb](wait_s=None)

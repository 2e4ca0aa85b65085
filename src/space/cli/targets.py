"""What the words of a command line refer to: sandboxes by id or name, and the options that all subcommands share."""

import re
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from space.errors import InvalidRequest, NotFound, SpaceError

if TYPE_CHECKING:
    from space import Client, Sandbox

_ID = re.compile(r"sbx[a-z2-7]{16}")


@contextmanager
def open_client() -> "Generator[Client]":
    """Connect to the api with this user's key."""
    # httpx imports a command line of its own where it can, with rich and pygments: twice the time we take to start.
    sys.modules.setdefault("httpx._main", cast("Any", None))
    from space import Client

    with Client() as client:
        yield client


@contextmanager
def told_when_slow(what: str, after_s: float = 4.0) -> Generator[None]:
    """Say on standard error, where that is a terminal, what is waited for when it takes longer than usual."""

    def tell() -> None:
        print(f"space: {what}; that can take a minute the first time, or on emulated processors.", file=sys.stderr)

    timer = threading.Timer(after_s, tell)
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def find(client: "Client", text: str) -> "Sandbox":
    """Return the sandbox with that id, or the only one with that name."""
    from space import Sandbox

    if _ID.fullmatch(text):
        return Sandbox.connect(text, client=client)
    found = list(client.sandboxes(name=text))
    if not found:
        raise NotFound(f"There is no sandbox {text!r}.", sandbox=text)
    if len(found) > 1:
        ids = ", ".join(info.id for info in found)
        raise InvalidRequest(f"{len(found)} sandboxes are named {text!r}: {ids}.", code="ambiguous-name")
    return Sandbox(client, found[0], keep=True)


def complete_sandbox(incomplete: str) -> list[str]:
    """Return names and ids for the shell's completion; nothing when the api does not answer."""
    try:
        with open_client() as client:
            words = [word for info in client.sandboxes() for word in (info.name, info.id) if word]
    except SpaceError:
        return []
    return [word for word in words if word.startswith(incomplete)]


def pairs(items: list[str], option: str) -> dict[str, str]:
    """Return ``KEY=VALUE`` options as a mapping."""
    for item in items:
        if "=" not in item or item.startswith("="):
            raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint=option)
    return dict(item.split("=", 1) for item in items)


def mounts(options: list[str]) -> dict[str, str]:
    """Return ``NAME:PATH`` options as a mapping."""
    split = [option.partition(":") for option in options]
    if not all(name and path for name, _, path in split) or len({name for name, _, _ in split}) < len(split):
        raise typer.BadParameter("It is NAME:PATH, each volume once.", param_hint="--volume")
    return {name: path for name, _, path in split}


SandboxArgument = Annotated[
    str, typer.Argument(metavar="SANDBOX", help="Its id, or its name.", autocompletion=complete_sandbox)
]
SandboxArguments = Annotated[
    list[str], typer.Argument(metavar="SANDBOX...", help="Ids or names.", autocompletion=complete_sandbox)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]
EnvOption = Annotated[
    list[str], typer.Option("--env", "-e", metavar="KEY=VALUE", help="A variable of the environment; may be repeated.")
]
UserOption = Annotated[str | None, typer.Option("--user", "-u", help="The user to run as (default: the template's).")]
CwdOption = Annotated[str | None, typer.Option("--cwd", "-w", help="The directory to run in.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Kill it with all it started after so long."),
]
NameOption = Annotated[str | None, typer.Option("--name", help="A name to refer to it by.")]
MetadataOption = Annotated[
    list[str], typer.Option("--metadata", "-m", metavar="KEY=VALUE", help="A label; may be repeated.")
]
DriverOption = Annotated[
    str | None,
    typer.Option(
        "--driver",
        metavar="gvisor|firecracker|qemu",
        help="How it becomes a machine; default: the strongest.",
    ),
]
CpusOption = Annotated[float | None, typer.Option("--cpus", help="CPU cores.")]
MemoryOption = Annotated[int | None, typer.Option("--memory", metavar="MIB", help="Memory in MiB.")]
DiskOption = Annotated[int | None, typer.Option("--disk", metavar="MIB", help="Disk in MiB.")]
VolumeOption = Annotated[
    list[str], typer.Option("--volume", metavar="NAME:PATH", help="Mount a volume there. May be repeated.")
]
ProgramArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="PROGRAM", help="The program and its arguments, exactly as they are; `--` may stand in front."
    ),
]
NoStdinOption = Annotated[bool, typer.Option("--no-stdin", "-n", help="Do not pass standard input on.")]
TtyOption = Annotated[bool, typer.Option("--tty", "-t", help="Run it in a terminal, as `space shell` does.")]

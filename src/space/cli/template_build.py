"""`space template build`."""

# ruff: noqa: ARG001 - the options are read by name, in `build_options`

import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from space.cli import show
from space.cli import template_options as o
from space.cli.failures import STATUS_INTERRUPTED
from space.cli.governing import PolicyOption
from space.cli.snapshot import find_snapshot
from space.cli.targets import JsonOption, open_client
from space.errors import SpaceError

if TYPE_CHECKING:
    from space import Build, Client, LogLine


def build(
    ctx: typer.Context,
    name: o.NameArgument,
    image: o.ImageOption = None,
    dockerfile: o.DockerfileOption = None,
    archive: o.ArchiveOption = None,
    rootfs: o.RootfsOption = None,
    template: o.TemplateOption = None,
    snapshot: o.SnapshotOption = None,
    file: o.FileOption = None,
    build_args: o.BuildArgOption = [],
    target: o.TargetOption = None,
    run: o.RunOption = [],
    copy: o.CopyOption = [],
    env: o.EnvOption = [],
    workdir: o.WorkdirOption = [],
    user: o.UserOption = [],
    context: o.ContextOption = Path(),
    start: o.StartOption = None,
    ready: o.ReadyOption = None,
    cpus: o.CpusOption = None,
    memory: o.MemoryOption = None,
    disk: o.DiskOption = None,
    ports: o.PortOption = [],
    labels: o.LabelOption = [],
    builder: o.BuilderOption = [],
    policy: PolicyOption = None,
    build_policy: o.BuildPolicyOption = None,
    timeout: o.TimeoutOption = None,
    no_cache: o.NoCacheOption = False,
    registry_user: o.RegistryUserOption = None,
    registry_password_stdin: o.PasswordStdinOption = False,
    registry_password_file: o.PasswordFileOption = None,
    registry: o.RegistryOption = None,
    ca_cert: o.CaCertOption = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the build's id, do not wait for it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build a template from one source, showing the log, and print its digest. Ctrl-C cancels the build.

    --run, --copy, --env, --workdir and --user are carried out after the source, in the order in which they are given.
    Without --registry-password-stdin or -file the password of --registry-user is asked for.
    """
    options = o.build_options(ctx)
    with open_client() as client:
        if snapshot is not None:
            options["snapshot"] = find_snapshot(client, snapshot)
        _carry_out(client, name, options, wait=not no_wait, as_json=as_json)


def _carry_out(client: "Client", name: str, options: dict[str, Any], *, wait: bool, as_json: bool) -> None:
    started: Build | None = None
    try:
        with _progress(quiet=as_json) as progress:
            started = client.builds.start(name, progress=progress.sent, **options)
            if wait:
                for line in client.builds.log(started):
                    progress.say(line)
        ended = client.builds.wait(started) if wait else started
    except KeyboardInterrupt:
        if started is not None:
            with suppress(SpaceError):
                client.builds.cancel(started)
            print(f"space: cancelled build {started.id}", file=sys.stderr)
        raise typer.Exit(STATUS_INTERRUPTED) from None
    if as_json:
        show.document(ended.raw)
    elif wait:
        print(f"{ended.name}:{ended.tag} {ended.digest}")
    else:
        print(ended.id)


class _Plain:
    """Tells how a build goes as lines on standard error; nothing when ``quiet``."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def sent(self, came: int, size: int) -> None:
        if came >= size and not self._quiet:
            print(f"space: sent {show.size(size)}", file=sys.stderr)

    def say(self, line: "LogLine") -> None:
        if not self._quiet:
            print(show.one_line(line.text), file=sys.stderr, flush=True)


class _Live:
    """The log, and below it how much has been sent or which step is being done, at a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        console = Console(stderr=True)
        self._sending = Progress(*columns, BarColumn(), DownloadColumn(), console=console, transient=True)
        self._building = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._upload = self._sending.add_task("sending")
        self._step = self._building.add_task("waiting", total=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sending.stop()
        self._building.stop()

    def sent(self, came: int, size: int) -> None:
        self._sending.start()
        self._sending.update(self._upload, completed=came, total=max(size, 1))

    def say(self, line: "LogLine") -> None:
        from rich.text import Text

        self._sending.stop()
        self._building.start()
        text = show.one_line(line.text)
        if line.stream == "step":
            self._building.update(self._step, description=text)
        style = {"step": "bold", "stderr": "yellow", "info": "dim"}.get(line.stream, "")
        self._building.console.print(Text(text, style=style))


@contextmanager
def _progress(*, quiet: bool) -> "Generator[_Plain | _Live]":
    if quiet or not sys.stderr.isatty():
        yield _Plain(quiet=quiet)
        return
    with _Live() as live:
        yield live

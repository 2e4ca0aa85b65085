"""Puts the subcommands together and turns errors into messages and exit statuses."""

import sys
from typing import NoReturn

import typer

from space.cli import (
    bench,
    cp,
    create,
    doctor,
    down,
    egress,
    env,
    exec_,
    fork,
    gc,
    grant,
    inspect,
    keys,
    logs,
    ls,
    ops,
    pause,
    policy,
    pool,
    port,
    project,
    ps,
    resume,
    rm,
    run_,
    secret,
    shell,
    snapshot,
    start,
    stop,
    suspend,
    template,
    up,
    volume,
    wake,
    webhook,
)
from space.cli.failures import fail
from space.cli.programs import ProgramCommand
from space.errors import SpaceError

HELP = """Isolated Linux machines for AI agents.

First steps: `space up` starts SPACE on this machine, `space run base -- uname -a` runs a command in a fresh sandbox and
deletes it, `space create base --name demo` makes one to keep, `space shell demo` is a terminal in it.
"""
app = typer.Typer(
    name="space",
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _program in (("run", run_.run), ("exec", exec_.exec_)):
    app.command(name=_name, cls=ProgramCommand, context_settings={"allow_interspersed_args": False})(_program)
for _function in (
    shell.shell,
    create.create,
    ls.ls,
    inspect.inspect,
    rm.rm,
    cp.cp,
    ps.ps,
    logs.logs,
    pause.pause,
    resume.resume,
    suspend.suspend,
    wake.wake,
    stop.stop,
    start.start,
    fork.fork,
    port.port,
    ops.ops,
    up.up,
    down.down,
    doctor.doctor,
    env.env,
    project.project,
    pool.pool,
    gc.gc,
    bench.bench,
):
    app.command()(_function)
app.add_typer(snapshot.app, name="snapshot")
app.add_typer(template.app, name="template")
app.add_typer(policy.app, name="policy")
app.add_typer(secret.app, name="secret")
app.add_typer(grant.app, name="grant")
app.add_typer(egress.app, name="egress")
app.add_typer(volume.app, name="volume")
app.add_typer(keys.app, name="keys")
app.add_typer(webhook.app, name="webhook")


def run() -> NoReturn:
    """Run the command line; errors of SPACE become a message with a next step on standard error and status 1."""
    try:
        app()
    except SpaceError as error:
        fail(error)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)  # As a program that SIGPIPE ended: whoever read our output has enough.
    sys.exit(0)

"""`space egress`."""

import sys
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from space.cli import show
from space.cli.failures import STATUS_INTERRUPTED
from space.cli.targets import JsonOption, complete_sandbox, find, open_client

if TYPE_CHECKING:
    from space import Client, EgressRecord

app = typer.Typer(name="egress", help="See what left sandboxes, or was refused.", no_args_is_help=True)

SandboxArgument = Annotated[
    str | None,
    typer.Argument(metavar="[SANDBOX]", help="Its id or name; all otherwise.", autocompletion=complete_sandbox),
]
DecisionOption = Annotated[
    str | None, typer.Option("--decision", metavar="allow|deny|error", help="Only what became of it.")
]
HostOption = Annotated[str | None, typer.Option("--host", help="Only to this host.")]
SecretOption = Annotated[str | None, typer.Option("--secret", metavar="NAME", help="Only with this secret placed.")]
COLOURS = {"allow": "green", "deny": "red", "error": "yellow"}


@app.command()
def ls(
    sandbox: SandboxArgument = None,
    decision: DecisionOption = None,
    host: HostOption = None,
    secret: SecretOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many at most.")] = 100,
    before: Annotated[int | None, typer.Option("--before", metavar="N", help="Only before this record.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the latest requests, the newest last. With --json each is a JSON object on a line of its own."""
    with open_client() as client:
        wanted = {"decision": cast("Any", decision), "host": host, "secret": secret}
        for record in _egress(client, sandbox).list(limit=limit, before=before, **wanted):
            _write(record, as_json=as_json)


@app.command()
def tail(
    sandbox: SandboxArgument = None,
    decision: DecisionOption = None,
    host: HostOption = None,
    secret: SecretOption = None,
    after: Annotated[
        int, typer.Option("--after", metavar="N", help="First those behind this record.", show_default=False)
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show requests as they are made, until Ctrl-C."""
    try:
        with open_client() as client:
            wanted = {"decision": cast("Any", decision), "host": host, "secret": secret}
            for record in _egress(client, sandbox).follow(after=after, **wanted):
                _write(record, as_json=as_json)
    except KeyboardInterrupt:
        raise typer.Exit(STATUS_INTERRUPTED) from None


def _egress(client: "Client", sandbox: str | None) -> Any:
    return client.egress if sandbox is None else find(client, sandbox).egress


def _write(record: "EgressRecord", *, as_json: bool) -> None:
    if as_json:
        show.line(record.raw)
        return
    colour = COLOURS.get(record.decision)
    decision = record.decision.ljust(5)
    # What a sandbox has chosen, host and path, could move the cursor.
    rest = show.one_line(line_of(record))
    shown = typer.style(decision, fg=colour, bold=True) if sys.stdout.isatty() else decision
    print(f"{record.at.astimezone():%H:%M:%S} {shown} {rest}", flush=True)


def line_of(record: "EgressRecord") -> str:
    """Return what a record says behind its time and decision."""
    host = record.host or record.address or "-"
    where = f"{f'[{host}]' if ':' in host else host}:{record.port or '-'}"
    what = f"{record.method} {where}{record.path or ''}" if record.method else f"{record.kind} {where}"
    # A rule may allow what is then refused for another reason, such as a misplaced placeholder.
    why = (record.rule if record.reason == "rule" or record.decision == "allow" else None) or record.reason
    parts = [record.sandbox_id, what, str(record.status or "-"), show.size(record.response_bytes), f"({why})"]
    if record.secrets:
        parts.append(f"with {', '.join(record.secrets)}")
    return " ".join(parts)

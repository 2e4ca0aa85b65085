"""`space webhook`."""

import sys
from typing import Annotated

import typer

from space.cli import show
from space.cli.failures import ERROR
from space.cli.targets import JsonOption, open_client

app = typer.Typer(name="webhook", help="Have the project's events sent to a URL, signed.", no_args_is_help=True)

WebhookArgument = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Its id.")]


@app.command()
def create(
    url: Annotated[str, typer.Argument(metavar="URL", help="An https:// URL at a public address.")],
    events: Annotated[
        list[str] | None,
        typer.Option("--event", metavar="NAME", help="Only these, such as sandbox.failed; may be repeated."),
    ] = None,
    description: Annotated[str, typer.Option("--description", help="What it is for.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Make a webhook and print its secret. It is shown this once."""
    with open_client() as client:
        made = client.webhooks.create(url, events=events or (), description=description)
    if as_json:
        show.document(made.raw)
    else:
        print(f"space: webhook {made.id}; keep what follows, it is not shown again", file=sys.stderr)
        print(made.secret)


@app.command()
def ls(as_json: JsonOption = False) -> None:
    """List the project's webhooks, newest first."""
    with open_client() as client:
        found = list(client.webhooks.list())
    if as_json:
        show.document([one.raw for one in found])
    else:
        show.table(
            ["WEBHOOK", "URL", "EVENTS", "STATE", "CREATED"],
            [
                [w.id, w.url, ", ".join(w.events) or "all", _state(w.disabled, w.failures), show.ago(w.created_at)]
                for w in found
            ],
        )


@app.command()
def inspect(webhook: WebhookArgument, as_json: JsonOption = False) -> None:
    """Show a webhook and its latest deliveries."""
    with open_client() as client:
        found = client.webhooks.get(webhook)
        deliveries = list(client.webhooks.deliveries(webhook))
    if as_json:
        show.document({**found.raw, "deliveries": [one.raw for one in deliveries]})
        return
    show.fields(found.raw)
    show.table(
        ["WHEN", "EVENT", "ATTEMPT", "OUTCOME", "WHY", "SECONDS"],
        [
            [show.ago(d.created_at), d.type, str(d.attempt), d.outcome, _why(d.reason, d.status), f"{d.seconds:.2f}"]
            for d in deliveries
        ],
    )


@app.command("test")
def send_test(webhook: WebhookArgument, as_json: JsonOption = False) -> None:
    """Send a message of the type webhook.test now. The status is 1 when it does not arrive."""
    with open_client() as client:
        made = client.webhooks.test(webhook)
    if as_json:
        show.document(made.raw)
    else:
        print(f"{made.outcome} {_why(made.reason, made.status)}")
    if made.outcome != "delivered":
        raise typer.Exit(ERROR)


@app.command()
def rm(webhook: WebhookArgument) -> None:
    """Delete a webhook: nothing more is sent."""
    with open_client() as client:
        client.webhooks.delete(webhook)


def _state(disabled: str | None, failures: int) -> str:
    return f"disabled ({disabled})" if disabled else f"failing ({failures})" if failures else "active"


def _why(reason: str | None, status: int | None) -> str:
    return str(status) if status is not None else reason or "-"

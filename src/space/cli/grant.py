"""`space grant`."""

from typing import Annotated, Any

import typer

from space.cli import show
from space.cli.targets import JsonOption, SandboxArgument, find, open_client

app = typer.Typer(name="grant", help="Place secrets into a sandbox's requests.", no_args_is_help=True)


@app.command()
def add(
    sandbox: SandboxArgument,
    secret: Annotated[str, typer.Argument(metavar="SECRET", help="A secret's name.")],
    hosts: Annotated[list[str], typer.Argument(metavar="HOST...", help="Host names, or *.suffix.")],
    placement: Annotated[
        str | None,
        typer.Option(
            "--placement", metavar="WHERE", help="bearer (usual), header, basic, query, aws-sigv4 or placeholder."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the header or query parameter.")] = None,
    template: Annotated[
        str | None, typer.Option("--template", metavar="TEXT", help="What that gets, with {} for the value.")
    ] = None,
    ports: Annotated[list[int], typer.Option("--port", help="443 otherwise; may be repeated.")] = [],
    methods: Annotated[list[str], typer.Option("--method", help="All otherwise; may be repeated.")] = [],
    paths: Annotated[
        list[str], typer.Option("--path", metavar="PATTERN", help="Such as /v1/**; all otherwise; may be repeated.")
    ] = [],
    region: Annotated[str | None, typer.Option("--region", help="Of aws-sigv4.")] = None,
    service: Annotated[str | None, typer.Option("--service", help="Of aws-sigv4.")] = None,
    expires: Annotated[
        float | None, typer.Option("--expires", metavar="SECONDS", min=1, help="After so long it ends by itself.")
    ] = None,
    cleartext: Annotated[bool, typer.Option("--cleartext", help="Over plain HTTP, too.")] = False,
    no_scrub: Annotated[bool, typer.Option("--no-scrub", help="Do not mask the value in answers.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Have a secret placed into a sandbox's requests to these hosts, and print the placeholder that stands for it."""
    terms: dict[str, Any] = {
        "placement": placement,
        "name": name,
        "template": template,
        "ports": ports,
        "methods": methods,
        "paths": paths,
        "region": region,
        "service": service,
        "expires_in_s": expires,
        "cleartext": cleartext,
        "scrub": False if no_scrub else None,
    }
    # A false `scrub` is said; a false `cleartext` is the default.
    said = {key: value for key, value in terms.items() if value not in (None, []) and (key, value) != _PLAIN}
    with open_client() as client:
        made = find(client, sandbox).grants.add(secret, hosts, **said)
    if as_json:
        show.document(made.raw)
    else:
        print(made.id, made.placeholder)


_PLAIN = ("cleartext", False)


@app.command()
def ls(sandbox: SandboxArgument, as_json: JsonOption = False) -> None:
    """List a sandbox's grants that are in force, newest first."""
    with open_client() as client:
        found = list(find(client, sandbox).grants.list())
    if as_json:
        show.document([one.raw for one in found])
    else:
        show.table(
            ["GRANT", "SECRET", "HOSTS", "METHODS", "PATHS", "PLACEMENT", "ENV", "CREATED"],
            [
                [
                    g.id,
                    g.secret,
                    ", ".join(g.hosts),
                    ", ".join(g.methods) or "all",
                    ", ".join(g.paths) or "all",
                    g.placement,
                    g.env or "-",
                    show.ago(g.created_at),
                ]
                for g in found
            ],
        )


@app.command()
def rm(
    sandbox: SandboxArgument,
    grant: Annotated[str, typer.Argument(metavar="GRANT", help="Its id.")],
) -> None:
    """Revoke a grant: no request gets the secret any more, on open connections neither."""
    with open_client() as client:
        find(client, sandbox).grants.revoke(grant)

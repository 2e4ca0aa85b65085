"""`space policy`."""

from typing import Annotated

import typer

from space.cli import show
from space.cli.failures import ERROR
from space.cli.governing import parse_policy, read_document
from space.cli.targets import JsonOption, SandboxArgument, find, open_client

app = typer.Typer(name="policy", help="Say what may leave sandboxes, and ask why.", no_args_is_help=True)

SandboxOption = Annotated[str | None, typer.Option("--sandbox", "-s", metavar="SANDBOX", help="Of this sandbox.")]


@app.command()
def ls(as_json: JsonOption = False) -> None:
    """List the project's policies, newest first."""
    with open_client() as client:
        found = list(client.policies.list())
    if as_json:
        show.document([one.raw for one in found])
    else:
        show.table(
            ["POLICY", "GENERATION", "PRESET", "RULES", "NETWORKS", "CHANGED"],
            [
                [
                    p.name,
                    str(p.generation),
                    str(p.document.get("preset", "-")),
                    str(len(p.document.get("rules") or ())),
                    str(len(p.document.get("networks") or ())),
                    show.ago(p.updated_at),
                ]
                for p in found
            ],
        )


@app.command("show")
def show_one(
    name: Annotated[str | None, typer.Argument(metavar="[POLICY]", help="A policy's name.")] = None,
    sandbox: SandboxOption = None,
) -> None:
    """Show a policy's document as JSON; with --sandbox the policy it has, without either the project's default."""
    if name is not None and sandbox is not None:
        raise typer.BadParameter("a policy's name or --sandbox, not both", param_hint="--sandbox")
    with open_client() as client:
        if name is not None:
            show.document(client.policies.get(name).document)
        elif sandbox is not None:
            show.document(find(client, sandbox).policy.get().raw)
        else:
            show.document(client.policies.default().raw)


@app.command("set")
def set_one(
    policy: Annotated[
        str,
        typer.Argument(metavar="POLICY", help="A preset, a policy's name, @FILE with a document, or `default`."),
    ],
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Call it so; POLICY is @FILE.")] = None,
    sandbox: SandboxOption = None,
    project: Annotated[bool, typer.Option("--project", help="Of all that have no other.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Keep a policy under a name, or give it to a sandbox or as default to the project. It holds when this returns.

    `default` takes a sandbox's own away, or the project's.
    """
    if sum((name is not None, sandbox is not None, project)) != 1:
        raise typer.BadParameter("say one of them, and only one", param_hint="--name, --sandbox, --project")
    with open_client() as client:
        if name is not None:
            file = policy.removeprefix("@")
            document = read_document(file, "POLICY") if policy.startswith("@") else {"preset": policy}
            made = client.policies.set(name, document)
            raw, text = made.raw, f"{made.name} generation {made.generation}"
        else:
            wanted = parse_policy(policy, "POLICY")
            found = find(client, sandbox).policy.set(wanted) if sandbox else client.policies.set_default(wanted)
            raw, text = found.raw, f"{found.name or _brief(found.document)} of the {found.source}"
    if as_json:
        show.document(raw)
    else:
        print(text)


@app.command()
def rm(name: Annotated[str, typer.Argument(metavar="POLICY", help="A policy's name.")]) -> None:
    """Delete a policy that nobody follows."""
    with open_client() as client:
        client.policies.delete(name)


@app.command()
def check(
    sandbox: SandboxArgument,
    host: Annotated[str, typer.Argument(metavar="HOST", help="A host's name, or an address.")],
    method: Annotated[str, typer.Argument(metavar="[METHOD]")] = "GET",
    path: Annotated[str, typer.Argument(metavar="[PATH]")] = "/",
    port: Annotated[int | None, typer.Option("--port", min=1, max=65535, help="443, or 80 for --http.")] = None,
    http: Annotated[bool, typer.Option("--http", help="Without TLS.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask whether a sandbox may make a request, and why. None is made. The status is 1 when it may not."""
    with open_client() as client:
        found = find(client, sandbox).policy.check(host, method, path, port=port, scheme="http" if http else "https")
    if as_json:
        show.document(found.raw)
    else:
        by = f"rule {found.rule}" if found.rule else found.reason
        print(f"{'allowed' if found.allowed else 'denied'} by {by}, policy of the {found.source}")
        rows = [[str(r["rule"]), str(r["action"]), "yes" if r["decides"] else "-", str(r["why"])] for r in found.rules]
        if rows:
            show.table(["RULE", "ACTION", "DECIDES", "WHY"], rows)
    if not found.allowed:
        raise typer.Exit(ERROR)


@app.command()
def suggest(sandbox: SandboxArgument) -> None:
    """Show rules, as JSON, that would have allowed what was denied to a sandbox lately. Read them before using them."""
    with open_client() as client:
        show.document(find(client, sandbox).policy.suggest())


def _brief(document: object) -> str:
    return document if isinstance(document, str) else "a document"

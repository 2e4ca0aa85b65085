"""`space project`."""

from typing import Annotated

import typer

from space.cli import show
from space.cli.governing import parse_policy
from space.cli.targets import JsonOption, open_client, pairs

UNLIMITED = "none"
LIMITS = ("sandboxes", "cpus", "memory_mib", "disk_mib")


def project(
    project_id: Annotated[
        str | None, typer.Argument(metavar="[PROJECT]", help="A project's id, for admins; otherwise one's own.")
    ] = None,
    limits: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="LIMIT=VALUE", help=f"Change a limit ({', '.join(LIMITS)}; `none` ends it), as an admin."
        ),
    ] = [],
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="Change what may leave one's own project's sandboxes: a preset, a policy's name, @FILE, or default.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a project may have and has: sandboxes, and their cpus, memory and disk together."""
    wanted = parse_limits(limits)
    if policy is not None and project_id is not None:
        raise typer.BadParameter("of one's own project only", param_hint="--policy")
    with open_client() as client:
        found = client.projects.get(project_id) if project_id else client.projects.own()
        if wanted:
            found = client.projects.limit(found.id, **wanted)
        if policy is not None:
            client.policies.set_default(parse_policy(policy))
        default = None if project_id else client.policies.default()
    if as_json:
        show.document(found.raw)
        return
    print(f"{show.one_line(found.name)}  {found.id}")
    show.table(
        ["LIMIT", "USED", "QUOTA"],
        [[name, show.number(getattr(found.used, name)), show.number(getattr(found.quota, name))] for name in LIMITS],
    )
    if default is not None:
        kind = default.document if isinstance(default.document, str) else "a document"
        print(f"policy  {default.name or kind} (of the {default.source})")


def parse_limits(items: list[str]) -> dict[str, float | None]:
    """Return ``LIMIT=VALUE`` options as numbers, None for no limit."""
    wanted: dict[str, float | None] = {}
    for name, text in pairs(items, "--set").items():
        if name not in LIMITS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(LIMITS)}", param_hint="--set")
        try:
            wanted[name] = None if text == UNLIMITED else float(text) if name == "cpus" else int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is no number for {name}", param_hint="--set") from None
    return wanted

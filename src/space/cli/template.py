"""`space template`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from space.cli import show
from space.cli.failures import ERROR, tell
from space.cli.targets import JsonOption, open_client
from space.cli.template_build import build
from space.cli.template_options import StepsCommand
from space.errors import SpaceError

if TYPE_CHECKING:
    from space import Template

app = typer.Typer(
    name="template", help="Build what sandboxes start from, and list, tag and delete it.", no_args_is_help=True
)
app.command(cls=StepsCommand)(build)

TemplateArgument = Annotated[str, typer.Argument(metavar="TEMPLATE", help="NAME, NAME:TAG or sha256:…")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A template's name, without a tag.")]
BuildArgument = Annotated[str, typer.Argument(metavar="BUILD", help="Its id.")]
MemoryOption = Annotated[
    int | None, typer.Option("--memory", metavar="MIB", help="For sandboxes of so much memory; the template's else.")
]


@app.command()
def ls(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only of this name.")] = None,
    untagged: Annotated[bool, typer.Option("--untagged", help="Those instead that no tag points to.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the templates there are, by name and tag."""
    with open_client() as client:
        found = list(client.templates.list(name=name, untagged=untagged))
    if as_json:
        show.document([one.raw for one in found])
    else:
        show.table(
            ["TEMPLATE", "DIGEST", "SIZE", "FROM", "CREATED"],
            [[_named(t), t.digest[:19], show.size(t.bytes), _source(t), show.ago(t.created_at)] for t in found],
        )


@app.command()
def inspect(template: TemplateArgument, as_json: JsonOption = False) -> None:
    """Show all about a template: defaults, where it comes from, what is installed in it."""
    with open_client() as client:
        found = client.templates.get(template)
    if as_json:
        show.document(found.raw)
        return
    show.fields({key: value for key, value in found.raw.items() if key != "packages"})
    if found.packages is not None:
        print(f"packages  {len(found.packages)}")
        show.table(
            ["PACKAGE", "VERSION", "MANAGER"],
            [[str(p.get(key) or "-") for key in ("name", "version", "manager")] for p in found.packages],
        )


@app.command()
def tag(
    template: TemplateArgument,
    to: Annotated[str, typer.Argument(metavar="TO", help="NAME or NAME:TAG that is to point to it.")],
    as_json: JsonOption = False,
) -> None:
    """Let a tag point to a template of the project. What it pointed to before stays, and is in the history."""
    with open_client() as client:
        moved = client.templates.tag(template, to)
    if as_json:
        show.document(moved.raw)


@app.command()
def rm(
    templates: Annotated[list[str], typer.Argument(metavar="TEMPLATE...", help="NAME, NAME:TAG or sha256:…")],
    as_json: JsonOption = False,
) -> None:
    """Delete templates: a tag, and with its last tag the release; by digest the release with all its tags.

    Sandboxes and snapshots that were made from them live on. One that fails does not keep the others; the status is 1
    then.
    """
    failed = False
    with open_client() as client:
        for one in templates:
            try:
                deleted = client.templates.delete(one)
            except SpaceError as error:
                tell(error)
                failed = True
            else:
                if as_json:
                    show.document(deleted.raw)
    if failed:
        raise typer.Exit(ERROR)


@app.command()
def history(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show what became of a name's tags, newest first."""
    with open_client() as client:
        moves = list(client.templates.history(name))
    if as_json:
        show.document([move.raw for move in moves])
    else:
        show.table(
            ["WHEN", "TAG", "DIGEST", "BEFORE", "BUILD"],
            [
                [show.ago(m.created_at), m.tag, (m.digest or "-")[:19], (m.previous or "-")[:19], m.build_id or "-"]
                for m in moves
            ],
        )


@app.command()
def warm(template: TemplateArgument, memory: MemoryOption = None) -> None:
    """Prepare a template, so that its first sandbox starts as fast as any. Returns when that is done."""
    with open_client() as client:
        client.templates.warm(template, memory_mib=memory)


@app.command("push-cache")
def push_cache(
    templates: Annotated[
        list[str] | None, typer.Argument(metavar="[TEMPLATE]...", help="Which; all tags of the project otherwise.")
    ] = None,
    memory: MemoryOption = None,
) -> None:
    """Put templates into the host's cache of machines that are ready, one after the other, as `warm` does with one.

    After a deployment, or before a rush. One that fails does not keep the others; the status is 1 then.
    """
    failed = False
    with open_client() as client:
        wanted = templates or sorted({t.digest for t in client.templates.list() if not t.builtin})
        for one in wanted:
            try:
                client.templates.warm(one, memory_mib=memory)
            except SpaceError as error:
                tell(error)
                failed = True
            else:
                print(one)
    if failed:
        raise typer.Exit(ERROR)


@app.command()
def audit(as_json: JsonOption = False) -> None:
    """Show from which images the project's releases came, and whether the installation trusts their registries now.

    The status is 1 when there is one that it does not.
    """
    with open_client() as client:
        found = list(client.templates.audit())
    if as_json:
        show.document([one.raw for one in found])
    else:
        rows = [(one, image) for one in found for image in one.images or ("-",)]
        show.table(
            ["DIGEST", "TAGS", "IMAGE", "TRUSTED"],
            [
                [one.digest[:19], ", ".join(one.tags) or "-", image, "no" if image in one.untrusted else "yes"]
                for one, image in rows
            ],
        )
    if any(one.untrusted for one in found):
        raise typer.Exit(ERROR)


@app.command()
def builds(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only of templates of this name.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the project's builds, newest first; those that have ended for a week."""
    with open_client() as client:
        found = list(client.builds.list(name=name))
    if as_json:
        show.document([one.raw for one in found])
    else:
        show.table(
            ["BUILD", "TEMPLATE", "STATE", "STEP", "WHY", "CREATED"],
            [
                [
                    b.id,
                    f"{b.name}:{b.tag}",
                    b.state,
                    f"{b.step or 0}/{b.steps or 0}",
                    "-" if b.failure is None else b.failure.code,
                    show.ago(b.created_at),
                ]
                for b in found
            ],
        )


@app.command()
def logs(
    build: BuildArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a build's log."""
    with open_client() as client:
        for line in client.builds.log(build, follow=follow):
            if as_json:
                show.line(line.raw)
            else:
                print(show.one_line(line.text), flush=True)


@app.command()
def cancel(build: BuildArgument) -> None:
    """Have a build end without a result."""
    with open_client() as client:
        client.builds.cancel(build)


def _named(template: "Template") -> str:
    return "-" if template.name is None else f"{template.name}:{template.tag}"


def _source(template: "Template") -> str:
    if template.builtin:
        return "built in"
    said: Any = next(
        (template.source[key] for key in ("reference", "template", "snapshot") if key in template.source), ""
    )
    return f"{template.source.get('kind', '-')} {said}".strip()

"""`space port`."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from space.cli import show
from space.cli.targets import JsonOption, SandboxArgument, find, open_client

if TYPE_CHECKING:
    from space import Client

PORT_MAX = 65535


def port(
    sandbox: SandboxArgument,
    number: Annotated[
        str | None,
        typer.Argument(
            metavar="PORT", help="A port inside; with --forward also PORT:LOCAL. Without it all are listed."
        ),
    ] = None,
    forward: Annotated[
        bool, typer.Option("--forward", "-f", help="Relay connections to a port of this machine into the sandbox.")
    ] = False,
    public: Annotated[
        bool | None, typer.Option("--public/--private", help="Whether everybody may ask it, without a token.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="What the server sees as Host.")] = None,
    expires: Annotated[
        int | None, typer.Option("--expires", metavar="SECONDS", min=1, help="How long the address is good: a day.")
    ] = None,
    hide: Annotated[bool, typer.Option("--hide", help="Expose it no longer; its addresses are void.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print an address for a server in a sandbox, which a browser gets in by, or list exposed ports.

    With --forward nothing is exposed: PORT of this machine (or LOCAL) leads to PORT inside, until Ctrl-C, whatever is
    spoken there.
    """
    with open_client() as client:
        if number is None:
            _list(client, sandbox, as_json=as_json)
            return
        inside, local = _numbers(number, forward=forward)
        if forward:
            _forward(find(client, sandbox).id, inside, local)
            return
        ports = find(client, sandbox).ports
        if hide:
            ports.hide(inside)
            return
        opened = ports.expose(inside, public=public, host=host, expires_in_s=expires)
    if as_json:
        show.document(opened.raw)
    else:
        print(opened.browser_url)


def _list(client: "Client", sandbox: str, *, as_json: bool) -> None:
    found = find(client, sandbox).ports.list()
    if as_json:
        show.document([one.raw for one in found])
        return
    show.table(["PORT", "PUBLIC", "URL"], [[str(one.port), "yes" if one.public else "no", one.url] for one in found])


def _numbers(text: str, *, forward: bool) -> tuple[int, int]:
    """Return the port inside and the one here; they are the same where only one is named."""
    inside, colon, local = text.partition(":")
    for one, least in ((inside, 1), (local or inside, 0 if colon else 1)):
        if not (one.isascii() and one.isdecimal() and least <= int(one[:6]) <= PORT_MAX):
            raise typer.BadParameter(f"{text!r} is not a port, or PORT:LOCAL with --forward", param_hint="PORT")
    if colon and not forward:
        raise typer.BadParameter("PORT:LOCAL is for --forward", param_hint="PORT")
    return int(inside), int(local or inside)


def _forward(sandbox_id: str, inside: int, local: int) -> None:
    import asyncio

    from space.cli.forwarding import forward

    try:
        asyncio.run(forward(sandbox_id, inside, local, _say))
    except KeyboardInterrupt:
        return
    except OSError as error:
        raise typer.BadParameter(f"port {local} of this machine: {error.strerror}", param_hint="PORT") from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

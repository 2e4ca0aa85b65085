"""`space logs`."""

from typing import Annotated

import typer

from space.cli import show
from space.cli.streaming import write_events
from space.cli.targets import JsonOption, open_client


def logs(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="A command's id, as `space ps` shows it.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the command has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a command's kept output.

    What it wrote to stdout goes to ours, and stderr likewise. It is kept for an hour after the command's end.
    """
    from space import Sandbox

    with open_client() as client:
        info = client.command_info(command)
        events = Sandbox.connect(str(info.sandbox_id), client=client).command(command).replay(follow=follow)
        if not as_json:
            write_events(events)
            return
        for event in events:
            show.line({"stream": event.stream, "data": event.text} if event.data else {"gap": event.stream})

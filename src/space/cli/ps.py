"""`space ps`."""

from space.cli import show
from space.cli.targets import JsonOption, SandboxArgument, find, open_client


def ps(sandbox: SandboxArgument, as_json: JsonOption = False) -> None:
    """List a sandbox's commands, newest first."""
    import shlex

    with open_client() as client:
        found = list(find(client, sandbox).commands())
    if as_json:
        show.document([info.raw for info in found])
        return
    show.table(
        ["COMMAND", "STATE", "EXIT", "CREATED", "PROGRAM"],
        [[i.id, i.state, str(i.exit or "-"), show.ago(i.created_at), shlex.join(i.argv)] for i in found],
    )

"""`space fork`."""

from typing import Annotated, Any

import typer

from space.cli import show
from space.cli.targets import (
    EnvOption,
    JsonOption,
    MetadataOption,
    NameOption,
    SandboxArgument,
    find,
    open_client,
    pairs,
)

COUNT_MAX = 64


def fork(
    sandbox: SandboxArgument,
    count: Annotated[int, typer.Option("--count", "-c", min=1, max=COUNT_MAX, help="How many.")] = 1,
    name: NameOption = None,
    metadata: MetadataOption = [],
    env: EnvOption = [],
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until they are ready.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make sandboxes that go on from the present state of one, and print their ids.

    Memory, processes and files are as they are now; from then on each is a machine of its own. The source goes on, too.
    """
    options: dict[str, Any] = {"name": name, "metadata": pairs(metadata, "--metadata"), "env": pairs(env, "--env")}
    given = {key: value for key, value in options.items() if value}
    with open_client() as client:
        forks = find(client, sandbox).fork(count, keep=True, wait_s=None if no_wait else 300.0, **given)
    if as_json:
        show.document([fork.info.raw for fork in forks])
    else:
        for fork in forks:
            print(fork.id)

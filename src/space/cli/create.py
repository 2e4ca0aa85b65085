"""`space create`."""

from typing import Annotated, Any, cast

import typer

from space.cli import show
from space.cli.targets import (
    CpusOption,
    DiskOption,
    EnvOption,
    JsonOption,
    MemoryOption,
    MetadataOption,
    NameOption,
    open_client,
    pairs,
)


def create(
    template: Annotated[str, typer.Argument(metavar="[TEMPLATE]", help="The template to start from.")] = "base",
    name: NameOption = None,
    metadata: MetadataOption = [],
    env: EnvOption = [],
    cpus: CpusOption = None,
    memory: MemoryOption = None,
    disk: DiskOption = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", help="After so long, do what --on-timeout says.")
    ] = None,
    on_timeout: Annotated[
        str | None, typer.Option("--on-timeout", metavar="delete|suspend|stop", help="Default: delete.")
    ] = None,
    wake_on_request: Annotated[
        bool, typer.Option("--wake-on-request", help="Wake it whenever a command or file request comes.")
    ] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until it is ready.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a sandbox to keep, and print its id."""
    from space import Sandbox

    options: dict[str, Any] = {
        "name": name,
        "metadata": pairs(metadata, "--metadata") or None,
        "env": pairs(env, "--env") or None,
        "cpus": cpus,
        "memory_mib": memory,
        "disk_mib": disk,
        "timeout_s": timeout,
        "on_timeout": on_timeout,
        "wake_on_request": wake_on_request or None,
    }
    with open_client() as client:
        create_it = cast("Any", Sandbox.create)
        sandbox = create_it(template, client=client, keep=True, wait_s=None if no_wait else 120.0, **options)
        if as_json:
            show.document(sandbox.info.raw)
        else:
            print(sandbox.id)

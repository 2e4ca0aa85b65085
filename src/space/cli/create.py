"""`space create`."""

from typing import Annotated, Any, cast

import typer

from space.cli import show
from space.cli.governing import GrantOption, PolicyOption, parse_grant, parse_policy
from space.cli.targets import (
    CpusOption,
    DiskOption,
    DriverOption,
    EnvOption,
    JsonOption,
    MemoryOption,
    MetadataOption,
    NameOption,
    VolumeOption,
    mounts,
    open_client,
    pairs,
    told_when_slow,
)

IoWeightOption = Annotated[
    int | None,
    typer.Option("--io-weight", metavar="1..1000", min=1, max=1000, help="Its share of the host's disk; usual: 100."),
]
IdleTimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--idle-timeout",
        metavar="SECONDS",
        min=0.001,
        help="So long without a running command, a connection or a transfer, do what --on-idle says.",
    ),
]


def create(
    template: Annotated[
        str, typer.Argument(metavar="[TEMPLATE]", help="The template, or `snapshot:ID`, to start from.")
    ] = "base",
    name: NameOption = None,
    metadata: MetadataOption = [],
    env: EnvOption = [],
    cpus: CpusOption = None,
    memory: MemoryOption = None,
    disk: DiskOption = None,
    driver: DriverOption = None,
    pids: Annotated[int | None, typer.Option("--pids", metavar="N", min=1, help="Most processes and threads.")] = None,
    io_weight: IoWeightOption = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0.001, help="After so long, do what --on-timeout says."),
    ] = None,
    on_timeout: Annotated[
        str | None, typer.Option("--on-timeout", metavar="delete|suspend|stop", help="Default: delete.")
    ] = None,
    idle_timeout: IdleTimeoutOption = None,
    on_idle: Annotated[
        str | None, typer.Option("--on-idle", metavar="pause|suspend|stop|delete", help="Default: suspend.")
    ] = None,
    wake_on_request: Annotated[
        bool, typer.Option("--wake-on-request", help="Wake it whenever a command or file request comes.")
    ] = False,
    policy: PolicyOption = None,
    grants: GrantOption = [],
    volumes: VolumeOption = [],
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
        "driver": driver,
        "pids": pids,
        "io_weight": io_weight,
        "timeout_s": timeout,
        "on_timeout": on_timeout,
        "idle_timeout_s": idle_timeout,
        "on_idle": on_idle,
        "wake_on_request": wake_on_request or None,
        "policy": None if policy is None else parse_policy(policy),
        "grants": [parse_grant(one) for one in grants] or None,
        "volumes": mounts(volumes) or None,
    }
    with open_client() as client:
        create_it = cast("Any", Sandbox.create)
        with told_when_slow("the sandbox is being made"):
            sandbox = create_it(template, client=client, keep=True, wait_s=None if no_wait else 120.0, **options)
        if as_json:
            show.document(sandbox.info.raw)
        else:
            print(sandbox.id)

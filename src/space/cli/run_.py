"""`space run`."""

import sys
from typing import Annotated, Any, cast

import typer

from space.cli.exec_ import carry_out
from space.cli.failures import fail, program_status
from space.cli.governing import GrantOption, PolicyOption, parse_grant, parse_policy
from space.cli.targets import (
    CpusOption,
    CwdOption,
    DiskOption,
    DriverOption,
    EnvOption,
    JsonOption,
    MemoryOption,
    MetadataOption,
    NameOption,
    NoStdinOption,
    ProgramArgument,
    TimeoutOption,
    TtyOption,
    UserOption,
    VolumeOption,
    mounts,
    open_client,
    pairs,
    told_when_slow,
)
from space.errors import SpaceError


def run(
    template: Annotated[str, typer.Argument(metavar="TEMPLATE", help="The template, or `snapshot:ID`, to start from.")],
    program: ProgramArgument,
    name: NameOption = None,
    metadata: MetadataOption = [],
    env: EnvOption = [],
    user: UserOption = None,
    cwd: CwdOption = None,
    timeout: TimeoutOption = None,
    cpus: CpusOption = None,
    memory: MemoryOption = None,
    disk: DiskOption = None,
    driver: DriverOption = None,
    policy: PolicyOption = None,
    grants: GrantOption = [],
    volumes: VolumeOption = [],
    no_stdin: NoStdinOption = False,
    tty: TtyOption = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the sandbox; its id goes to standard error.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a program in a fresh sandbox, and delete the sandbox.

    Its output is passed on as it comes; standard input too, when that is a pipe or a file. The status is the program's
    own; 128 + N when signal N ended it, 124 when --timeout did, 125 when SPACE failed, 127 when there is no such
    program.
    """
    from space import Sandbox

    options: dict[str, Any] = {
        "name": name,
        "metadata": pairs(metadata, "--metadata") or None,
        "cpus": cpus,
        "memory_mib": memory,
        "disk_mib": disk,
        "driver": driver,
        "policy": None if policy is None else parse_policy(policy),
        "grants": [parse_grant(one) for one in grants] or None,
        "volumes": mounts(volumes) or None,
    }
    how = {"env": pairs(env, "--env"), "user": user, "cwd": cwd, "timeout_s": timeout}
    try:
        # Not waited for yet: whoever is interrupted from here on has a sandbox to delete.
        make = cast("Any", Sandbox.create)
        with open_client() as client, make(template, client=client, wait_s=None, **options) as sandbox:
            if keep:
                sandbox.detach()
                print(f"space: {sandbox.id}", file=sys.stderr)
            with told_when_slow("the sandbox is being made"):
                sandbox.wait_ready()
            status = carry_out(sandbox, program, how, stdin=not no_stdin, tty=tty, as_json=as_json)
    except SpaceError as error:
        fail(error, program_status(error))
    raise typer.Exit(status)

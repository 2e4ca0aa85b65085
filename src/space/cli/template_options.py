"""The options of `space template build`, and what they ask for."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from space.cli.governing import parse_policy
from space.cli.targets import pairs

STEPS = ("run", "copy", "env", "workdir", "user")
PASSWORD_CHARS_MAX = 64 * 1024
_ORDERED = "space.steps"


def _option(*names: str, help: str, metavar: str | None = None, exists: bool = False) -> Any:  # noqa: A002 (typer's)
    return typer.Option(*names, help=help, metavar=metavar, exists=exists)


Text = str | None
File = Path | None
Many = list[str]

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="NAME or NAME:TAG, what to call it; no tag means latest.")
]
ImageOption = Annotated[Text, _option("--from-image", metavar="REF", help="An image of a registry.")]
DockerfileOption = Annotated[
    File, _option("--dockerfile", metavar="DIR", exists=True, help="A directory with a Dockerfile: its context.")
]
ArchiveOption = Annotated[
    File, _option("--from-archive", metavar="FILE", exists=True, help="An OCI or `docker save` archive.")
]
RootfsOption = Annotated[
    File, _option("--from-rootfs", metavar="TAR", exists=True, help="A tar of a root file system.")
]
TemplateOption = Annotated[Text, _option("--from-template", metavar="TEMPLATE", help="Another template.")]
SnapshotOption = Annotated[
    Text, _option("--from-snapshot", metavar="SNAPSHOT", help="A snapshot of a disk, by id or name.")
]
FileOption = Annotated[Text, _option("--file", "-f", metavar="PATH", help="The Dockerfile's place in DIR.")]
BuildArgOption = Annotated[
    Many, _option("--build-arg", metavar="KEY=VALUE", help="Of the Dockerfile, not for secrets; may be repeated.")
]
TargetOption = Annotated[Text, _option("--target", metavar="STAGE", help="The Dockerfile's stage that is wanted.")]
RunOption = Annotated[Many, _option("--run", metavar="COMMAND", help="Run a shell command; may be repeated.")]
CopyOption = Annotated[
    Many, _option("--copy", metavar="SRC:DST", help="Copy something of the context; may be repeated.")
]
EnvOption = Annotated[Many, _option("--env", "-e", metavar="KEY=VALUE", help="Set a variable; may be repeated.")]
WorkdirOption = Annotated[Many, _option("--workdir", "-w", metavar="PATH", help="Go on in a directory.")]
UserOption = Annotated[Many, _option("--user", "-u", metavar="USER", help="Go on as a user.")]
ContextOption = Annotated[Path, _option("--context", metavar="DIR", exists=True, help="Where --copy finds its files.")]
StartOption = Annotated[
    Text, _option("--start", metavar="COMMAND", help="Is started once, and runs on in every sandbox of the template.")
]
ReadyOption = Annotated[Text, _option("--ready", metavar="COMMAND", help="Ends with status 0 once that is up.")]
CpusOption = Annotated[float | None, _option("--cpus", help="Cores of sandboxes that name none.")]
MemoryOption = Annotated[int | None, _option("--memory", metavar="MIB", help="Their memory in MiB.")]
DiskOption = Annotated[int | None, _option("--disk", metavar="MIB", help="Their disk in MiB.")]
PortOption = Annotated[list[int], _option("--port", help="Where a server in it listens; may be repeated.")]
LabelOption = Annotated[Many, _option("--label", metavar="KEY=VALUE", help="Anything to know it by; may be repeated.")]
BuilderOption = Annotated[
    Many,
    _option("--builder", metavar="KEY=VALUE", help="cpus, memory_mib, disk_mib or pids of the machine that builds."),
]
BuildPolicyOption = Annotated[
    Text, _option("--build-policy", metavar="POLICY", help="What may leave the machine that builds; as --policy.")
]
TimeoutOption = Annotated[float | None, _option("--timeout", metavar="SECONDS", help="How long the build may take.")]
NoCacheOption = Annotated[bool, _option("--no-cache", help="Do every step again.")]
RegistryUserOption = Annotated[
    Text, _option("--registry-user", metavar="USER", help="Who pulls from a private registry.")
]
PasswordStdinOption = Annotated[
    bool, _option("--registry-password-stdin", help="Read the password from standard input.")
]
PasswordFileOption = Annotated[
    File, _option("--registry-password-file", metavar="FILE", exists=True, help="Read the password from a file.")
]
RegistryOption = Annotated[
    Text, _option("--registry", metavar="HOST[:PORT]", help="Whose credentials these are; needed with a Dockerfile.")
]
CaCertOption = Annotated[
    File, _option("--ca-cert", metavar="FILE", exists=True, help="The certificates of a private authority, as PEM.")
]


class StepsCommand(TyperCommand):
    """A command line whose steps are carried out in the order in which they stand there."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        values, _, order = self.make_parser(ctx).parse_args(args=list(args))
        left = {name: list(values.get(name) or ()) for name in STEPS}
        names = [str(option.name) for option in order if isinstance(option, TyperOption) and option.name in left]
        ctx.meta[_ORDERED] = [(name, str(left[name].pop(0))) for name in names]
        return super().parse_args(ctx, args)


def build_options(ctx: typer.Context) -> dict[str, Any]:
    """Return what the command line asks for, as ``client.builds.start`` takes it."""
    said = ctx.params
    same = ("image", "dockerfile", "archive", "rootfs", "template", "snapshot", "file", "target", "start", "ready")
    options: dict[str, Any] = {
        **{name: said[name] for name in (*same, "cpus")},
        "build_args": pairs(said["build_args"], "--build-arg"),
        "steps": [step(kind, value) for kind, value in ctx.meta[_ORDERED]],
        "context": said["context"] if said["copy"] else None,
        "memory_mib": said["memory"],
        "disk_mib": said["disk"],
        "ports": said["ports"],
        "labels": pairs(said["labels"], "--label"),
        "builder": _builder(said["builder"]),
        "policy": _policy(said["policy"], "--policy"),
        "build_policy": _policy(said["build_policy"], "--build-policy"),
        "timeout_s": said["timeout"],
        "no_cache": said["no_cache"],
        "auth": _auth(said),
        "ca_pem": None if said["ca_cert"] is None else said["ca_cert"].read_text(),
    }
    given = {name: value for name, value in options.items() if value not in (None, [], {}, False)}
    _check_source(given)
    return given


def step(kind: str, value: str) -> dict[str, Any]:
    """Return what one of the step options asks for."""
    match kind:
        case "copy":
            source, colon, target = value.rpartition(":")
            if not colon or not source or not target:
                raise typer.BadParameter(f"{value!r} is not SRC:DST", param_hint="--copy")
            return {"copy": {"sources": [source], "to": target}}
        case "env":
            return {"env": pairs([value], "--env")}
        case _:
            return {kind: value}


def _check_source(given: Mapping[str, Any]) -> None:
    from space.sdk.templates import SOURCES

    if sum(name in given for name in SOURCES) != 1:
        raise typer.BadParameter("exactly one of them says what to build from", param_hint="--from-…, --dockerfile")


def _policy(text: str | None, option: str) -> Any:
    return None if text is None else parse_policy(text, option)


def _builder(items: list[str]) -> dict[str, Any]:
    found = pairs(items, "--builder")
    try:
        return {name: float(value) if name == "cpus" else int(value) for name, value in found.items()}
    except ValueError:
        raise typer.BadParameter("not a number", param_hint="--builder") from None


def _auth(said: Mapping[str, Any]) -> Any:
    """Return the credentials; a password is read from where no other user of this machine can see it."""
    user, registry = said["registry_user"], said["registry"]
    file, stdin = said["registry_password_file"], said["registry_password_stdin"]
    if user is None:
        if registry is not None or file is not None or stdin:
            raise typer.BadParameter("whose password is it?", param_hint="--registry-user")
        return None
    from space import RegistryAuth

    if stdin:
        password = sys.stdin.read(PASSWORD_CHARS_MAX)
    elif file is not None:
        with file.open() as opened:
            password = opened.read(PASSWORD_CHARS_MAX)
    else:
        password = typer.prompt(f"Password of {user}", hide_input=True, err=True)
    return RegistryAuth(username=user, password=password.rstrip("\r\n"), registry=registry)

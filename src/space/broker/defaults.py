"""What a template brings along beside its files: the defaults of what runs in it. They are part of its digest."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

BYTES_MAX = 32 * 1024
"""Of defaults that a request brings: half of the longest line that the broker takes."""
ITEMS_MAX = 1024
_PATH_BYTES_MAX = 4095
_USER_BYTES_MAX = 256

Text = Annotated[str, Field(min_length=1, max_length=BYTES_MAX)]
Command = Text | Annotated[list[Annotated[str, Field(max_length=BYTES_MAX)]], Field(min_length=1, max_length=ITEMS_MAX)]
"""A command line for the shell, or a program and its arguments."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EntryPoint(_Model):
    """What is started once in a machine of the template, and lives on in all that are copied from it.

    Afterwards `ready` is run again and again until it ends with status 0, for `timeout_s` at most.
    """

    start: Command
    ready: Command | None = None
    timeout_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 60.0


class Wanted(_Model):
    """The limits that a sandbox gets which names none; None is the installation's own."""

    cpus: Annotated[float | None, Field(gt=0, le=1024, allow_inf_nan=False)] = None
    memory_mib: Annotated[int | None, Field(ge=1, le=1 << 24)] = None
    disk_mib: Annotated[int | None, Field(ge=1, le=1 << 26)] = None
    pids: Annotated[int | None, Field(ge=1, le=1 << 22)] = None


def _ports(ports: list[int]) -> list[int]:
    """Which ones they are counts, not how often or in which order they were named."""
    return sorted(set(ports))


Port = Annotated[int, Field(ge=1, le=65535)]


class Defaults(_Model):
    """What a sandbox of a template has unless it is told otherwise."""

    env: dict[str, str] = {}
    workdir: str = "/"
    user: str = "root"
    entry: EntryPoint | None = None
    resources: Wanted = Wanted()
    ports: Annotated[list[Port], Field(max_length=ITEMS_MAX), AfterValidator(_ports)] = []
    labels: dict[str, str] = {}

    def told(self) -> dict[str, Any]:
        """Return the first three, and of the others those that say something.

        This is what a digest is made of: those of templates from before the others came to be stay what they were.
        """
        said = self.model_dump(exclude_none=True)
        always = ("env", "workdir", "user")
        return {name: value for name, value in said.items() if name in always or value}


def check(defaults: Defaults) -> Defaults:
    """Return defaults that a request brought, or raise `ValueError` saying what cannot be in them."""
    if len(defaults.model_dump_json()) > BYTES_MAX:
        raise ValueError(f"the defaults have more than {BYTES_MAX} bytes as JSON")
    if len(defaults.env) > ITEMS_MAX or len(defaults.labels) > ITEMS_MAX:
        raise ValueError(f"more than {ITEMS_MAX} variables or labels")
    if any(not name or "=" in name for name in defaults.env):
        raise ValueError("a variable without a name, or with = in it")
    if not defaults.workdir.startswith("/") or len(defaults.workdir.encode()) > _PATH_BYTES_MAX:
        raise ValueError("workdir is not an absolute path")
    if not 0 < len(defaults.user.encode()) <= _USER_BYTES_MAX:
        raise ValueError("user is empty or too long")
    if "\\u0000" in defaults.model_dump_json():
        raise ValueError("a NUL character")
    return defaults

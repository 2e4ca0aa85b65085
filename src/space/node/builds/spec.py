"""What a build is asked for, checked. Knows nothing of how it is carried out."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from space.errors import InvalidRequest
from space.model.ids import is_id
from space.node.builds.pull import Access
from space.settings import Settings

STEPS_MAX = 256
SOURCES_MAX = 256
ENV_MAX = 2048
TEXT_MAX = 64 * 1024
PEM_MAX = 256 * 1024


def _few(value: Any) -> Any:
    """Count the members of objects and lists before looking at any: each wrong one would be described."""
    if isinstance(value, dict | list) and len(value) > ENV_MAX:
        raise ValueError(f"may have at most {ENV_MAX} members")
    return value


def _clean(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain NUL")
    text.encode("utf-8", "surrogateescape")
    return text


def _id_of(prefix: str) -> AfterValidator:
    def check(text: str) -> str:
        if not is_id(prefix, text):
            raise ValueError(f"must be an id: {prefix} and 16 characters")
        return text

    return AfterValidator(check)


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("must be an absolute path")
    return path


def _variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError("is not the name of an environment variable")
    return _clean(name)


Text = Annotated[str, StringConstraints(max_length=TEXT_MAX), AfterValidator(_clean)]
Short = Annotated[str, StringConstraints(min_length=1, max_length=512), AfterValidator(_clean)]
Path_ = Annotated[str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_clean)]
Absolute = Annotated[Path_, AfterValidator(_absolute)]
UserName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.][A-Za-z0-9_.@-]{0,63}(:[A-Za-z0-9_.][A-Za-z0-9_.@-]{0,63})?$")
]
Mode = Annotated[str, StringConstraints(pattern=r"^0?[0-7]{3,4}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Upload = Annotated[str, _id_of("upl")]
Env = Annotated[dict[Annotated[str, AfterValidator(_variable)], Text], BeforeValidator(_few)]
Port = Annotated[int, Field(ge=1, le=65535)]


Words = Annotated[list[Text], Field(min_length=1, max_length=1024)]
Command = Annotated[Text, StringConstraints(min_length=1)] | Words
"""Shell text, or a program and its arguments."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Resources(_Body):
    cpus: Annotated[float, Field(ge=0.05, allow_inf_nan=False)] | None = None
    memory_mib: Annotated[int, Field(ge=64)] | None = None
    disk_mib: Annotated[int, Field(ge=64)] | None = None
    pids: Annotated[int, Field(ge=16)] | None = None


class Entry(_Body):
    start: Command
    ready: Command | None = None
    timeout_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 60.0


class Overrides(_Body):
    """What of a template's defaults is decided here, whatever its source says."""

    env: Env = {}
    workdir: Absolute | None = None
    user: UserName | None = None
    entry: Entry | None = None
    resources: Resources | None = None
    ports: Annotated[list[Port], Field(max_length=64)] | None = None
    labels: Env = {}


class Defaults(_Body):
    """The defaults of a template to begin with. They were checked when it was made."""

    model_config = ConfigDict(extra="ignore", strict=True)

    env: Env = {}
    workdir: Path_ | None = None
    user: Short | None = None
    entry: Entry | None = None
    resources: Resources | None = None
    ports: Annotated[list[Port], Field(max_length=64)] = []
    labels: Env | None = None


class TemplateBase(_Body):
    digest: Digest
    defaults: Defaults = Defaults()
    ref: Short | None = None


class Auth(_Body):
    registry: Short | None = None
    username: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    password: Annotated[str, StringConstraints(max_length=64 * 1024)]


class _FromRegistry(_Body):
    auth: Auth | None = Field(default=None, repr=False)
    ca_pem: Annotated[str, StringConstraints(max_length=PEM_MAX)] | None = Field(default=None, repr=False)

    @property
    def access(self) -> Access:
        auth = self.auth
        if auth is None:
            return Access(ca_pem=self.ca_pem)
        return Access(auth.registry and auth.registry.lower(), auth.username, auth.password, self.ca_pem)


class ImageSource(_FromRegistry):
    kind: Literal["image"]
    reference: Short


class FileSource(_Body):
    kind: Literal["archive", "rootfs"]
    upload: Upload


class DockerfileSource(_FromRegistry):
    kind: Literal["dockerfile"]
    upload: Upload
    dockerfile: Path_ = "Dockerfile"


class TemplateSource(TemplateBase):
    kind: Literal["template"]


class SnapshotSource(_Body):
    kind: Literal["snapshot"]
    snapshot: Annotated[str, _id_of("snp")]
    template_digest: Digest
    defaults: Defaults = Defaults()


class Copy(_Body):
    upload: Upload
    sources: Annotated[list[Path_], Field(min_length=1, max_length=SOURCES_MAX)] = ["."]
    to: Path_
    owner: UserName | None = None
    mode: Mode | None = None
    keep_links: bool = False
    """Copy a source that is a symbolic link as one, rather than what it leads to."""


class Step(_Body):
    """Exactly one of the fields."""

    run: Command | None = None
    copy_: Copy | None = Field(default=None, alias="copy")
    env: Env | None = None
    workdir: Path_ | None = None
    user: UserName | None = None

    @model_validator(mode="after")
    def _one(self) -> Step:
        given = (self.run, self.copy_, self.env, self.workdir, self.user)
        if sum(one is not None for one in given) != 1:
            raise ValueError("must have exactly one of run, copy, env, workdir and user")
        return self


Source = Annotated[
    ImageSource | FileSource | DockerfileSource | TemplateSource | SnapshotSource, Field(discriminator="kind")
]


class BuildSpec(_Body):
    """One build. What is secret in it (``auth``) is in memory alone and never shown."""

    source: Source
    scope: Short = ""
    """Whose it is: steps that another one's build has done are done again."""
    machine: Short = ""
    """The id that its machine gets, by which the gateway knows what may leave it; one of the node's own otherwise."""
    templates: Annotated[dict[Short, TemplateBase], BeforeValidator(_few)] = {}
    build_args: Env = {}
    target: Short | None = None
    shell: Words | None = None
    """What runs a step's shell text, which follows it; ``/bin/sh -c`` otherwise."""
    steps: Annotated[list[Step], Field(max_length=STEPS_MAX)] = []
    defaults: Overrides = Overrides()
    resources: Resources = Resources()
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    no_cache: bool = False

    @property
    def uploads(self) -> set[str]:
        """The uploads that the build reads."""
        own = {self.source.upload} if isinstance(self.source, FileSource | DockerfileSource) else set[str]()
        return own | {step.copy_.upload for step in self.steps if step.copy_ is not None}

    @property
    def fingerprint(self) -> str:
        """Tells one spec from another; nothing of it can be read from this (the credentials are not in it)."""
        text = self.model_dump_json(exclude={"source": {"auth", "ca_pem"}}, by_alias=True)
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def parse_spec(body: dict[str, Any], settings: Settings) -> BuildSpec:
    """Return the checked spec; raise ``InvalidRequest`` that names the first field that is wrong, never its value."""
    try:
        # From JSON: strictness then takes a whole number where a fraction may be.
        spec = BuildSpec.model_validate_json(json.dumps(body))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = _field(problem["loc"])
        raise InvalidRequest(f"`{field}`: {problem['msg'].removeprefix('Value error, ')}.", field=field) from None
    if isinstance(spec.source, DockerfileSource) and spec.source.auth is not None and spec.source.auth.registry is None:
        raise InvalidRequest(
            "`source.auth.registry` is needed: a Dockerfile may name several.", field="source.auth.registry"
        )
    limits = {"cpus": settings.cpus_max, "memory_mib": settings.memory_mib_max, "disk_mib": settings.disk_mib_max}
    for name, most in {**limits, "pids": settings.pids_max}.items():
        asked = getattr(spec.resources, name)
        if asked is not None and asked > most:
            raise InvalidRequest(f"`resources.{name}` must be at most {most:g}.", field=f"resources.{name}")
    return spec


def _field(location: tuple[int | str, ...]) -> str:
    """Return where a problem is, without what pydantic says of the types it has tried."""
    parts = [str(part) for part in location if not re.search(r"[\[(]|^constrained", str(part))]
    if parts[:1] == ["source"]:
        del parts[1:2]  # which kind of source
    return ".".join(parts) or "body"

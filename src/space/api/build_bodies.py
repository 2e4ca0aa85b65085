"""What requests for builds and uploads look like."""

# ruff: noqa: RUF012 - pydantic copies defaults

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr, StringConstraints, model_validator

from space.api.bodies import Body, Env, Seconds, without_nul
from space.api.egress_bodies import PolicyReference
from space.model.build import BUILDER, TIMEOUT_S_DEFAULT, TIMEOUT_S_MAX
from space.model.template import NAME, TAG, TAG_DEFAULT

STEPS_MAX = 256
SOURCES_MAX = 256
ITEMS_MAX = 1024
PORTS_MAX = 64
TEXT_CHARS_MAX = 64 * 1024
PATH_CHARS_MAX = 4096
REFERENCE_CHARS_MAX = 512
PEM_CHARS_MAX = 256 * 1024
ENTRY_S_MAX = 3600

TemplateName = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
TagName = Annotated[str, StringConstraints(pattern=f"^{TAG}$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=TEXT_CHARS_MAX), AfterValidator(without_nul)]
Path = Annotated[str, StringConstraints(min_length=1, max_length=PATH_CHARS_MAX), AfterValidator(without_nul)]
Image = Annotated[str, StringConstraints(min_length=1, max_length=REFERENCE_CHARS_MAX), AfterValidator(without_nul)]
Id = Annotated[str, StringConstraints(max_length=64)]
Words = Annotated[list[Annotated[str, AfterValidator(without_nul)]], Field(min_length=1, max_length=ITEMS_MAX)]
Command = Text | Words
"""Shell text, or a program and its arguments."""


class RegistryAuth(Body):
    """Credentials for an image registry. They go to where the image is pulled, and are kept and shown nowhere."""

    username: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    password: SecretStr
    registry: Annotated[str, StringConstraints(max_length=300)] | None = None
    """`host` or `host:port`; needed for a Dockerfile, which may name several."""


class _Pulling(Body):
    auth: RegistryAuth | None = None
    ca_pem: Annotated[str, StringConstraints(max_length=PEM_CHARS_MAX)] | None = None
    """Certificates of a private authority that the registry's is from, as PEM."""


class ImageSource(_Pulling):
    """An image of a registry, by tag or digest."""

    kind: Literal["image"]
    reference: Image


class FileSource(Body):
    """An OCI or `docker save` archive, or a tar of a root file system, that was uploaded."""

    kind: Literal["archive", "rootfs"]
    upload: Id


class DockerfileSource(_Pulling):
    """A Dockerfile in a context: a tar that was uploaded. `FROM space:NAME[:TAG]` is one of the project's templates."""

    kind: Literal["dockerfile"]
    upload: Id
    dockerfile: Path = "Dockerfile"
    """Where in the context it is."""


class TemplateSource(Body):
    """Another template: `name`, `name:tag` or `sha256:…`."""

    kind: Literal["template"]
    template: Annotated[str, StringConstraints(min_length=1, max_length=200)]


class SnapshotSource(Body):
    """A snapshot of a disk."""

    kind: Literal["snapshot"]
    snapshot: Id


Source = Annotated[
    ImageSource | FileSource | DockerfileSource | TemplateSource | SnapshotSource, Field(discriminator="kind")
]


class CopyStep(Body):
    """Files of an uploaded tar to be copied, as `COPY` in a Dockerfile does."""

    upload: Id
    sources: Annotated[list[Path], Field(min_length=1, max_length=SOURCES_MAX)] = ["."]
    to: Path
    owner: Annotated[str, StringConstraints(min_length=1, max_length=130)] | None = None
    mode: Annotated[str, StringConstraints(pattern="^0?[0-7]{3,4}$")] | None = None


class Step(Body):
    """One step after the source: exactly one of the fields."""

    run: Command | None = None
    copy_: CopyStep | None = Field(default=None, alias="copy")
    env: Env | None = None
    workdir: Path | None = None
    user: Annotated[str, StringConstraints(min_length=1, max_length=130)] | None = None

    @model_validator(mode="after")
    def _one(self) -> "Step":
        if len(self.model_fields_set) != 1:
            raise ValueError("must have exactly one of run, copy, env, workdir and user")
        return self


class EntryBody(Body):
    """What is started once in a machine of the template, and lives on in every sandbox that is made from it."""

    start: Command
    ready: Command | None = None
    """Run again and again until it ends with status 0."""
    timeout_s: Annotated[float, Field(gt=0, le=ENTRY_S_MAX, allow_inf_nan=False)] = 60.0
    """How long that may take."""


class DefaultResources(Body):
    """What sandboxes get that name none."""

    cpus: Annotated[float, Field(ge=0.05, allow_inf_nan=False)] | None = None
    memory_mib: Annotated[int, Field(ge=64)] | None = None
    disk_mib: Annotated[int, Field(ge=64)] | None = None
    pids: Annotated[int, Field(ge=16)] | None = None


class DefaultsBody(Body):
    """What sandboxes of the template have unless they are told otherwise; what is left out comes from the source."""

    env: Env = {}
    workdir: Path | None = None
    user: Annotated[str, StringConstraints(min_length=1, max_length=130)] | None = None
    entry: EntryBody | None = None
    resources: DefaultResources | None = None
    ports: Annotated[list[Annotated[int, Field(ge=1, le=65535)]], Field(max_length=PORTS_MAX)] | None = None
    labels: Env = {}
    policy: PolicyReference | None = None
    """What may leave its sandboxes: a document, a preset, or a policy's name. No part of what the digest is of."""


class BuilderResources(Body):
    """Limits of the machine that builds."""

    cpus: Annotated[float, Field(ge=0.05, allow_inf_nan=False)] = BUILDER.cpus
    memory_mib: Annotated[int, Field(ge=64)] = BUILDER.memory_mib
    disk_mib: Annotated[int, Field(ge=64)] = BUILDER.disk_mib
    pids: Annotated[int, Field(ge=16)] = BUILDER.pids


class BuildCreate(Body):
    """A template to be built: its source, then the steps. When it is done `name:tag` points to it."""

    name: TemplateName
    tag: TagName = TAG_DEFAULT
    source: Source
    steps: Annotated[list[Step], Field(max_length=STEPS_MAX)] = []
    defaults: DefaultsBody = DefaultsBody()
    build_args: Env = {}
    """Of a Dockerfile. Not for secrets: they may be in the template."""
    target: Annotated[str, StringConstraints(min_length=1, max_length=512), AfterValidator(without_nul)] | None = None
    """The stage of a Dockerfile that becomes the template; the last one otherwise."""
    resources: BuilderResources = BuilderResources()
    timeout_s: Annotated[Seconds, Field(le=TIMEOUT_S_MAX)] = TIMEOUT_S_DEFAULT
    no_cache: bool = False
    """Do every step again, whatever is kept of earlier builds."""
    policy: PolicyReference | None = None
    """What may leave the machine that builds; null: as the project or the installation has it."""

    def rest(self) -> dict[str, Any]:
        """Return what the node is told as it stands."""
        told = self.model_dump(
            include={"steps", "defaults", "build_args", "target", "no_cache"},
            exclude={"defaults": {"policy"}},
            exclude_unset=True,
            by_alias=True,
        )
        return {name: value for name, value in told.items() if value is not None}


class UploadCreate(Body):
    """Room for something that a build is to read."""

    size: Annotated[int, Field(ge=0, le=1 << 44)]
    """How many bytes are to come."""


class TagMove(Body):
    """Where the tag is to point: a digest that the project has released."""

    digest: Annotated[str, StringConstraints(pattern="^sha256:[0-9a-f]{64}$")]


class Warm(Body):
    memory_mib: Annotated[int, Field(ge=64)] | None = None
    """The size of sandboxes to be prepared for; the template's own otherwise."""


GcSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Gc(Body):
    """What to remove besides what belongs to nobody; nothing of it unless it is said."""

    dry_run: bool = False
    """Only look; remove nothing."""
    untagged_s: GcSeconds | None = None
    """Releases of templates that no tag has pointed to for so long, and that nothing of their project is made from."""
    cache_age_s: GcSeconds | None = None
    """Steps kept of builds that were not used for so long."""
    cache_bytes_max: Annotated[int, Field(ge=0)] | None = None
    """So much of kept steps may stay, those that were used last."""

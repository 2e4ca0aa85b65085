"""The broker's requests as they come over its socket, and the answers. All is checked here; nothing is a path."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from space.broker import defaults
from space.errors import InvalidRequest
from space.model.sandbox import Resources
from space.model.volume import MOUNTS_MAX, Mount, check_apart, check_path

LINE_BYTES_MAX = 64 * 1024

MachineId = Annotated[str, Field(pattern=r"^sbx[a-z2-7]{16}$")]
SnapshotId = Annotated[str, Field(pattern=r"^snp[a-z2-7]{16}$")]
TemplateDigest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
VolumeId = Annotated[str, Field(pattern=r"^vol[a-z2-7]{16}$")]
Hostname = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Annotated[int, Field(ge=0, le=2**53)]
    # Whose work it is, for the log and the trace; nothing is decided by it.
    trace: Annotated[str | None, Field(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")] = None
    request_id: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = None
    operation: Annotated[str | None, Field(pattern=r"^op[a-z2-7]{16}$")] = None


class Limits(BaseModel):
    """Resources within what any host could have; the installation's own maxima are checked by the machines."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cpus: Annotated[float, Field(gt=0, le=1024, allow_inf_nan=False)]
    memory_mib: Annotated[int, Field(ge=1, le=1 << 24)]
    disk_mib: Annotated[int, Field(ge=1, le=1 << 26)]
    pids: Annotated[int, Field(ge=1, le=1 << 22)]
    io_weight: Annotated[int, Field(ge=1, le=1000)] = 100

    def resources(self) -> Resources:
        return Resources(self.cpus, self.memory_mib, self.disk_mib, self.pids, self.io_weight)


class Mounted(BaseModel):
    """A volume, and where in the machine it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    volume: VolumeId
    path: Annotated[str, AfterValidator(check_path)]


class Boot(_Request):
    verb: Literal["boot"]
    machine: MachineId
    template: TemplateDigest
    driver: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
    resources: Limits
    hostname: Hostname
    snapshot: SnapshotId | None = None
    spare: bool = False
    volumes: Annotated[list[Mounted], Field(max_length=MOUNTS_MAX)] = []

    @model_validator(mode="after")
    def _apart(self) -> Self:
        check_apart(one.path for one in self.volumes)
        return self

    def mounts(self) -> tuple[Mount, ...]:
        return tuple(Mount(one.volume, one.path) for one in self.volumes)


class Claim(_Request):
    verb: Literal["claim"]
    machine: MachineId
    spare: MachineId
    resources: Limits
    hostname: Hostname


class Keep(_Request):
    verb: Literal["snapshot"]
    machine: MachineId
    snapshot: SnapshotId
    kind: Literal["disk", "full"]


class OfSnapshot(_Request):
    verb: Literal["drop-snapshot"]
    snapshot: SnapshotId


class Publish(_Request):
    verb: Literal["publish"]
    machine: MachineId
    defaults: Annotated[defaults.Defaults, AfterValidator(defaults.check)]


class OfTemplate(_Request):
    verb: Literal["drop-template"]
    template: TemplateDigest


class MakeVolume(_Request):
    verb: Literal["make-volume"]
    volume: VolumeId
    size_mib: Annotated[int, Field(ge=1, le=1 << 26)]


class OfVolume(_Request):
    verb: Literal["drop-volume"]
    volume: VolumeId


class Gc(_Request):
    verb: Literal["gc"]
    dry_run: bool


class OfMachine(_Request):
    verb: Literal["pause", "resume", "suspend", "wake", "stop", "start", "destroy", "inspect"]
    machine: MachineId


class OfHost(_Request):
    verb: Literal["machines", "templates", "snapshots", "volumes", "drivers", "doctor", "figures"]


Request = Boot | Claim | Keep | OfSnapshot | Publish | OfTemplate | MakeVolume | OfVolume | Gc | OfMachine | OfHost
_REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="verb")])


def parse(line: bytes) -> Request:
    """Return the request in one line, or raise `InvalidRequest` naming the first field that is wrong."""
    try:
        return _REQUESTS.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"The request is not valid: {first['msg']}.", field=field) from error


def number_of(line: bytes) -> int | None:
    """Return the number of a request that is not otherwise valid, so that the answer can name it."""
    try:
        return _Numbered.model_validate_json(line).id
    except ValidationError:
        return None


class _Numbered(BaseModel):
    model_config = ConfigDict(strict=True)

    id: Annotated[int, Field(ge=0, le=2**53)]

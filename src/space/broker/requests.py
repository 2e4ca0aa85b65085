"""The broker's requests as they come over its socket, and the answers. All is checked here; nothing is a path."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from space.errors import InvalidRequest
from space.model.sandbox import Resources

LINE_BYTES_MAX = 64 * 1024

MachineId = Annotated[str, Field(pattern=r"^sbx[a-z2-7]{16}$")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Annotated[int, Field(ge=0, le=2**53)]


class Limits(BaseModel):
    """Resources within what any host could have; the installation's own maxima are checked by the machines."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cpus: Annotated[float, Field(gt=0, le=1024, allow_inf_nan=False)]
    memory_mib: Annotated[int, Field(ge=1, le=1 << 24)]
    disk_mib: Annotated[int, Field(ge=1, le=1 << 26)]
    pids: Annotated[int, Field(ge=1, le=1 << 22)]

    def resources(self) -> Resources:
        return Resources(self.cpus, self.memory_mib, self.disk_mib, self.pids)


class Boot(_Request):
    verb: Literal["boot"]
    machine: MachineId
    template: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    driver: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
    resources: Limits
    hostname: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class OfMachine(_Request):
    verb: Literal["pause", "resume", "suspend", "wake", "stop", "start", "destroy", "inspect"]
    machine: MachineId


class OfHost(_Request):
    verb: Literal["machines", "templates", "doctor"]


Request = Boot | OfMachine | OfHost
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

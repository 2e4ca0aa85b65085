"""Having a tree completed and looked at by a process that sees nothing else, and saying in our words what it says."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from space.broker import trees
from space.broker.defaults import Defaults
from space.drivers import programs
from space.errors import HostError, InvalidRequest

log = structlog.get_logger()


class Sealed(BaseModel):
    """What a tree is once nobody writes to it: its digest as hexadecimal digits, and the bytes that it takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0)]
    entries: Annotated[int, Field(ge=0)]


class _Unfit(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    code: Literal["template-unfit", "device-in-template", "template-too-large"]
    message: str
    path: str


def head(defaults: Defaults) -> bytes:
    """Return what a template's digest begins with."""
    return trees.line({"defaults": defaults.told()})


async def seal(root: Path, defaults: Defaults, *, tidy: bool, limit_s: float) -> Sealed:
    """Complete a tree that nobody else writes to and return what it is; `tidy` takes off what a machine leaves of
    itself. Raise `InvalidRequest` when it cannot be a template.
    """
    # SAFETY: our own program, with a process id and the path of a directory of the store; what it begins the digest
    # with arrives on standard input. It gives up the rest of the file system before it looks at anything.
    words = [sys.executable, "-I", "-S", trees.__file__, str(os.getpid()), str(root), *(["--tidy"] if tidy else [])]
    try:
        finished = await programs.run(words, timeout_s=limit_s, stdin=head(defaults))
    except HostError as error:
        if error.code != "program-timeout":
            raise
        raise InvalidRequest(
            f"The template could not be read through within {limit_s:g} s: let it hold less.",
            code="template-too-large",
            limit_s=limit_s,
        ) from error
    try:
        if finished.status == 0:
            return Sealed.model_validate_json(finished.output)
        if finished.status == trees.REFUSED:
            raise _refusal(_Unfit.model_validate_json(finished.output))
    except ValidationError:
        pass
    log.error("template-not-read", status=finished.status, complaint=finished.complaint)
    raise HostError("The template's files could not be read.", code="template-not-read")


def _refusal(unfit: _Unfit) -> InvalidRequest:
    details: dict[str, Any] = {"path": unfit.path} if unfit.path else {}
    match unfit.code:
        case "device-in-template":
            return InvalidRequest(unfit.message, code="device-in-template", **details)
        case "template-too-large":
            return InvalidRequest(unfit.message, code="template-too-large", **details)
        case _:
            return InvalidRequest(unfit.message, code="template-unfit", **details)

"""What requests about volumes look like."""

from typing import Annotated

from pydantic import AfterValidator, Field

from space.api.bodies import Body, Name
from space.model.volume import MOUNTS_MAX, check_apart, check_path


class VolumeCreate(Body):
    """A volume to be made."""

    name: Name
    """The project's only volume of that name."""
    size_mib: Annotated[int, Field(ge=16)] | None = None
    """How much it holds; null: 4096, or the most that a disk may have here."""


class VolumeMount(Body):
    """A volume, and where a sandbox has it."""

    name: Name
    path: Annotated[str, AfterValidator(check_path)]
    """Absolute; made where it is missing. Not in `/.space`, `/dev`, `/proc`, `/run` or `/sys`, the machine's own."""


def _apart(mounts: list[VolumeMount]) -> list[VolumeMount]:
    check_apart(one.path for one in mounts)
    return mounts


Volumes = Annotated[list[VolumeMount], Field(max_length=MOUNTS_MAX), AfterValidator(_apart)]

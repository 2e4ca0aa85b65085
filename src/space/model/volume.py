"""Volumes: directories that outlive sandboxes and that several of them mount, and where in a sandbox one may be."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

PATH_BYTES_MAX = 255
PARTS_MAX = 16
MOUNTS_MAX = 16
"""Of one sandbox."""
SIZE_MIB = 4096
"""Of a volume that names none."""
TAKEN = ("/.space", "/dev", "/proc", "/run", "/sys")
"""Where machines mount what is theirs."""


class VolumeState(StrEnum):
    """Only a ready one is told of and mounted; the others are on their way to be, or not to be any more."""

    CREATING = "creating"
    READY = "ready"
    DELETING = "deleting"


@dataclass(frozen=True, slots=True)
class Mount:
    """Where in a machine a volume is. ``volume`` is its id."""

    volume: str
    path: str


@dataclass(frozen=True, slots=True)
class Volume:
    """One volume as the store knows it; its name is its project's only one."""

    id: str
    project_id: str
    name: str
    size_mib: int
    state: VolumeState
    created_at: datetime
    updated_at: datetime


def check_path(path: str) -> str:
    """Return where a volume is to be mounted, or raise ``ValueError`` that says what is wrong with it."""
    parts = path.split("/")
    if (
        not path.startswith("/")
        or len(path.encode("utf-8", "surrogatepass")) > PATH_BYTES_MAX
        or len(parts) > PARTS_MAX
    ):
        raise ValueError(f"must be absolute, with at most {PATH_BYTES_MAX} bytes and {PARTS_MAX} parts")
    if any(part in {"", ".", ".."} for part in parts[1:]) or not path.isprintable():
        raise ValueError("must be plain: printable, no `.`, `..`, or empty part, and not the root")
    if any(path == taken or path.startswith(f"{taken}/") for taken in TAKEN):
        raise ValueError(f"must not be in {', '.join(TAKEN)}, which are the machine's own")
    return path


def check_apart(paths: Iterable[str]) -> None:
    """Raise ``ValueError`` when one place is another, or lies in it."""
    ordered = sorted(f"{path}/" for path in paths)
    for above, below in itertools.pairwise(ordered):
        if below.startswith(above):
            raise ValueError(f"must lie apart: {below.rstrip('/')} is in {above.rstrip('/')}")

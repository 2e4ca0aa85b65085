"""What is mounted where, as the kernel tells this process."""

# ruff: noqa: ASYNC240 - names in local directories are looked up in microseconds

import asyncio
import os
import re
import time
from contextlib import suppress
from pathlib import Path

RELEASE_S = 5.0
_POLL_S = 0.01

_OCTAL = re.compile(r"\\([0-7]{3})")


def mount_points() -> dict[Path, str]:
    """Return the file system's type by mount point; of several mounts on one point the uppermost."""
    found: dict[Path, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), left.split()[4])
        found[Path(point)] = right.split()[0]
    return found


def is_mounted(path: Path) -> bool:
    """Whether something is mounted exactly there."""
    return Path(os.path.realpath(path)) in mount_points()


def mount_kind(path: Path) -> str:
    """Return the type of the file system that `path` lies on."""
    points = mount_points()
    resolved = Path(os.path.realpath(path))
    return next((points[place] for place in (resolved, *resolved.parents) if place in points), "")


async def wait_released(image: Path) -> None:
    """Wait until no loop device holds `image`: programs that start at this moment hold copies of all mounts a little.

    Give up silently after a few seconds: the device goes by itself with the last of them.
    """
    wanted = os.path.realpath(image)
    deadline = time.monotonic() + RELEASE_S
    while any(_read(file) == wanted for file in Path("/sys/block").glob("loop*/loop/backing_file")):
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(_POLL_S)


def _read(file: Path) -> str:
    with suppress(OSError):
        return file.read_text().strip()
    return ""

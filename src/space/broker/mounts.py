"""What is mounted where, as the kernel tells this process."""

import os
import re
from pathlib import Path

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

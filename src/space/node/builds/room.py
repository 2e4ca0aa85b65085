"""Whether the host has room for what a build brings. The last of its disk is others'."""

from __future__ import annotations

import os
from pathlib import Path

from space.errors import HostFull
from space.node.records import FREE_BYTES_MIN


def free_bytes(directory: Path) -> int:
    """Return how much more a build may write there."""
    found = os.statvfs(directory)
    return max(0, found.f_bavail * found.f_frsize - FREE_BYTES_MIN)


def check_room(directory: Path, more: int = 0) -> None:
    """Raise ``HostFull`` when there is no room for ``more`` bytes."""
    if free_bytes(directory) < more + 1:
        raise HostFull("The host has no room for what the build needs.")

"""Room for images of memory. Programs that write them, and run out of it, report anything but that."""

import os
from pathlib import Path

_FULL_BYTES = 1 << 20


def is_full(*places: Path) -> bool:
    """Whether writing in one of those directories fails for want of room."""
    found = (os.statvfs(place) for place in places)
    return any(one.f_bavail * one.f_frsize < _FULL_BYTES for one in found)

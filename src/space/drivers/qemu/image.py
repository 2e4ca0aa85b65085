"""What a machine's image says of itself, and whether it can be restored here."""

import json
import os
from pathlib import Path
from typing import Any

from space.errors import HostError

STATE = "state"
"""What QEMU wrote, the guest's memory and its devices."""
_MANIFEST = "space.json"
_MAGIC = b"QEVM"


def write(image: Path, started: dict[str, Any], size: int) -> None:
    """Complete an image by what its machine was started with, and by how many bytes QEMU wrote."""
    (image / _MANIFEST).write_text(json.dumps({**started, "bytes": size}))


def read(image: Path) -> dict[str, Any]:
    """Return what the image's machine was started with."""
    return json.loads((image / _MANIFEST).read_text())


def check(image: Path, version: str, counter_khz: int) -> None:
    """Raise `HostError` unless it is complete, of this version of QEMU, and of a processor that counts as fast."""
    try:
        started = read(image)
        with (image / STATE).open("rb") as file:
            whole = file.read(len(_MAGIC)) == _MAGIC and os.fstat(file.fileno()).st_size == started["bytes"]
        written, counted = started["version"], started["hardware"]["counter_khz"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HostError("The memory image cannot be read.", code="image-damaged") from error
    if not whole:
        raise HostError("The memory image is not complete.", code="image-damaged")
    if written != version:
        raise HostError("The memory image was written by another version of QEMU.", code="image-version")
    if abs(counted - counter_khz) > counted // 1000:
        raise HostError("The memory image was written on another kind of processor.", code="image-version")

"""What a machine's image says of itself, and whether it can be restored here."""

import hashlib
import json
from pathlib import Path
from typing import Any

from space.drivers.firecracker import config
from space.errors import HostError

_MANIFEST = "space.json"


def write(image: Path, started: dict[str, Any]) -> None:
    """Complete an image by what its machine was started with, and how large its files are."""
    sizes = {name: (image / name).stat().st_size for name in config.IMAGE}
    (image / _MANIFEST).write_text(json.dumps({**started, "bytes": sizes}))


def read(image: Path) -> dict[str, Any]:
    """Return what the image's machine was started with."""
    found: dict[str, Any] = json.loads((image / _MANIFEST).read_text())
    found.pop("bytes")
    return found


def check(image: Path, version: str) -> None:
    """Raise `HostError` unless it is complete, of this release of Firecracker, and of this kind of processor."""
    try:
        manifest = json.loads((image / _MANIFEST).read_text())
        whole = all((image / name).stat().st_size == manifest["bytes"][name] for name in config.IMAGE)
        written, on = manifest["version"], manifest["processor"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HostError("The memory image cannot be read.", code="image-damaged") from error
    if not whole:
        raise HostError("The memory image is not complete.", code="image-damaged")
    if written != version:
        raise HostError("The memory image was written by another version of Firecracker.", code="image-version")
    if on != processor():
        raise HostError("The memory image was written on another kind of processor.", code="image-version")


def processor() -> str:
    """Return what tells kinds of processors apart: an image has a guest that knows the one that it booted on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    told = dict.fromkeys(line for line in lines if line.startswith(("vendor_id", "model", "stepping", "flags")))
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]

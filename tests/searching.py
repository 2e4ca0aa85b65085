"""Looking for bytes that must be nowhere: in files of something that runs, which come and go meanwhile."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PART_BYTES = 1 << 20


def files_with(needle: bytes, tops: Iterable[Path], *, without: tuple[str, ...] = ()) -> list[Path]:
    """Regular files below `tops` that contain `needle`; what is named in `without` is not looked into."""
    found = []
    for top in tops:
        if top.is_file():
            found += [top] if _contains(top, needle) else []
        for directory, inside, names in os.walk(top):
            inside[:] = [name for name in inside if name not in without]
            looked = (Path(directory, name) for name in names if name not in without)
            found += [path for path in looked if _contains(path, needle)]
    return found


def _contains(path: Path, needle: bytes) -> bool:
    """False too for what is no regular file, and for what is gone by now."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            tail = b""
            while part := file.read(PART_BYTES):
                if needle in tail + part:
                    return True
                tail = part[-len(needle) :]
    return False

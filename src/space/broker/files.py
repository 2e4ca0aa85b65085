"""Letting files survive a power cut."""

import os
from pathlib import Path


def sync_tree(directory: Path) -> None:
    """Let all that is in a directory, and below, survive a power cut."""
    for path in directory.iterdir():
        if path.is_dir():
            sync_tree(path)
        else:
            sync(path)
    sync(directory)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

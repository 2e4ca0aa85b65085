"""Secrets of this installation that live in a file of the api's own, made at first use."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def kept(path: Path, make: Callable[[], bytes]) -> bytes:
    """Return what ``path`` holds, after making it there (mode 0600, synced) when the file is absent.

    Of two processes that do so at once, the first one's stays.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    made = make()
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(made)
        file.flush()
        os.fsync(file.fileno())
    try:
        # A link, not a rename, which would replace the other process's.
        path.hardlink_to(draft)
    except FileExistsError:
        return path.read_bytes()
    finally:
        draft.unlink()
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)  # what was shown to somebody must outlive a power cut
    finally:
        os.close(directory)
    return made

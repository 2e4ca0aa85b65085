"""Locks between processes of root: one broker per data directory, one at a time at the store and at importing."""

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from space.errors import Unavailable

_POLL_S = 0.05


@asynccontextmanager
async def exclusive(path: Path, *, wait_s: float, busy: str) -> AsyncGenerator[None]:
    """Hold the lock file at `path`; raise `Unavailable` with the message `busy` when it is not free in time.

    The kernel frees it when this process ends, however it ends; children do not inherit it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while not _try(descriptor):
            if time.monotonic() >= deadline:
                raise Unavailable(busy, code="busy")
            await asyncio.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

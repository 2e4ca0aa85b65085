"""Ending a program that was started with pipes, with all that it has started itself."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import Process

END_S = 5.0
"""For what was killed to be gone. Who holds on to a pipe of it from elsewhere is not waited for longer."""
_READ_BYTES = 64 * 1024


async def end(process: Process) -> None:
    """SIGKILL the session that ``process`` leads, and return when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        # With all that it has started: whoever of them holds a pipe would be waited for.
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            # To asyncio a process has ended when its output was read to the end, too, which stops where nobody reads.
            await asyncio.gather(_read_away(process.stdout), _read_away(process.stderr))
            await process.wait()


async def _read_away(stream: asyncio.StreamReader | None) -> None:
    with contextlib.suppress(OSError):
        while stream is not None and await stream.read(_READ_BYTES):
            pass

"""Programs that a build runs beside the node: with nothing of its environment, bounded, and gone when it is.

Each runs as the node's own unprivileged user, in a session of its own that is killed as a whole, and dies with the
node: its bytes come from strangers.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

from space.children import end
from space.errors import HostError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMPLAINT_BYTES_MAX = 16 * 1024
_READ_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may take: bytes of one file, of memory, and seconds of processor time."""

    file_bytes: int
    memory_bytes: int
    cpu_s: int


@dataclass(frozen=True, slots=True)
class Finished:
    """How a child ended. ``status`` is minus the signal's number where one ended it."""

    status: int
    output: bytes
    complaint: str


@contextlib.asynccontextmanager
async def started(argv: Sequence[str], home: Path, limits: Limits, *, feed: bool = False) -> AsyncGenerator[Process]:
    """Start a program in ``home``, also its HOME and TMPDIR; when the block ends it is gone with all it has started."""
    bounds = (f"--fsize={limits.file_bytes}", f"--as={limits.memory_bytes}", f"--cpu={limits.cpu_s}", "--core=0")
    words = ("setpriv", "--pdeathsig", "KILL", "--", "prlimit", *bounds, "--", *argv)
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=PIPE if feed else DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            cwd=home,
            env={"PATH": PATH, "LC_ALL": "C.UTF-8", "HOME": str(home), "TMPDIR": str(home)},
            start_new_session=True,
        )
    except OSError as error:
        raise HostError(f"{words[0]} cannot be run: {error.strerror}.", code="program-failed") from error
    try:
        yield process
    finally:
        await end(process)


async def run(
    argv: Sequence[str], home: Path, limits: Limits, *, timeout_s: float, output_bytes_max: int, stdin: bytes = b""
) -> Finished:
    """Run a program to its end; of its output no more than ``output_bytes_max`` are kept.

    Raises ``TimeoutError`` when it does not end in time.
    """
    async with asyncio.timeout(timeout_s), started(argv, home, limits, feed=bool(stdin)) as process:
        async with asyncio.TaskGroup() as group:
            output = group.create_task(_kept(process.stdout, output_bytes_max))
            complaint = group.create_task(_kept(process.stderr, COMPLAINT_BYTES_MAX))
            if process.stdin is not None:
                group.create_task(_feed(process.stdin, stdin))
        status = await process.wait()
    return Finished(status, output.result(), complaint.result().decode(errors="replace"))


async def _kept(stream: asyncio.StreamReader | None, most: int) -> bytes:
    """Read to the end, and keep the first bytes."""
    kept = bytearray()
    while stream is not None and (data := await stream.read(_READ_BYTES)):
        kept += data[: most - len(kept)]
    return bytes(kept)


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
        stream.close()

"""Asks the reader (`reader.py`), a child for each question, and turns what it refuses into errors."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import structlog

from space.errors import HostError, RequestError, SandboxError, SpaceError
from space.node.builds import children
from space.node.builds.children import Finished, Limits
from space.node.builds.refusals import error_of

log = structlog.get_logger(__name__)

MIB = 1024 * 1024
ANSWER_BYTES_MAX = 16 * MIB
MEMORY_BYTES = 2048 * MIB
TIME_S = 300.0
CPU_S = 240
_REFUSED = 3
_PIECE_BYTES = 256 * 1024
_ARGV = (sys.executable, "-I", "-m", "space.node.builds.reader")


class Reading:
    """The reader of one build. ``home`` is where its children run, ``bytes_max`` the largest file they may write."""

    def __init__(self, home: Path, bytes_max: int, cpu_s: int = CPU_S) -> None:
        self._home = home
        self.bytes_max = bytes_max
        self._limits = Limits(file_bytes=bytes_max, memory_bytes=MEMORY_BYTES, cpu_s=cpu_s)

    async def ask(self, verb: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the reader's answer, or raise what it refuses."""
        try:
            finished = await children.run(
                [*_ARGV, verb],
                self._home,
                self._limits,
                timeout_s=TIME_S,
                output_bytes_max=ANSWER_BYTES_MAX + 1,
                stdin=json.dumps(asked).encode(),
            )
        except TimeoutError as error:
            raise _too_much() from error
        if finished.status:
            raise _failure(finished)
        if len(finished.output) > ANSWER_BYTES_MAX:
            raise _too_much()
        answer: dict[str, Any] = json.loads(finished.output)
        return answer

    async def emit(self, asked: dict[str, Any]) -> AsyncGenerator[bytes]:
        """Yield the tar that the reader makes; one that breaks off raises."""
        async with children.started([*_ARGV, "emit"], self._home, self._limits, feed=True) as process:
            if process.stdin is None or process.stdout is None or process.stderr is None:
                raise HostError("The reader has no pipes.", code="program-failed")
            with contextlib.suppress(ConnectionError):
                process.stdin.write(json.dumps(asked).encode())
                await process.stdin.drain()
                process.stdin.close()
            while piece := await process.stdout.read(_PIECE_BYTES):
                yield piece
            complaint = await process.stderr.read(children.COMPLAINT_BYTES_MAX)
            if status := await process.wait():
                raise _failure(Finished(status, b"", complaint.decode(errors="replace")))


def _failure(finished: Finished) -> SpaceError:
    if finished.status == _REFUSED:
        with contextlib.suppress(ValueError, KeyError):
            told = json.loads(finished.complaint.splitlines()[-1])
            return error_of(told["code"], told["message"], told["line"])
    if finished.status < 0 or "MemoryError" in finished.complaint or "File too large" in finished.complaint:
        return _too_much()
    # The kind of the exception, and not what it says: that may be the client's.
    last = finished.complaint.rstrip().rpartition("\n")[2].partition(":")[0]
    log.warning("reader-failed", status=finished.status, error=last[:100])
    return SandboxError("The context of the build could not be read.", code="context-unreadable")


def _too_much() -> RequestError:
    return RequestError("Reading the context or the Dockerfile takes too much.", code="context-too-large")

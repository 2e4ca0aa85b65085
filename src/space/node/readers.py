"""What an attached client is handed, in order: output, gaps, progress of stdin, and the exit record last."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from space.model.command import Exit

if TYPE_CHECKING:
    from space.node.sessions import Session

CHUNK_BYTES_MAX = 256 * 1024


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one stream, ``offset`` being that of the first."""

    stream: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes ``start``…``end`` - 1 of a stream are no longer kept."""

    stream: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StdinSafe:
    """The guest has taken the command's stdin up to ``offset``."""

    offset: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The command has ended and every byte of it was handed out."""

    exit: Exit
    produced: dict[str, int]
    duration_s: float


Item = Chunk | Gap | StdinSafe | Exited


class Reader:
    """One attached client's place in a session's output. ``offsets`` is the next byte of each stream to hand out."""

    def __init__(self, session: Session, offsets: dict[str, int]) -> None:
        self.offsets = offsets
        self._session = session
        self._changed = asyncio.Event()
        self._turn = list(offsets)
        self._stdin_told = session.stdin_safe

    def wake(self) -> None:
        self._changed.set()

    def close(self) -> None:
        self._session.release(self)

    async def next(self) -> Item:
        """Return what comes next, waiting for it. Calling it says that the item before was passed on.

        Raises the session's error when there will be nothing more, such as after the sandbox was deleted.
        """
        self._session.advance()
        while True:
            self._changed.clear()
            item = self.poll()
            if item is not None:
                return item
            await self._changed.wait()

    def poll(self) -> Item | None:
        """Return what is there to be handed out now, or None."""
        session = self._session
        error = session.failure()
        if error is not None:
            raise error
        if session.stdin_safe > self._stdin_told:
            self._stdin_told = session.stdin_safe
            return StdinSafe(self._stdin_told)
        for name in self._turn:
            item = self._take(name)
            if item is not None:
                self._turn.remove(name)
                self._turn.append(name)
                return item
        return session.ending()

    def _take(self, name: str) -> Chunk | Gap | None:
        spool = self._session.output(name).spool
        start = self.offsets[name]
        if start >= spool.total:
            return None
        kept = spool.kept_from(start)
        if kept > start:
            self.offsets[name] = kept
            return Gap(name, start, kept)
        data = spool.read(start, CHUNK_BYTES_MAX)
        self.offsets[name] = start + len(data)
        return Chunk(name, start, data)

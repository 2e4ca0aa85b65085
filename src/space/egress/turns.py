"""Whose turn it is: one busy sandbox does not keep the others from their share of this one process, and of the host.

A step is what a sandbox has done at once: one request begun, one chunk passed on. In each round a sandbox has a few;
whoever wants more waits for the next. A sandbox alone has round after round. While others are there, too, rounds take a
millisecond, in which whoever wants little is served at once: that leaves a gigabyte a second to a download, and bounds
how much of the processors a flood of small requests takes from everybody.
"""

from __future__ import annotations

import asyncio
from collections import deque

STEPS = 2
PACE_S = 0.001
RECENT_S = 0.1
"""For how long a sandbox that had a step counts as being there."""


class Turns:
    """Hands out steps."""

    def __init__(self) -> None:
        self._had: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._round: asyncio.Handle | None = None
        self._seen: dict[str, float] = {}
        self._looked_at = 0.0
        self._shared = False

    async def take(self, sandbox: str) -> None:
        """Wait for the sandbox's turn."""
        loop = asyncio.get_running_loop()
        self._seen[sandbox] = loop.time()
        if self._round is None:
            self._round = loop.call_soon(self._next_round)
        had = self._had.get(sandbox, 0)
        if had < STEPS and sandbox not in self._waiting:
            self._had[sandbox] = had + 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(sandbox, deque()).append(turn)
        await turn

    def _next_round(self) -> None:
        self._had.clear()
        for sandbox, queue in list(self._waiting.items()):
            given = 0
            while queue and given < STEPS:
                turn = queue.popleft()
                if not turn.done():  # who was cancelled meanwhile has no turn
                    turn.set_result(None)
                    given += 1
            self._had[sandbox] = given
            if not queue:
                del self._waiting[sandbox]
        loop = asyncio.get_running_loop()
        if not self._had:
            self._round = None
        elif self._is_shared(loop.time()):
            self._round = loop.call_later(PACE_S, self._next_round)
        else:
            self._round = loop.call_soon(self._next_round)

    def _is_shared(self, now: float) -> bool:
        """Whether more than one sandbox was there lately."""
        if now - self._looked_at > RECENT_S / 2:
            self._looked_at = now
            self._seen = {sandbox: at for sandbox, at in self._seen.items() if now - at < RECENT_S}
            self._shared = len(self._seen) > 1
        return self._shared

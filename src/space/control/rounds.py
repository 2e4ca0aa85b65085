"""Work that many requests may need at once, done in rounds: one round serves all who came before it began."""

import asyncio
import time
from collections.abc import Awaitable, Callable


class Rounds:
    """Begins at most one round in ``every_s``, whoever asks and how often."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._began = float("-inf")
        self._lock = asyncio.Lock()

    async def join(self, work: Callable[[], Awaitable[None]]) -> None:
        """Return when a round that began after this call is over; ``work`` is done if nobody else's was."""
        came = time.monotonic()
        async with self._lock:
            if self._began > came:
                return
            await asyncio.sleep(max(0.0, self._began + self._every_s - time.monotonic()))
            self._began = time.monotonic()
            await work()

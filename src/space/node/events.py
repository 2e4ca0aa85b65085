"""What happens to machines, told to whoever listens. A listener that does not keep up is dropped, and comes again."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

WAITING_MAX = 1000


class Events:
    """A broadcast. Listeners get what is published while they listen, in order."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[dict[str, Any] | None]] = set()

    def publish(self, event: dict[str, Any]) -> bool:
        """Tell everybody who listens; False when nobody does."""
        for queue in list(self._listeners):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._listeners.discard(queue)
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
        return bool(self._listeners)

    async def listen(self) -> AsyncIterator[dict[str, Any]]:
        """Yield events until the listener is dropped for being too slow."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(WAITING_MAX)
        self._listeners.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.discard(queue)

"""Who is telling the gateway of what, so that no older word comes after a newer one."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator


class Telling:
    """Who is telling the gateway: of one machine one at a time, and of all of them nobody else meanwhile."""

    def __init__(self) -> None:
        self._gate = asyncio.Lock()
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        self._none = asyncio.Event()
        self._none.set()
        self.again = asyncio.Event()
        """Set when something could not be told, so that everything has to be."""
        self.seen = False
        """Whether there has been a gateway."""

    @contextlib.asynccontextmanager
    async def one(self, machine: str) -> AsyncGenerator[None]:
        async with self._gate:
            lock, users = self._locks.get(machine, (asyncio.Lock(), 0))
            self._locks[machine] = (lock, users + 1)
            self._none.clear()
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[machine]
            if users > 1:
                self._locks[machine] = (lock, users - 1)
            else:
                del self._locks[machine]
                if not self._locks:
                    self._none.set()

    @contextlib.asynccontextmanager
    async def everything(self) -> AsyncGenerator[None]:
        async with self._gate:
            await self._none.wait()
            yield

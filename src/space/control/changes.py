"""Who waits for what inside this process: a change in the store wakes the requests that wait for it.

It only saves time. Whoever waits asks the store again, and does so now and then even when nobody woke it, so that a
change made by another process is seen too.
"""

import asyncio
import contextlib
import time
from collections.abc import Generator
from typing import Any

POLL_S = 1.0
EVERYTHING = "*"
"""A topic that every other one's news are told to."""
WEBHOOKS = "webhooks"
"""Told when there may be something to deliver to a webhook that there was nothing for before."""

BUILDS = "builds"
"""Told when there is a build to be followed."""


class Changes:
    """Wake-ups by topic; a topic is the id of an operation or a project."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[Watch]] = {}

    def notify(self, topic: str, news: Any = None) -> None:
        """Wake who watches a topic. ``news`` is what has become of it, and spares them a look at the store."""
        for watch in (*self._waiting.get(topic, ()), *self._waiting.get(EVERYTHING, ())):
            watch.tell(news)

    @contextlib.contextmanager
    def watch(self, topic: str) -> Generator["Watch"]:
        """Watch a topic. Begin before the first look at the store: what changes in between is not missed then."""
        watch = Watch()
        self._waiting.setdefault(topic, set()).add(watch)
        try:
            yield watch
        finally:
            self._waiting[topic].discard(watch)
            if not self._waiting[topic]:
                del self._waiting[topic]


class Watch:
    """One waiter's view of a topic."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self.news: Any = None
        """What was last told."""

    def tell(self, news: Any) -> None:
        self.news = news
        self._woken.set()

    async def wait(self, timeout_s: float, poll_s: float = POLL_S) -> float:
        """Return at the next change, or after ``timeout_s`` or ``poll_s``; the result is the seconds it took."""
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, poll_s)):
                await self._woken.wait()
        self._woken.clear()
        return time.monotonic() - began

    async def wait_long(self) -> None:
        """Return at the next change that is made in this process, however long that takes."""
        await self._woken.wait()
        self._woken.clear()

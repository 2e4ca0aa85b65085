"""Ownership of background work: every task belongs to one owner, which ends them all when it closes."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

import structlog

from space.errors import SpaceError

log = structlog.get_logger(__name__)


class Tasks:
    """A set of tasks that live no longer than their owner. A failure is logged and ends only the task itself."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any] | None:
        """Run ``work`` in the background; once closed, nothing is started any more and None is returned."""
        if self._closed:
            work.close()
            return None
        # A context of its own: what goes on behind the request that began it is not that request's any more.
        task = asyncio.get_running_loop().create_task(work, name=name, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel what still runs and wait until all of it has ended."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, SpaceError):
            log.info("task-failed", task=task.get_name(), code=error.code)
        else:
            log.error("task-broke", task=task.get_name(), exc_info=error)

"""Watchers whose events a client fetches when it likes: each follows a directory and keeps what happened until then.

They live in this process: a client whose watcher is unknown makes a new one.
"""

import asyncio
import secrets
import time
from collections import deque
from typing import Any

import structlog

from space.control.control import Control
from space.e2b import watching
from space.e2b.watching import Watched
from space.errors import LimitExceeded, NotFound, OutcomeUnknown, SpaceError

log = structlog.get_logger(__name__)

SANDBOX_MAX = 64
TOTAL_MAX = 1000
EVENTS_MAX = 10_000
"""Kept of one watcher; when there are more it ends, and the answer after the last of them says so."""
OPEN_S = 30.0
MARK_S = 10.0
UNUSED_S = 3600.0
SWEEP_S = 30.0


class Watcher:
    """One watcher: what it watches, and what has happened since it was last asked."""

    def __init__(self, watched: Watched) -> None:
        self.id = f"w{secrets.token_hex(8)}"
        self.watched = watched
        self.used_at = time.monotonic()
        self.events: deque[dict[str, Any]] = deque()
        self.error: SpaceError | None = None
        self.task: asyncio.Task[None] | None = None
        self._watching = asyncio.Event()
        self._marks: dict[str, asyncio.Event] = {}

    async def run(self, control: Control) -> None:
        """Follow until what is watched is gone; why it could not be followed any more is in ``error``."""
        try:
            async for told in watching.follow(control, self.watched, marks=True):
                self._take(told)
        except SpaceError as error:
            self.error = watching.lost(error)
        finally:
            self._watching.set()
            for reached in self._marks.values():
                reached.set()

    async def wait_watching(self) -> None:
        async with asyncio.timeout(OPEN_S):
            await self._watching.wait()
        if self.error is not None:
            raise self.error

    async def catch_up(self, control: Control) -> None:
        """Return when all that has happened in the sandbox by now is in ``events``."""
        if self.task is None or self.task.done():
            return
        mark, reached = secrets.token_hex(8), asyncio.Event()
        self._marks[mark] = reached
        try:
            path = f"/v1/sandboxes/{self.watched.sandbox_id}/files/watch/mark"
            await control.node.call("POST", path, MARK_S, {"mark": mark})
            async with asyncio.timeout(MARK_S):
                await reached.wait()
        except TimeoutError as error:
            raise OutcomeUnknown("The sandbox did not tell in time what happened.") from error
        finally:
            del self._marks[mark]

    def _take(self, told: dict[str, Any]) -> None:
        if told["event"] == "watching":
            self._watching.set()
        elif told["event"] == "mark":
            if (reached := self._marks.get(str(told.get("path")))) is not None:
                reached.set()
        elif (event := watching.event_of(told)) is not None:
            if len(self.events) >= EVENTS_MAX:
                raise LimitExceeded("Events were not fetched for too long, and some are lost.")
            self.events.append(event)


class Watchers:
    """All watchers of this process."""

    def __init__(self, control: Control, group: asyncio.TaskGroup) -> None:
        self._control = control
        self._group = group
        self._known: dict[str, Watcher] = {}

    async def create(self, watched: Watched) -> Watcher:
        """Begin to watch; returns when nothing is missed any more. Raises what the sandbox refused it with."""
        mine = sum(one.watched.sandbox_id == watched.sandbox_id for one in self._known.values())
        if mine >= SANDBOX_MAX or len(self._known) >= TOTAL_MAX:
            raise LimitExceeded(
                f"A sandbox may have {SANDBOX_MAX} watchers. Remove one first.", code="too-many-watchers"
            )
        watcher = Watcher(watched)
        self._known[watcher.id] = watcher
        watcher.task = self._group.create_task(watcher.run(self._control))
        try:
            await watcher.wait_watching()
        except (SpaceError, TimeoutError):
            self._drop(watcher)
            raise
        return watcher

    def get(self, sandbox_id: str, watcher_id: str) -> Watcher:
        """Return a watcher of the sandbox, or raise ``NotFound``."""
        found = self._known.get(watcher_id)
        if found is None or found.watched.sandbox_id != sandbox_id:
            raise NotFound(f"watcher with id {watcher_id[:64]} not found")
        found.used_at = time.monotonic()
        return found

    def remove(self, sandbox_id: str, watcher_id: str) -> None:
        self._drop(self.get(sandbox_id, watcher_id))

    async def sweep(self) -> None:
        """Drop, for ever, watchers that nobody asks any more."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for watcher in list(self._known.values()):
                ended = watcher.task is not None and watcher.task.done()
                if time.monotonic() - watcher.used_at > (SWEEP_S if ended else UNUSED_S):
                    self._drop(watcher)

    def _drop(self, watcher: Watcher) -> None:
        self._known.pop(watcher.id, None)
        if watcher.task is not None:
            watcher.task.cancel()

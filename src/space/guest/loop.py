"""The agent's one loop: readiness of descriptors, timers, and work that other threads hand over.

asyncio would do, but importing it takes longer than everything else the agent does until it answers.
"""

from __future__ import annotations

import heapq
import os
import select
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Ready = Callable[[int], None]

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
_TIMERS_MIN = 64


class Timer:
    """Something to be done at ``due`` (``time.monotonic``), unless cancelled before."""

    __slots__ = ("_paused", "action", "due")

    def __init__(self, due: float, action: Callable[[], None]) -> None:
        self.due = due
        self.action: Callable[[], None] | None = action
        self._paused: Callable[[], None] | None = None

    def __lt__(self, other: Timer) -> bool:
        return self.due < other.due

    def cancel(self) -> None:
        self.action = self._paused = None

    def pause(self) -> None:
        """Keep it from being due; ``take_action`` gives what it would have done to another timer."""
        self._paused, self.action = self.action or self._paused, None

    def take_action(self) -> Callable[[], None] | None:
        """Return the action of a paused timer, which is over with that."""
        action, self._paused = self._paused, None
        return action


class Loop:
    """Runs callbacks, one at a time. An exception in one is given to ``on_error`` and the loop goes on."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._poll = select.epoll()
        self._watched: dict[int, tuple[int, Ready]] = {}
        self._timers: list[Timer] = []
        self._timers_max = _TIMERS_MIN
        self._inbox: deque[Callable[[], None]] = deque()
        self._soon: deque[Callable[[], None]] = deque()
        self._wake_fd, self.wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """Writing a byte to ``wake_fd`` wakes the loop: for signals and other threads."""
        self._woken = False
        self.on_wake: Callable[[], None] | None = None
        """Called when the loop was woken, e.g. by a signal."""
        self.before_wait: Callable[[], None] | None = None
        """Called each time before the loop waits."""
        self.running = True
        self.watch(self._wake_fd, READ, self._drain_wake)

    def watch(self, fd: int, interest: int, ready: Ready) -> None:
        """Call ``ready(events)`` while ``fd`` is ready for ``interest``; 0 keeps the place but waits for nothing."""
        known = self._watched.get(fd)
        self._watched[fd] = (interest, ready)
        if known is None:
            if interest:
                self._poll.register(fd, interest)
        elif known[0] != interest:
            if known[0] and interest:
                self._poll.modify(fd, interest)
            elif interest:
                self._poll.register(fd, interest)
            else:
                # Out of the set, or a hung-up descriptor would be reported over and over.
                self._poll.unregister(fd)

    def forget(self, fd: int) -> None:
        """Stop watching, before the descriptor is closed."""
        known = self._watched.pop(fd, None)
        if known is not None and known[0]:
            self._poll.unregister(fd)

    def call_at(self, due: float, action: Callable[[], None]) -> Timer:
        """Call ``action`` at the monotonic time ``due``."""
        if len(self._timers) >= self._timers_max:
            # Cancelled ones would otherwise stay until they are due, which may be never.
            self._timers = [timer for timer in self._timers if timer.action is not None]
            heapq.heapify(self._timers)
            self._timers_max = max(_TIMERS_MIN, 2 * len(self._timers))
        timer = Timer(due, action)
        heapq.heappush(self._timers, timer)
        return timer

    def call_soon(self, action: Callable[[], None]) -> None:
        """Call ``action`` in the next round; for this thread only."""
        self._soon.append(action)

    def hand_over(self, action: Callable[[], None]) -> None:
        """Have ``action`` called by the loop; from any thread, in order for each thread."""
        self._inbox.append(action)
        if not self._woken:
            self._woken = True
            try:
                os.write(self.wake_fd, b"\0")
            except BlockingIOError:
                pass  # The pipe is full of wake-ups already.

    def run(self) -> None:
        """Run until ``running`` is made false."""
        while self.running:
            if self.before_wait is not None:
                self._guard(self.before_wait)
            for fd, events in self._wait():
                entry = self._watched.get(fd)
                if entry is not None and entry[0]:
                    try:
                        entry[1](events)
                    except Exception as error:  # noqa: BLE001  the agent outlives every mistake
                        self._on_error(error)
            self._run_timers()
            for queue in (self._inbox, self._soon):
                for _ in range(len(queue)):
                    self._guard(queue.popleft())

    def _wait(self) -> list[tuple[int, int]]:
        timeout = -1.0
        while self._timers and self._timers[0].action is None:
            heapq.heappop(self._timers)
        if self._soon or self._inbox:
            timeout = 0.0
        elif self._timers:
            timeout = max(0.0, self._timers[0].due - time.monotonic())
        return self._poll.poll(timeout, 64)

    def _run_timers(self) -> None:
        now = time.monotonic() if self._timers else 0.0
        while self._timers and self._timers[0].due <= now:
            timer = heapq.heappop(self._timers)
            if timer.action is not None:
                self._guard(timer.action)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  as above
            self._on_error(error)

    def _drain_wake(self, _events: int) -> None:
        try:
            while len(os.read(self._wake_fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass
        # Only now: what is handed over before this is found in this very round, later ones write again.
        self._woken = False
        if self.on_wake is not None:
            self.on_wake()

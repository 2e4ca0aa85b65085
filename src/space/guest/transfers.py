"""Work that may block, in threads of its own, and the streams such work reads and writes at the pace of the host."""

from __future__ import annotations

import threading
from collections import deque

from space.guest.system import ActingAs, Identity, Refused, refused
from space.protocol.streams import WINDOW_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from space.guest.loop import Loop
    from space.guest.watches import Watch
    from space.protocol.guest import GuestChannel

    Operation = Callable[["Task"], dict[str, Any] | None]

THREADS_MAX = 64
_IDLE_MAX = 2
_STACK_BYTES = 512 * 1024


class Cancelled(Exception):
    """The stream was reset by the host: nobody waits for the result."""


class Task:
    """One operation for the host, while a thread works on it with its user's rights.

    ``owner`` is whose files it makes, if not that user's. ``outlet`` or ``inlet`` is its stream, where it has one.
    What it returns is the reply, unless it replied itself.
    """

    def __init__(
        self, number: int, fields: dict[str, Any], identity: Identity, base: str, owner: Identity | None = None
    ) -> None:
        self.number = number
        self.owner = owner
        self.fields = fields
        self.identity = identity
        self.base = base
        self.outlet: Outlet | None = None
        self.inlet: Inlet | None = None
        self.replied = False
        self.watch: Watch | None = None
        self.reply: Callable[[dict[str, Any]], None] = lambda _ok: None
        self.finished: Callable[[], None] = lambda: None

    def answer(self, ok: dict[str, Any]) -> None:
        """Reply now; what follows goes over the stream."""
        self.replied = True
        self.reply(ok)


class _Half:
    """What both directions share: a lock, and being cancelled by the loop while a thread waits."""

    def __init__(self, number: int, channel: GuestChannel, loop: Loop) -> None:
        self.number = number
        self._channel = channel
        self._loop = loop
        self._changed = threading.Condition()
        self._cancelled = False

    def cancel(self) -> None:
        """Loop: the stream is over; the thread finds out at its next step."""
        with self._changed:
            self._cancelled = True
            self._changed.notify()


class Outlet(_Half):
    """A stream to the host, written by a thread. It waits while the window is full, so it is never ahead by more."""

    def __init__(self, number: int, channel: GuestChannel, loop: Loop) -> None:
        super().__init__(number, channel, loop)
        self._produced = 0
        self._limit = WINDOW_BYTES
        channel.open_send(number)

    def on_writable(self, acked: int) -> None:
        """Loop: the host has bytes up to ``acked``."""
        with self._changed:
            self._limit = acked + WINDOW_BYTES
            self._changed.notify()

    def wait_room(self) -> int:
        """Wait until something may be written and return how much; raises ``Cancelled``."""
        with self._changed:
            while self._produced >= self._limit and not self._cancelled:
                self._changed.wait()
            if self._cancelled:
                raise Cancelled
            return self._limit - self._produced

    def write(self, data: bytes) -> int:
        """Send all of ``data``, waiting as needed."""
        view = memoryview(data)
        while view:
            count = min(self.wait_room(), len(view))
            piece = data if count == len(data) else bytes(view[:count])
            view = view[count:]
            self._produced += count
            self._loop.hand_over(lambda piece=piece: self._channel.send(self.number, piece))
        return len(data)

    def end(self) -> None:
        """The stream is complete."""
        self._loop.hand_over(lambda: self._channel.end(self.number))

    def fail(self, code: str, message: str) -> None:
        """The stream ends unfinished."""
        self._loop.hand_over(lambda: self._channel.reset(self.number, code, message))


class Inlet(_Half):
    """A stream from the host, read by a thread; what waits to be read is bounded by the window."""

    def __init__(self, number: int, channel: GuestChannel, loop: Loop) -> None:
        super().__init__(number, channel, loop)
        self._waiting: deque[bytes] = deque()
        self._ended = False
        self._consumed = 0
        channel.open_receive(number)

    def on_received(self, data: bytes) -> None:
        """Loop: bytes arrived."""
        with self._changed:
            self._waiting.append(data)
            self._changed.notify()

    def on_ended(self) -> None:
        """Loop: there are no more."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def next_chunk(self) -> bytes:
        """Wait for the next bytes; empty at the end. Call ``done`` when they are dealt with. Raises ``Cancelled``."""
        with self._changed:
            while not self._waiting and not self._ended and not self._cancelled:
                self._changed.wait()
            if self._cancelled:
                raise Cancelled
            return self._waiting.popleft() if self._waiting else b""

    def done(self, count: int) -> None:
        """``count`` more bytes are dealt with: the host may send as many more."""
        self._consumed += count
        offset = self._consumed
        self._loop.hand_over(lambda: self._channel.ack(self.number, offset))


class Workers:
    """Threads for tasks: as many as there are tasks, up to ``THREADS_MAX``; a few stay for the next ones."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._queue: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0
        threading.stack_size(_STACK_BYTES)

    def run(self, task: Task, operation: Operation, refuse: Callable[[Refused], None]) -> None:
        """Carry out an operation in a thread with the rights of the task's user, then reply or call ``refuse``."""
        with self._changed:
            if self._threads >= THREADS_MAX and not self._idle:
                raise Refused("busy", f"{THREADS_MAX} operations on files are under way")
            self._queue.append(lambda: self._carry_out(task, operation, refuse))
            if self._idle:
                self._idle -= 1
                self._changed.notify()
                return
            self._threads += 1
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    if self._idle >= _IDLE_MAX:
                        self._threads -= 1
                        return
                    self._idle += 1
                    while not self._queue:
                        self._changed.wait()
                action = self._queue.popleft()
            action()

    def _carry_out(self, task: Task, operation: Operation, refuse: Callable[[Refused], None]) -> None:
        problem: Refused | None = None
        try:
            with ActingAs(task.identity):
                ok = operation(task)
            if not task.replied:
                task.answer(ok or {})
        except Cancelled:
            problem = Refused("cancelled", "The stream was reset")
        except Refused as error:
            problem = error
        except OSError as error:
            problem = refused(error, str(task.fields.get("path", "")))
        except Exception as error:  # noqa: BLE001  a mistake here must not cost the thread
            problem = Refused("internal", f"{type(error).__name__}: {error}")
        if problem is not None:
            failed = problem
            if task.replied and task.outlet is not None:
                task.outlet.fail(failed.failure["code"], failed.failure["message"])
            else:
                self._loop.hand_over(lambda: refuse(failed))
        task.finished()

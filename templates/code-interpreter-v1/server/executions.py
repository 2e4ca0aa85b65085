"""One cell that is run: what comes of it for its client, and how far the kernel is with it."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import outputs

if TYPE_CHECKING:
    from kernels import Kernel, Said
    from languages import Values

KEEPALIVE_S = 5.0
LOOK_S = 0.25
INTERRUPT_EVERY_S = 2.0
HEED_S = 10.0
"""How long a cell whose time is over may go on before that is told instead of its end."""


class Execution:
    """One cell that is run, or will be; `told` is what comes of it."""

    def __init__(self, code: str, env: Values, timeout_s: float | None) -> None:
        self.code = code
        self.env = env
        self.timeout_s = timeout_s
        self.given_up = False
        self.void = False
        """Whether its context was restarted or ended since it was asked for."""
        self.wake: asyncio.Event = asyncio.Event()
        """Set when who runs it has to look at it again."""
        self.bytes_ahead = 0
        self._told: collections.deque[tuple[bytes, bool]] = collections.deque()
        self._more = asyncio.Event()

    def tell(self, event: outputs.Event) -> None:
        if self.given_up:
            return
        line = outputs.line(event)
        self._told.append((line, event is outputs.END))
        self.bytes_ahead += len(line)
        self._more.set()

    def give_up(self) -> None:
        """Nobody waits for it any more: it is not begun, or is interrupted."""
        self.given_up = True
        self._told.clear()
        self.bytes_ahead = 0
        self.wake.set()

    def part(self, event: outputs.Event) -> None:
        """Tell this and the end, and nothing of what it may do from now on."""
        self.tell(event)
        self.tell(outputs.END)
        self.given_up = True

    async def told(self) -> AsyncIterator[bytes]:
        """Yield lines until the last one, with a sign of life where there is nothing else to say."""
        while True:
            try:
                async with asyncio.timeout(KEEPALIVE_S):
                    await self._more.wait()
            except TimeoutError:
                yield outputs.line(outputs.KEEPALIVE)
            self._more.clear()
            while self._told:
                line, last = self._told.popleft()
                self.bytes_ahead -= len(line)
                yield line
                if last:
                    return
            self.wake.set()


class Time:
    """Whether a cell has gone on for too long, and what is done about it."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        now = self._now()
        self._ends = None if execution.timeout_s is None else now + execution.timeout_s
        self._interrupted_at = now - INTERRUPT_EVERY_S

    async def see_to(self, kernel: Kernel) -> None:
        """Interrupt the cell while nobody wants more of it; when it does not heed that, say so and let its client go."""
        now = self._now()
        late = self._ends is not None and now >= self._ends
        if (self._execution.given_up or late) and now - self._interrupted_at >= INTERRUPT_EVERY_S:
            self._interrupted_at = now
            await kernel.interrupt()
        if late and not self._execution.given_up and now >= (self._ends or now) + HEED_S:
            what = "The cell's time is over, but it does not heed interrupts and still runs: restart the context."
            self._execution.part(outputs.error("StillRunning", what))

    def wait_s(self) -> float:
        """Return how long to wait for a message before looking whether the kernel still lives, or is late."""
        return LOOK_S if self._ends is None else min(LOOK_S, max(0.05, self._ends - self._now()))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class Progress:
    """How far the kernel is with one request: done when it has answered, and has said that it is idle again."""

    def __init__(self, request: str, silence_s: float) -> None:
        self._request = request
        self._silence_s = silence_s
        self._silent_since: float | None = None
        self._idle = False
        self._reply: Mapping[str, Any] | None = None

    @property
    def replied(self) -> bool:
        return self._reply is not None

    @property
    def done(self) -> bool:
        return self._idle and self.replied

    def take(self, said: Said) -> bool:
        """Take note of a message; whether it belongs to the request."""
        self._silent_since = None
        if said.request != self._request:
            return False
        if said.kind == "execute_reply":
            self._reply = said.content
        elif said.kind == "status":
            self._idle = said.content.get("execution_state") == "idle"
        return True

    def silence(self) -> None:
        """Nothing has come just now: after the answer, that is for some time as good as being idle."""
        now = asyncio.get_running_loop().time()
        self._silent_since = self._silent_since or now
        self._idle = self._idle or (self.replied and now - self._silent_since >= self._silence_s)

    def problem(self) -> outputs.Event | None:
        """Return what went wrong where only the answer says so."""
        reply = self._reply or {}
        status = str(reply.get("status") or "ok")
        if status == "ok":
            return None
        if status.startswith("abort") and not reply.get("ename"):
            return outputs.error("KeyboardInterrupt", reply.get("evalue") or "", reply.get("traceback"))
        return outputs.error_of(reply)

"""Requests that wait for a sandbox to wake. Whether it does is the api's to decide: it is told, and answers."""

from __future__ import annotations

import asyncio
import time

from space.errors import Conflict, HostError, NotFound, SpaceError, Unavailable
from space.node.events import Events
from space.node.guests import Guest
from space.node.machines import Machines

HOLD_S = 90.0
"""How long a request waits. The api gives a waking up before that."""
ASK_AGAIN_S = 5.0
WAITING_MAX = 1024
"""Requests that wait for one sandbox."""


class Wakings:
    """Returns guests that can be spoken with, and has those woken that cannot."""

    def __init__(self, machines: Machines, events: Events) -> None:
        self._machines = machines
        self._events = events
        self._waiting: dict[str, _Waiting] = {}

    async def guest(self, sandbox: str) -> Guest:
        """Return the guest of a sandbox once that runs.

        Raises ``NotFound``, ``Conflict`` with its state when it does not wake on request, or ``Unavailable``
        (``waking-failed``) when it was to wake and did not.
        """
        try:
            return self._machines.guest(sandbox)
        except Conflict as error:
            if error.code != "wrong-state":
                raise
        await self._woken(sandbox)
        return self._machines.guest(sandbox)

    def answer(self, sandbox: str, error: SpaceError | None) -> None:
        """Tell those who wait that the sandbox runs, or why it does not."""
        waiting = self._waiting.pop(sandbox, None)
        if waiting is not None and not waiting.woken.done():
            waiting.woken.set_result(error)

    async def _woken(self, sandbox: str) -> None:
        waiting = self._waiting.setdefault(sandbox, _Waiting())
        if waiting.count >= WAITING_MAX:
            raise Unavailable("Too many requests wait for this sandbox to wake.", code="waking-failed")
        waiting.count += 1
        ends = time.monotonic() + HOLD_S
        try:
            while not waiting.woken.done() and (left := ends - time.monotonic()) > 0:
                self._ask(sandbox, waiting)
                await asyncio.wait((waiting.woken,), timeout=min(left, ASK_AGAIN_S))
            if not waiting.woken.done():
                raise Unavailable(f"The sandbox did not wake within {HOLD_S:g} s.", code="waking-failed")
        finally:
            waiting.count -= 1
            if not waiting.count and self._waiting.get(sandbox) is waiting:
                del self._waiting[sandbox]
        if (error := waiting.woken.result()) is not None:
            raise _as_told(error)

    def _ask(self, sandbox: str, waiting: _Waiting) -> None:
        """Tell the api once for all who wait, and again now and then: it may have been restarted."""
        now = time.monotonic()
        if now - waiting.asked_at < ASK_AGAIN_S:
            return
        if not self._events.publish({"machine": sandbox, "event": "wanted"}):
            raise Unavailable("The api, which would wake the sandbox, is not there now.", code="waking-failed")
        waiting.asked_at = now


class _Waiting:
    """Those who wait for one sandbox."""

    def __init__(self) -> None:
        self.woken: asyncio.Future[SpaceError | None] = asyncio.get_running_loop().create_future()
        self.count = 0
        self.asked_at = -ASK_AGAIN_S


def _as_told(error: SpaceError) -> SpaceError:
    """Return why a sandbox does not wake: each who waits raises an error of its own."""
    if isinstance(error, Conflict | NotFound | HostError):
        return type(error)(error.message, code=str(error.code), **error.details)
    return Unavailable(
        f"The sandbox was to wake and did not: {error.message}", code="waking-failed", cause=str(error.code)
    )

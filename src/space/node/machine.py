"""One machine as the node knows it, and how long the phases of a call took."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from space.errors import MachineLost, SpaceError
from space.model.ids import is_id
from space.node.guests import Guest


class Machine:
    """One machine as the node knows it. ``state`` is the broker's word for it, or a verb in passing."""

    def __init__(self, machine_id: str, active_at: float | None = None) -> None:
        self.id = machine_id
        self.body = machine_id
        """What its channel is called: the machine's own id, or that of the spare it once was."""
        self.driver: str | None = None
        """What it was booted with, as far as this process knows."""
        self.state = "absent"
        self.found = "absent"
        """What it was when its present turn began."""
        self.cause: str | None = None
        self.ready = False
        self.guest: Guest | None = None
        self.turn = asyncio.Lock()
        self.entering = asyncio.Lock()
        """While what its template starts is started again."""
        self.active_at = time.time() if active_at is None else active_at
        self.clients = 0
        """Requests and attached clients that are being served now."""

    @property
    def spoken_with(self) -> bool:
        """Whether the guest is ready and its channel open."""
        return self.ready and self.guest is not None and self.guest.connected

    def present_guest(self) -> Guest:
        """Return the guest, or raise ``MachineLost`` when it went meanwhile."""
        if self.guest is None:
            raise MachineLost
        return self.guest

    def part(self, error: SpaceError) -> None:
        """Let go of the guest for good: all who use its channel get ``error``."""
        guest, self.guest = self.guest, None
        self.ready = False
        if guest is not None:
            guest.close(error)

    def inhabit(self, answer: Any) -> None:
        """Take from a broker's answer which body the machine has."""
        body = answer.get("body") if isinstance(answer, dict) else None
        if isinstance(body, str) and is_id("sbx", body):
            self.body = body


class Phases:
    """Seconds that each phase of a call took, and what was told of the sandbox's hooks meanwhile."""

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self.hooks: list[dict[str, Any]] = []
        self._last = time.monotonic()

    def mark(self, phase: str) -> None:
        now = time.monotonic()
        self.timings[phase] = round(now - self._last, 6)
        self._last = now

    def add(self, answer: Any) -> None:
        """Add the broker's own timings, each under ``broker-…``."""
        timings = answer.get("timings") if isinstance(answer, dict) else None
        for phase, seconds in (timings or {}).items():
            self.timings[f"broker-{phase}"] = seconds

    def heed(self, answer: dict[str, Any]) -> None:
        """Take from a guest's answer which hooks ran, and how that went."""
        self.hooks += answer["hooks"]

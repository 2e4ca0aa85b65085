"""One machine as the node knows it, what its guest is to be told, and how long the phases of a call took."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from space.errors import MachineLost
from space.node.guests import Guest


class Machine:
    """One machine as the node knows it. ``state`` is the broker's word for it, or a verb in passing."""

    def __init__(self, machine_id: str) -> None:
        self.id = machine_id
        self.state = "absent"
        self.cause: str | None = None
        self.ready = False
        self.guest: Guest | None = None
        self.turn = asyncio.Lock()
        self.active_at = time.time()
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


class Phases:
    """Seconds that each phase of a call took."""

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
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

"""Sandboxes that were seen running a moment ago, so that a request to one need not ask the store.

An entry holds until this process writes anything, and for a second at most. Being late is harmless: whose a sandbox is
never changes, and the node itself refuses what its machine cannot do.
"""

import time

from space.model.sandbox import Sandbox

REMEMBER_S = 1.0
REMEMBERED_MAX = 10_000


class Recent:
    """Sandboxes by id, as they were under one generation of the store."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Sandbox, int, float]] = {}

    def get(self, sandbox_id: str, generation: int) -> Sandbox | None:
        """Return a sandbox that was running when the store was at ``generation``."""
        known = self._known.get(sandbox_id)
        if known is None or known[1] != generation or known[2] < time.monotonic():
            return None
        return known[0]

    def remember(self, sandbox: Sandbox, generation: int) -> None:
        """Keep a sandbox read under ``generation``, the number from before the reading began."""
        if len(self._known) >= REMEMBERED_MAX:
            self._known.clear()
        self._known[sandbox.id] = (sandbox, generation, time.monotonic() + REMEMBER_S)

"""The host's own clock on a program that a guest runs for so long and no longer.

The guest ends the program when its time is over, and says so. A guest that has been made to stand still, or lies, does
neither, and whoever waits for the program must not wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator

LATE_S = 30.0
"""How much longer than the program's time its guest's word is awaited: it may be slow, and has to kill and to sync."""
LOOK_S_MAX = 5.0


@contextlib.contextmanager
def overdue(
    timeout_s: float | None, due: Callable[[], bool], give_up: Callable[[], object], *, late_s: float = LATE_S
) -> Generator[None]:
    """Call ``give_up`` once the block has lasted ``timeout_s`` and ``late_s``, counting only while ``due()`` is true.

    ``due`` says whether it is the guest that is awaited: its machine runs, and nobody else is slow.
    """
    if timeout_s is None:
        yield
        return
    clock = _Clock(timeout_s + late_s, due, give_up)
    try:
        yield
    finally:
        clock.stop()


class _Clock:
    def __init__(self, left_s: float, due: Callable[[], bool], give_up: Callable[[], object]) -> None:
        self._left_s = left_s
        self._due = due
        self._give_up = give_up
        self._set()

    def stop(self) -> None:
        self._timer.cancel()

    def _set(self) -> None:
        self._step_s = min(self._left_s, LOOK_S_MAX)
        self._timer = asyncio.get_running_loop().call_later(self._step_s, self._look)

    def _look(self) -> None:
        if self._due():
            self._left_s -= self._step_s
        if self._left_s > 0:
            self._set()
        else:
            self._give_up()

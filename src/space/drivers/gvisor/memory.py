"""Who goes first when a machine's memory runs out: the guest's process that needs it, not the whole machine.

A stub maps what its guest process uses, the sentry some of everything, so the kernel finds either about as guilty.
With the scales tipped, guests' processes end first, and the machine only when no more of them are left to end.
"""

from contextlib import suppress

from space.drivers.gvisor.seating import PROC, descendants

STUB_SCORE = 500
"""Adds half of all memory to what a stub is taken to use; see oom_score_adj in proc(5)."""


def offer_stubs(sentry: int) -> None:
    """Make the kernel prefer the sentry's stubs; later ones are children of those of the start and inherit it."""
    for pid in descendants(sentry)[1:]:
        with suppress(OSError):
            # SAFETY: only processes of the tree that the driver itself has just started, by number.
            (PROC / str(pid) / "oom_score_adj").write_text(str(STUB_SCORE))

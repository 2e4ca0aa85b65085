"""How much of the host's memory a machine may use at most, and what is ended when it wants more.

The guest's own size is kept by the guard inside (`space.guest.memory`), which ends a command when it is used up. The
limit here is the backstop behind it: what the guest has, what gVisor needs for it, and room for what programs take
while the guard makes up its mind. At that limit the machine ends, at once and as a whole: see docs/decisions/0010.
"""

from contextlib import suppress

from space.drivers.gvisor.seating import PROC
from space.model.sandbox import Resources

OVERHEAD_MIB = 64
"""Sentry and gofer themselves; measured at 20 to 40 MiB idle, more under many open files."""
OVERHEAD_KIB_PER_TASK = 420
"""What a guest's process costs beside its memory: its stub's kernel structures and page tables, the sentry's state.
Threads cost a tenth of that."""
REACTION_MIB = 64
"""What is taken from when memory is low until everything stands still, and as much again on each processor."""
SENTRY_SCORE = 1000
"""The first to be killed; see oom_score_adj in proc(5)."""


def on_host_mib(resources: Resources) -> int:
    """Return the limit for all processes of a machine. Pure."""
    reaction = REACTION_MIB + REACTION_MIB * max(1.0, resources.cpus)
    return int(resources.memory_mib + OVERHEAD_MIB + reaction + resources.pids * OVERHEAD_KIB_PER_TASK / 1024)


def offer(sentry: int) -> None:
    """Make the kernel kill the sentry, and with it the machine, when there is no memory.

    Left to itself it kills stubs. But what they map is the sentry's to give back, so it goes on from one to the next;
    and the machine does not outlive the one that makes all others.
    """
    with suppress(OSError):
        # SAFETY: the process that the driver itself has just started, by number.
        (PROC / str(sentry) / "oom_score_adj").write_text(str(SENTRY_SCORE))

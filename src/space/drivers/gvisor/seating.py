"""Which CPUs a sentry and its stubs run on.

Systrap hands every guest system call from a stub process to the sentry. It is fast only while both spin on different
CPUs; on a host with few CPUs the scheduler keeps putting them in each other's way, the sentry gives up spinning, and a
system call costs ten times as much. Apart from each other they stay fast: see docs/decisions/0005.
"""

import os
import zlib
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
# With more CPUs than this the scheduler has room enough, and holding a busy sentry to one CPU would cost more.
CPUS_MAX = 4
TASKS_MAX = 4096


def seat(machine_id: str, sentry: int) -> None:
    """Give the sentry one CPU and its stubs the others, another choice for each machine; later threads inherit it.

    Best effort: a task that ends meanwhile is passed over, and nothing is done on hosts with one CPU or with many.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if not 1 < len(cpus) <= CPUS_MAX:
        return
    own = cpus[zlib.crc32(machine_id.encode()) % len(cpus)]
    others = set(cpus) - {own}
    for pid in descendants(sentry):
        for task in _tasks(pid):
            with suppress(OSError):
                # SAFETY: only tasks of the process tree that the driver itself has just started, by number.
                os.sched_setaffinity(task, {own} if pid == sentry else others)


def descendants(pid: int) -> list[int]:
    """Return the process and all below it, the process itself first."""
    found = [pid]
    for parent in found:  # grows while it is walked
        for task in _tasks(parent):
            with suppress(OSError, ValueError):
                found += map(int, (PROC / str(parent) / "task" / str(task) / "children").read_text().split())
        if len(found) > TASKS_MAX:
            break
    return found


def _tasks(pid: int) -> list[int]:
    try:
        return [int(path.name) for path in (PROC / str(pid) / "task").iterdir()]
    except OSError:
        return []

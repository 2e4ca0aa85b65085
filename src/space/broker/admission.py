"""Whether this host has room for one more machine: how many there may be, and how much memory is left."""

import re
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path

from space.broker.journal import Entry
from space.errors import HostFull, InvalidRequest
from space.model.sandbox import Resources
from space.settings import Settings

MEMINFO = Path("/proc/meminfo")
MACHINE_MIB = 96
"""What a machine takes before its guest has done anything, with some of what it then does at once."""
SPARE_MIB = 48
"""What of that a spare does not have yet when it is claimed."""
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)


class Admission:
    """Counts what has been let in and does not use its memory yet."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._coming_mib = 0

    def check_limits(self, resources: Resources) -> None:
        """Raise `InvalidRequest` when a machine may not be that large on this host."""
        for name in ("cpus", "memory_mib", "disk_mib", "pids"):
            most = getattr(self._settings, f"{name}_max")
            if getattr(resources, name) > most:
                raise InvalidRequest(f"`{name}` is more than a sandbox may have here.", field=name, max=most)

    def check_count(self, entries: Collection[Entry]) -> None:
        """Raise `HostFull` when there are as many machines as may be; spares give way and are only told of."""
        spares = sum(entry.spare for entry in entries)
        if len(entries) - spares >= self._settings.sandboxes_max:
            raise HostFull(
                "This host has as many sandboxes as it may.",
                sandboxes_max=self._settings.sandboxes_max,
                spares=spares,
            )

    def spare_mib(self) -> int:
        """Return how much memory one machine may take for a moment and leave others as much again."""
        left = _available_mib() - self._coming_mib - self._settings.memory_reserve_mib
        return max(0, left // 2)

    @contextmanager
    def memory(
        self, entries: Collection[Entry], image_bytes: int = 0, needed_mib: int = MACHINE_MIB
    ) -> Generator[None]:
        """Hold room for one machine while it comes up, or raise `HostFull`.

        What a guest may use is more than it does use, so the sum of all limits says little; its cgroup and the
        kernel's choice of whom to kill hold what is beyond.
        """
        needed = needed_mib + (image_bytes >> 20)
        left = _available_mib() - self._coming_mib - needed
        if left < self._settings.memory_reserve_mib:
            raise HostFull(
                "This host has not enough memory left for another sandbox.",
                needed_mib=needed,
                spares=sum(entry.spare for entry in entries),
            )
        self._coming_mib += needed
        try:
            yield
        finally:
            self._coming_mib -= needed


def _available_mib() -> int:
    found = _AVAILABLE.search(MEMINFO.read_text())
    if found is None:  # a kernel before 3.14
        return 1 << 40
    return int(found[1]) >> 10

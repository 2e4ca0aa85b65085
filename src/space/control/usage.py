"""What sandboxes used lately: a bounded number of samples per sandbox, in memory. A restart begins afresh."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

SAMPLE_S = 15.0
SAMPLES_MAX = 240
FIELDS = ("cpu_s", "memory_mib", "memory_peak_mib", "pids", "disk_mib")


@dataclass(frozen=True, slots=True)
class Sample:
    """Usage at one moment. ``cpu_s`` counts from the machine's start; a field the node did not tell is None."""

    at: datetime
    cpu_s: float | None = None
    memory_mib: float | None = None
    memory_peak_mib: float | None = None
    pids: float | None = None
    disk_mib: float | None = None


class History:
    """The last hour of samples of every present sandbox."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[Sample]] = {}

    def add(self, sandbox_id: str, sample: Sample) -> None:
        self._samples.setdefault(sandbox_id, deque(maxlen=SAMPLES_MAX)).append(sample)

    def of(self, sandbox_id: str) -> list[Sample]:
        return list(self._samples.get(sandbox_id, ()))

    def keep_only(self, sandbox_ids: Collection[str]) -> None:
        for gone in self._samples.keys() - set(sandbox_ids):
            del self._samples[gone]


def sample(usage: Any, at: datetime) -> Sample | None:
    """Read what the node tells of a machine's usage; None when it is nothing of use."""
    if not isinstance(usage, dict):
        return None
    numbers = {name: usage[name] for name in FIELDS if isinstance(usage.get(name), int | float)}
    return Sample(at, **numbers) if numbers else None

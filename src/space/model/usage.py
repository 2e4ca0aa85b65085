"""What a sandbox used at one moment."""

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """Usage at ``at``; what the node did not tell is None.

    ``cpu_s``, ``memory_peak_mib`` and ``oom_kills`` count from the machine's start, and begin anew when it is woken,
    started or restored.
    """

    at: datetime
    cpu_s: float | None = None
    memory_mib: float | None = None
    memory_peak_mib: float | None = None
    disk_mib: float | None = None
    pids: int | None = None
    oom_kills: int | None = None


NAMES = tuple(field.name for field in fields(Sample) if field.name != "at")


def sample(usage: Any, at: datetime) -> Sample | None:
    """Read what the node tells of a machine's usage; None when it is nothing of use."""
    if not isinstance(usage, dict):
        return None
    numbers: dict[str, Any] = {name: usage[name] for name in NAMES if isinstance(usage.get(name), int | float)}
    numbers |= {name: int(numbers[name]) for name in ("pids", "oom_kills") if name in numbers}
    return Sample(at, **numbers) if numbers else None

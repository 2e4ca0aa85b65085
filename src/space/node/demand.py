"""How many spares of which shape there should be: by what was asked for lately, within what the host has. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

FADES_S = 60.0
"""After so long a request counts for a third of what it did."""
IN_DEMAND_S = 600.0
"""A shape that nobody has asked for so long is not kept in stock, unless it always is. One that was asked for a single
time is kept for ``FADES_S`` only: it may have been that once.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What machines must have in common to stand in for one another. Everything else is set when one is claimed."""

    template: str
    driver: str
    memory_mib: int
    cpus: int = 0
    disk_mib: int = 0
    """Of drivers whose machines keep what they were made with; else 0: any."""

    @property
    def origin(self) -> Shape:
        """What the snapshot is of that it is restored from: where that may have any resources, one for all of them."""
        return self if self.cpus else replace(self, memory_mib=0)


@dataclass(slots=True)
class Demand:
    """How much one shape is asked for. ``always``: it is in demand also when nobody has asked for it yet."""

    always: bool = False
    asked_at: float = -math.inf
    _again: bool = False
    _score: float = 0.0

    def ask(self, now: float) -> None:
        """One was asked for."""
        self._again = now - self.asked_at <= IN_DEMAND_S
        self._score = self.score(now) + 1
        self.asked_at = now

    def score(self, now: float) -> float:
        """Return about how many were asked for lately."""
        return self._score * math.exp(-(now - self.asked_at) / FADES_S) if self._score else 0.0

    def wanted(self, now: float, count_min: int, count_max: int) -> int:
        """Return how many would be good to have: one for each of those asked for lately."""
        if not self.always and now - self.asked_at > (IN_DEMAND_S if self._again else FADES_S):
            return 0
        return min(count_max, count_min + math.floor(self.score(now) + 0.5))


def targets(
    demands: Mapping[Shape, Demand], now: float, *, count_min: int, count_max: int, count_all: int
) -> dict[Shape, int]:
    """Return how many of each there should be, at most ``count_all`` together: what is asked for least goes short.

    Each gets its minimum before any gets more.
    """
    by_demand = sorted(demands, key=lambda shape: demands[shape].score(now), reverse=True)
    wanted = {shape: demands[shape].wanted(now, count_min, count_max) for shape in by_demand}
    found = dict.fromkeys(by_demand, 0)
    left = count_all
    for limit in (count_min, count_max):
        for shape in by_demand:
            more = min(max(0, min(wanted[shape], limit) - found[shape]), left)
            found[shape] += more
            left -= more
    return found

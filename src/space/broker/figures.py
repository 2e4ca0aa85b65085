"""What the broker counts and tells of itself: it serves no HTTP and dials nobody, so the node asks and passes it on.

All is bounded by construction: verbs are a fixed set, kinds of strays a handful, and a request has so many phases.
"""

import asyncio
import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from space import tracing
from space.broker.requests import Request
from space.errors import SpaceError

if TYPE_CHECKING:
    from space.broker.journal import Entry
    from space.broker.machines import Machines

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the classes that durations are counted in; what took longer is counted in one more."""
PHASES_MAX = 64
FILES_MAX = 100_000
KINDS_MAX = 32
QUIET = frozenset({"inspect", "machines", "templates", "figures", "snapshots"})
"""What the node asks again and again, and is no news in a log."""

Span = tuple[str, int, int]
"""Name, and when it began and ended, in nanoseconds since 1970."""

_phases: ContextVar[list[Span] | None] = ContextVar("space_broker_phases", default=None)
log = structlog.get_logger()


def note_phase(name: str, began_ns: int, ended_ns: int) -> None:
    """Keep one phase of the request that this task works for, when its trace is wanted."""
    phases = _phases.get()
    if phases is not None and len(phases) < PHASES_MAX:
        phases.append((name, began_ns, ended_ns))


@dataclass
class Durations:
    """How often something took how long, counted in the classes of ``SECONDS``."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total_s += seconds


class Figures:
    """One broker's counters, since its start."""

    def __init__(self) -> None:
        self._verbs: dict[tuple[str, bool], Durations] = {}
        self._strays: Counter[str] = Counter()

    def stray_found(self, kind: str) -> None:
        """Count something of this installation that belonged to no machine."""
        if kind in self._strays or len(self._strays) < KINDS_MAX:
            self._strays[kind] += 1

    @contextmanager
    def carrying_out(self, request: Request) -> Generator[list[Span]]:
        """Around one request: its line in the log, its duration, and its spans when the node wants them.

        Yields the list that has them at the end: first the verb, then its phases.
        """
        machine = getattr(request, "machine", None)
        tracing.begin(trace=request.trace, request_id=request.request_id, operation=request.operation, sandbox=machine)
        spans: list[Span] = []
        phases: list[Span] = []
        _phases.set(None if request.trace is None else phases)
        began, began_ns, outcome = time.perf_counter(), time.time_ns(), "ok"
        try:
            yield spans
        except BaseException as error:
            outcome = error.code if isinstance(error, SpaceError) else type(error).__name__
            raise
        finally:
            seconds = time.perf_counter() - began
            self._verbs.setdefault((request.verb, outcome == "ok"), Durations()).add(seconds)
            if request.trace is not None:
                spans += [(request.verb, began_ns, time.time_ns()), *phases]
            write = log.debug if request.verb in QUIET else log.info
            write("verb", verb=request.verb, outcome=outcome, seconds=round(seconds, 6))

    async def tell(self, machines: "Machines") -> dict[str, Any]:
        """Return what the verb `figures` answers."""
        store, images = await asyncio.to_thread(_measure, machines.host.images)
        return {
            "seconds": list(SECONDS),
            "verbs": [
                {"verb": verb, "ok": ok, "counts": found.counts, "total_s": round(found.total_s, 6)}
                for (verb, ok), found in sorted(self._verbs.items())
            ],
            "machines": dict(Counter(_phase(machines, entry) for entry in machines.entries.values())),
            "strays": dict(self._strays),
            "store": store,
            "images": images,
        }


def _phase(machines: "Machines", entry: "Entry") -> str:
    if entry.spare:
        return "spare"
    return "stalled" if entry.body in machines.stalled else entry.phase.value


def _measure(images: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the size of the store that holds disks and what it has left, and the same of memory images."""
    disks = images.parent / "disks"
    store = os.statvfs(disks if disks.is_dir() else images)
    size = {"bytes": store.f_blocks * store.f_frsize, "free_bytes": store.f_bavail * store.f_frsize}
    files = kept = seen = 0
    for directory, _, names in os.walk(images):
        for name in names:
            seen += 1
            if seen > FILES_MAX:
                return size, {"files": files, "bytes": kept}
            try:
                found = os.lstat(Path(directory) / name)
            except FileNotFoundError:
                continue
            files, kept = files + 1, kept + found.st_blocks * 512
    return size, {"files": files, "bytes": kept}

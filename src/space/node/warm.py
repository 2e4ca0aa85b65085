"""Warm snapshots: one of each template and driver, of a guest that has just come up and knows nothing of anybody.

Of drivers whose machines keep the hardware that they were made with there is one of each size, and not of many.

They are the node's own. A file says which these are, so that a node started anew knows them from the snapshots that
belong to the api, and leaves those alone. Its entry is there before the snapshot is.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from space.errors import SpaceError
from space.model.ids import is_id, new_id
from space.node.broker import BrokerClient
from space.node.demand import Shape
from space.node.records import write_json

log = structlog.get_logger(__name__)

QUICK_S = 30.0
DROP_S = 60.0
SIZES_MAX = 4
"""Of one template and driver; each keeps a guest's memory on the disk."""


@dataclass(slots=True)
class Warm:
    """One warm snapshot. ``runtime`` is the guest runtime in it; ``made``: it is whole."""

    snapshot: str
    template: str
    driver: str
    runtime: str
    made: bool = False
    memory_mib: int = 0
    cpus: int = 0
    disk_mib: int = 0

    @property
    def origin(self) -> Shape:
        return Shape(self.template, self.driver, self.memory_mib, self.cpus, self.disk_mib)


class WarmSnapshots:
    """The file ``path`` and the snapshots it names. ``guest_dir`` is where the guest runtime of the day is."""

    def __init__(self, broker: BrokerClient, path: Path, guest_dir: Path) -> None:
        self._broker = broker
        self._path = path
        self._guest_dir = guest_dir
        self._known = _load(path)

    def get(self, origin: Shape) -> str | None:
        """Return the snapshot to restore from; None when there is none, or its guest runtime is not today's."""
        runtime = self._runtime()
        for warm in self._known:
            if warm.made and (warm.origin, warm.runtime) == (origin, runtime):
                return warm.snapshot
        return None

    def is_own(self, snapshot: str) -> bool:
        return any(warm.snapshot == snapshot for warm in self._known)

    async def make(self, origin: Shape, take: Callable[[str], Awaitable[None]]) -> None:
        """Have ``take`` make the snapshot of an id, and know it from then on. Nothing is left of one that fails."""
        warm = Warm(runtime=self._runtime(), snapshot=new_id("snp"), **asdict(origin))
        self._known.append(warm)
        self._save()
        try:
            await take(warm.snapshot)
        except Exception:
            await self._drop(warm)
            raise
        warm.made = True
        self._save()
        of = (warm.template, warm.driver)
        sizes = [one for one in self._known if one.made and (one.template, one.driver) == of]
        for old in sizes[:-SIZES_MAX]:
            await self._drop(old)

    async def distrust(self, origin: Shape) -> None:
        """Drop the snapshot of a template: it was restored and did not do."""
        for warm in [one for one in self._known if one.origin == origin]:
            await self._drop(warm)

    async def forget(self, template: str) -> None:
        """Drop the snapshots of a template; not one that is just being made."""
        for warm in [one for one in self._known if one.template == template and one.made]:
            await self._drop(warm)

    async def keep_only(self, templates: set[str]) -> None:
        """Drop what is of other templates, of another runtime, not whole, or not there."""
        listed = await self._broker.call("snapshots", timeout_s=QUICK_S)
        there = {str(row["snapshot"]) for row in listed}
        runtime = self._runtime()
        for warm in list(self._known):
            if warm.template not in templates or warm.runtime != runtime or not warm.made or warm.snapshot not in there:
                await self._drop(warm)

    async def _drop(self, warm: Warm) -> None:
        """Known until it is gone."""
        warm.made = False
        try:
            await self._broker.call("drop-snapshot", timeout_s=DROP_S, snapshot=warm.snapshot)
        except SpaceError as error:
            log.warning("warm-snapshot-not-dropped", snapshot=warm.snapshot, code=error.code)
            return
        self._known = [one for one in self._known if one is not warm]
        self._save()

    def _runtime(self) -> str:
        return str(self._guest_dir.resolve())

    def _save(self) -> None:
        write_json(self._path, {"warm": [asdict(warm) for warm in self._known]})


def _load(path: Path) -> list[Warm]:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_bytes())["warm"]
        return [warm for warm in (Warm(**row) for row in rows) if is_id("snp", warm.snapshot)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("warm-notes-damaged", error=str(error))
        return []

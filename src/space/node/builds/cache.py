"""What builds keep for those that come after them: the disk after each step, as a snapshot, and layers of images.

A file names the snapshots, each before it is there, so that a node started anew knows them as its own and drops those
that are not whole. Layers are files named by their digest, apart for each repository: who may have an image of one is
decided by its registry, and who only knows the digest of another's layer does not get it here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from space.errors import SpaceError
from space.model.ids import is_id, new_id
from space.node.records import write_json
from space.node.snapshots import Snapshots

log = structlog.get_logger(__name__)

ENTRIES_MAX = 2000
"""However small they are: each is a disk of its own, and all are listed in one file."""


@dataclass(slots=True)
class Kept:
    """The disk after a step. ``key`` says what led to it; ``made``: the snapshot is whole."""

    key: str
    snapshot: str
    template: str
    bytes: int
    created_at: float
    used_at: float
    made: bool = False


class BuildCache:
    """``directory`` holds the index (``cache.json``) and the layers (``blobs/<registry's name, hashed>/sha256/``)."""

    def __init__(self, directory: Path, snapshots: Snapshots) -> None:
        self._blobs = directory / "blobs"
        self._path = directory / "cache.json"
        self._snapshots = snapshots
        self._kept = _load(self._path)
        self._held: Counter[str] = Counter()
        """Snapshots that builds begin from now."""
        self._pulling = 0
        self._blobs.mkdir(mode=0o700, exist_ok=True)

    # --- for builds

    def blobs(self, repository: str) -> Path:
        """Return where the layers of a repository, with its registry's name, are kept: that is what a registry lets
        somebody read or not, so a layer of another one is not taken from here.
        """
        place = self._blobs / hashlib.sha256(repository.encode()).hexdigest()[:16]
        (place / "sha256").mkdir(mode=0o700, parents=True, exist_ok=True)
        return place

    def find(self, key: str) -> Kept | None:
        """Return the disk that a key names, if it is there."""
        return next((kept for kept in self._kept if kept.key == key and kept.made), None)

    @contextlib.contextmanager
    def holding(self) -> Generator[Hold]:
        """Yield a hold: what is taken with it stays until the block ends."""
        hold = Hold(self._held)
        try:
            yield hold
        finally:
            hold.release()
            self._save()

    @contextlib.asynccontextmanager
    async def keeping(self, key: str, template: str) -> AsyncGenerator[Kept]:
        """Yield an entry whose snapshot the block takes, and whose ``bytes`` it sets."""
        now = time.time()
        kept = Kept(key, new_id("snp"), template, 0, now, now)
        self._kept.append(kept)
        self._save()
        try:
            yield kept
        except BaseException:
            # A cancelled build drops it as well, but not before its machine is gone: that may be at it yet.
            self._save()
            raise
        kept.made = True
        for old in [one for one in self._kept if one.key == key and one is not kept]:
            await self._drop(old)
        self._save()

    @contextlib.contextmanager
    def pulling(self) -> Generator[None]:
        """While the block lasts no layer goes."""
        self._pulling += 1
        try:
            yield
        finally:
            self._pulling -= 1

    # --- what there is, and making room

    def is_own(self, snapshot: str) -> bool:
        return any(kept.snapshot == snapshot for kept in self._kept)

    def report(self) -> list[dict[str, Any]]:
        """Return everything that is kept, what was used longest ago first."""
        steps = [
            {
                "id": kept.snapshot,
                "kind": "step",
                "bytes": kept.bytes,
                "created_at": kept.created_at,
                "used_at": kept.used_at,
                "in_use": self._is_held(kept),
            }
            for kept in self._kept
            if kept.made
        ]
        return sorted([*steps, *self._layers()], key=lambda entry: entry["used_at"])

    async def collect(
        self, *, max_age_s: float | None = None, max_bytes: int | None = None, dry_run: bool = False
    ) -> list[dict[str, Any]]:
        """Remove what was not used for ``max_age_s``, and then what was used longest ago until no more than
        ``max_bytes`` (and ``ENTRIES_MAX`` of them) are left; without either, everything. What a build uses now stays.
        Return what goes.
        """
        entries = self.report()
        left, count, now = sum(entry["bytes"] for entry in entries), len(entries), time.time()
        removed: list[dict[str, Any]] = []
        for entry in entries:
            unwanted = max_age_s is None and max_bytes is None
            old = max_age_s is not None and now - entry["used_at"] > max_age_s
            much = max_bytes is not None and (left > max_bytes or count > ENTRIES_MAX)
            if entry["in_use"] or not (unwanted or old or much):
                continue
            if dry_run or await self._remove(entry):
                removed.append(entry)
                left -= entry["bytes"]
                count -= 1
        return removed

    async def forget_template(self, digest: str) -> None:
        """Drop the disks of machines of a template, as far as no build begins from them now."""
        for kept in [one for one in self._kept if one.template == digest and not self._is_held(one)]:
            await self._drop(kept)

    async def drop_unmade(self) -> None:
        """Drop what no build is making any more. To be called when that is so."""
        for kept in [one for one in self._kept if not one.made and not self._is_held(one)]:
            await self._drop(kept)

    async def recover(self, there: set[str]) -> None:
        """After a start: forget what is not ``there``, drop what is not whole."""
        self._kept = [kept for kept in self._kept if kept.snapshot in there or not kept.made]
        self._save()
        await self.drop_unmade()

    # --- private

    def _is_held(self, kept: Kept) -> bool:
        return self._held[kept.snapshot] > 0

    def _layers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in self._blobs.glob("*/sha256/*"):
            with contextlib.suppress(FileNotFoundError):
                seen = path.stat()
                found.append(
                    {
                        "id": f"{path.parents[1].name}/{path.name}",
                        "kind": "layer",
                        "bytes": seen.st_size,
                        "created_at": seen.st_mtime,
                        "used_at": max(seen.st_mtime, seen.st_atime),
                        "in_use": self._pulling > 0,
                    }
                )
        return found

    async def _remove(self, entry: dict[str, Any]) -> bool:
        if entry["kind"] == "layer":
            registry, _, name = entry["id"].partition("/")
            (self._blobs / registry / "sha256" / name).unlink(missing_ok=True)
            return True
        kept = next((one for one in self._kept if one.snapshot == entry["id"]), None)
        return kept is not None and not self._is_held(kept) and await self._drop(kept)

    async def _drop(self, kept: Kept) -> bool:
        """Known until it is gone."""
        kept.made = False
        try:
            await self._snapshots.drop(kept.snapshot)
        except SpaceError as error:
            log.warning("cached-step-not-dropped", snapshot=kept.snapshot, code=error.code)
            return False
        self._kept = [one for one in self._kept if one is not kept]
        self._save()
        return True

    def _save(self) -> None:
        write_json(self._path, {"kept": [asdict(kept) for kept in self._kept]})


class Hold:
    """What one build uses of the cache."""

    def __init__(self, held: Counter[str]) -> None:
        self._held = held
        self._mine: list[str] = []

    def take(self, kept: Kept) -> None:
        kept.used_at = time.time()
        self._held[kept.snapshot] += 1
        self._mine.append(kept.snapshot)

    def release(self) -> None:
        for snapshot in self._mine:
            self._held[snapshot] -= 1
            if not self._held[snapshot]:
                del self._held[snapshot]
        self._mine.clear()


def _load(path: Path) -> list[Kept]:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_bytes())["kept"]
        return [kept for kept in (Kept(**row) for row in rows) if is_id("snp", kept.snapshot)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("build-cache-damaged", error=str(error))
        return []

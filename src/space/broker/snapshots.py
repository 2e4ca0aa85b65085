"""The snapshots that are kept on this host: for each a directory with its record and, of a ``full`` one, its memory.

The disk of a snapshot is in the disk store under the same name. What belongs to a snapshot is written under a
temporary name first, and the directory gets its own name last of all: whatever has no directory of that name is
nothing, and is swept.
"""

import asyncio
import shutil
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from space.broker.files import sync, sync_tree
from space.broker.rootfs import MachineDisks
from space.errors import HostError, NotFound, Unavailable
from space.model import ids

IN_USE_S = 60.0
_RECORD = "record.json"
_MEMORY = "memory"


class Snapshot(BaseModel):
    """One snapshot. `links` are those whose addresses sockets in its memory may have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    snapshot: Annotated[str, Field(pattern=r"^snp[a-z2-7]{16}$")]
    machine: str
    kind: Literal["disk", "full"]
    template: str
    driver: str
    memory_mib: int
    template_bytes: int
    disk_bytes: int
    memory_bytes: int
    links: tuple[int, ...] = ()

    def told(self) -> dict[str, str | int]:
        """Return what the verb `snapshots` answers of it."""
        fields = self.model_dump(include={"snapshot", "kind", "template", "driver", "memory_mib"})
        return {**fields, "bytes": self.bytes}

    @property
    def bytes(self) -> int:
        """What it keeps: memory, and what its disk has beyond the template."""
        return self.disk_bytes + self.memory_bytes


class Snapshots:
    """All snapshots in `directory`, where machines' own images lie, too."""

    def __init__(self, directory: Path, stores: Sequence[MachineDisks]) -> None:
        self._directory = directory
        self._stores = stores
        self._in_use: Counter[str] = Counter()
        self._dropping: dict[str, asyncio.Event] = {}
        """Those that are being given up, and whether nobody uses them any more."""

    def get(self, name: str) -> Snapshot:
        """Return one. Raise `NotFound`, or `HostError` when its record is damaged."""
        try:
            return Snapshot.model_validate_json((self._directory / name / _RECORD).read_bytes())
        except FileNotFoundError:
            raise NotFound("There is no such snapshot on this host.", snapshot=name) from None
        except ValidationError as error:
            raise HostError("A snapshot's record is damaged.", code="snapshot-damaged", snapshot=name) from error

    def find(self, name: str) -> Snapshot | None:
        with suppress(NotFound):
            return self.get(name)
        return None

    def all(self) -> list[Snapshot]:
        """Return those that can be used."""
        found: list[Snapshot] = []
        for name in sorted(self.known()):
            with suppress(HostError, NotFound):
                found.append(self.get(name))
        return found

    def known(self) -> set[str]:
        return {path.name for path in self._directory.iterdir() if ids.is_id("snp", path.name)}

    def unfinished(self) -> set[str]:
        """Return the names of those that were begun, and of those that were not wholly dropped."""
        names = {path.name.removesuffix(".tmp") for path in self._directory.glob("snp*.tmp")}
        return {name for name in names if ids.is_id("snp", name)}

    def memory(self, name: str) -> Path:
        return self._directory / name / _MEMORY

    def begin(self, name: str) -> Path:
        """Return an empty directory for the memory of a snapshot that is to be kept."""
        self._clear(name)
        memory = self._working(name) / _MEMORY
        memory.mkdir(mode=0o700, parents=True)
        return memory

    async def keep(self, snapshot: Snapshot) -> None:
        """Let a snapshot whose parts are there be one: all is synced before it has its name."""
        working = self._working(snapshot.snapshot)
        if snapshot.kind == "disk":
            (working / _MEMORY).rmdir()
        (working / _RECORD).write_text(snapshot.model_dump_json())
        await asyncio.to_thread(sync_tree, working)
        working.rename(self._directory / snapshot.snapshot)
        await asyncio.to_thread(sync, self._directory)

    @contextmanager
    def used(self, name: str) -> Generator[Snapshot]:
        """Return one that is not dropped while the block lasts."""
        if name in self._dropping:
            raise NotFound("There is no such snapshot on this host.", snapshot=name)
        self._in_use[name] += 1
        try:
            yield self.get(name)
        finally:
            self._in_use[name] -= 1
            if not self._in_use[name]:
                del self._in_use[name]
                if idle := self._dropping.get(name):
                    idle.set()

    async def drop(self, name: str) -> None:
        """Leave nothing of a snapshot, finished or not. Waits for machines that are just being made of it."""
        idle = self._dropping[name] = asyncio.Event()
        if not self._in_use[name]:
            idle.set()
        try:
            async with asyncio.timeout(IN_USE_S):
                await idle.wait()
            with suppress(FileNotFoundError):
                # From here on it is none any more, whatever happens.
                self._clear(name)
                (self._directory / name).rename(self._working(name))
                await asyncio.to_thread(sync, self._directory)
            await self._disks_drop(name)
            await asyncio.to_thread(self._clear, name)
        except TimeoutError as error:
            raise Unavailable("Machines are still being made of that snapshot.", code="busy") from error
        finally:
            del self._dropping[name]

    async def _disks_drop(self, name: str) -> None:
        with suppress(FileNotFoundError):  # there is no disk store where no driver needs one
            for store in self._stores:
                if name in store.known_saved():
                    await store.drop(name)

    def _clear(self, name: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self._working(name))

    def _working(self, name: str) -> Path:
        return self._directory / f"{name}.tmp"

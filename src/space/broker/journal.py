"""What the broker has done and is about to do, one file per machine, so that a SIGKILL at any point can be recovered
from.

The entry is written and synced *before* the step it announces. `Phase` says which step; `recovery.py` says what a
restart does about each. An entry is replaced as a whole, never edited in place.
"""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from space.broker.files import sync
from space.drivers.processes import Process
from space.model import ids
from space.model.sandbox import Resources
from space.model.volume import Mount

FORMER_LINKS_MAX = 16
_FILE = "journal.json"


class Phase(StrEnum):
    """Resting phases first; those in -ing announce a step."""

    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"
    STOPPED = "stopped"
    EXITED = "exited"
    BOOTING = "booting"
    STARTING = "starting"
    WAKING = "waking"
    PAUSING = "pausing"
    RESUMING = "resuming"
    SUSPENDING = "suspending"
    SNAPSHOTTING = "snapshotting"
    STOPPING = "stopping"
    DESTROYING = "destroying"


RESIDENT = frozenset({Phase.RUNNING, Phase.PAUSED})
AT_REST = frozenset({Phase.SUSPENDED, Phase.STOPPED, Phase.EXITED})
"""Where a machine has a disk, perhaps an image, and nothing else."""


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Entry:
    """One machine. `link` is the index its addresses follow from, which a suspended machine keeps; `process` the one
    whose end is the machine's.
    """

    machine: Annotated[str, Field(pattern=r"^[a-z0-9]{4,32}$")]
    driver: str
    template: str
    hostname: str
    resources: Resources
    phase: Phase
    link: int | None = None
    process: Process | None = None
    cause: str | None = None
    was_paused: bool = False
    """While suspending or snapshotting: whether it goes back to paused instead of running."""
    body: Annotated[str, Field(pattern=r"^([a-z0-9]{4,32})?$")] = ""
    """What disk, link, cgroup, channel and container are called. The machine's own id, unless it was a spare once."""
    spare: bool = False
    snapshot: str | None = None
    """What it was booted from, if that was a snapshot."""
    restored: bool = False
    """Whether its memory comes from that snapshot, so that its guest has to be awakened."""
    template_bytes: int | None = None
    """What its disk began with and is not counted as the guest's; not known of machines from before that was kept."""
    former_links: tuple[int, ...] = ()
    """Links whose addresses sockets in its memory may still have: of the machines that it was copied from."""
    volumes: tuple[Mount, ...] = ()

    def __post_init__(self) -> None:
        if not self.body:
            object.__setattr__(self, "body", self.machine)

    def to(self, phase: Phase, **changes: Any) -> "Entry":
        """Return the entry in another phase."""
        return replace(self, phase=phase, **changes)


@dataclass(frozen=True, slots=True)
class Journals:
    """What was found on disk. A damaged entry protects what belongs to its body from being swept as a stray."""

    entries: dict[str, Entry]
    """By machine."""
    damaged: frozenset[str]


class Journal:
    """The directory ``machines/``; each body has a directory of its own there, so that a machine changes its id in one
    write.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._adapter = TypeAdapter(Entry)

    def open(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, entry: Entry, *, durable: bool = True) -> None:
        """Replace the body's entry. When this returns it survives the broker's end, and a power cut if `durable`.

        What is true only while the host is up needs no more than the first, and a sync costs milliseconds.
        """
        directory = self._directory / entry.body
        if not directory.exists():
            directory.mkdir(mode=0o700)
            sync(self._directory)
        temporary = directory / f"{_FILE}.tmp"
        with temporary.open("wb") as file:
            file.write(self._adapter.dump_json(entry))
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.rename(directory / _FILE)
        if durable:
            sync(directory)

    def sync(self, body: str) -> None:
        """Let an entry that was not written durably survive a power cut, too. Not there any more: success."""
        with suppress(FileNotFoundError):
            sync(self._directory / body / _FILE)
            sync(self._directory / body)

    def remove(self, body: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self._directory / body)
        sync(self._directory)

    def read_all(self) -> Journals:
        """Return every entry. Directories without one (a first write cut short) are removed: nothing had been done
        yet.
        """
        entries: dict[str, Entry] = {}
        damaged: set[str] = set()
        for directory in self._directory.iterdir():
            try:
                # Lax, as JSON has no enums or dataclasses; unknown and missing fields are still refused.
                entry = self._adapter.validate_python(json.loads((directory / _FILE).read_bytes()))
                if entry.body != directory.name or not (
                    ids.is_id("sbx", entry.machine) and ids.is_id("sbx", entry.body)
                ):
                    raise ValueError(directory.name)  # noqa: TRY301
                entries[entry.machine] = entry
            except FileNotFoundError:
                shutil.rmtree(directory)
            except (ValueError, ValidationError, NotADirectoryError):
                damaged.add(directory.name)
        return Journals(entries, frozenset(damaged))

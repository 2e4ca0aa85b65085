"""Where the node's machines meet the file system: their channels, and what is remembered of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from space.node.records import MachineRecords, SnapshotNotes
from space.settings import Settings


@dataclass(frozen=True, slots=True)
class Places:
    """``channels`` has a directory for each body; the others are the node's own."""

    channels: Path
    machines: MachineRecords
    snapshots: SnapshotNotes

    @classmethod
    def of(cls, settings: Settings) -> Self:
        own = settings.node_dir
        return cls(settings.channels_dir, MachineRecords(own / "machines"), SnapshotNotes(own / "snapshots"))

"""What is kept on the host of each virtual machine while it is there: a directory of root's alone, its bundle, that a
reboot of the host clears.
"""

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from space.drivers import processes
from space.drivers.processes import Process
from space.drivers.vm import users

PROCESS = "process.json"
_STARTED = "started.json"
_STANDING = "standing"


@dataclass(frozen=True, slots=True)
class Bundle:
    """One machine's."""

    path: Path

    @property
    def machine_id(self) -> str:
        return self.path.name

    def make(self) -> None:
        """Make it, empty but for a user of the machine's own. Nothing of the machine may run."""
        self.remove()
        self.path.mkdir(mode=0o700, parents=True)
        users.take(self.path)

    def remove(self) -> None:
        """Nothing of the machine may run any more."""
        users.give_back(self.path)
        # SAFETY: `rmtree` goes by descriptors and follows no link that a machine's user may have made below.
        with suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    @property
    def user(self) -> int:
        return users.of(self.path)

    def note_started(self, facts: dict[str, Any]) -> None:
        """Keep what an image of the machine will need again."""
        (self.path / _STARTED).write_text(json.dumps(facts))

    def started(self) -> dict[str, Any]:
        return json.loads((self.path / _STARTED).read_text())

    def note_process(self, process: Process, name: str = PROCESS) -> None:
        (self.path / name).write_text(json.dumps(asdict(process)))

    def process(self, name: str = PROCESS) -> Process | None:
        """Return the machine's process if it lives."""
        try:
            process = Process(**json.loads((self.path / name).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return process if processes.is_alive(process) else None

    @property
    def standing(self) -> bool:
        """Whether a checkpoint has begun since which the machine was not resumed."""
        return (self.path / _STANDING).exists()

    def note_standing(self, *, still: bool) -> None:
        if still:
            (self.path / _STANDING).touch()
        else:
            (self.path / _STANDING).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Bundles:
    """Those of all machines of a driver."""

    directory: Path

    def of(self, machine_id: str) -> Bundle:
        return Bundle(self.directory / machine_id)

    def all(self) -> list[Bundle]:
        return [Bundle(path) for path in self.directory.iterdir()] if self.directory.is_dir() else []

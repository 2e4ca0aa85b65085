"""What the node remembers of commands, machines and snapshots on disk, so that its own death loses nothing.

Small JSON files, each replaced as a whole. They survive SIGKILL (page cache), which is what is promised; not a power
cut, after which no command runs any more anyway.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from space.errors import HostFull
from space.model.command import CommandSpec, CommandState, Exit, ExitKind, Tty
from space.model.ids import is_id

log = structlog.get_logger(__name__)

RECORD = "record.json"
TOKENS_MAX = 16
FREE_BYTES_MIN = 512 * 1024 * 1024
"""Output of commands never takes the last of the disk, which the api's store may share."""
FREE_LOOK_S = 0.1
_KEPT = ("machine_id", "active_at", "ports")

BOOTING = "booting"
READY = "ready"
SUSPENDING = "suspending"
SUSPENDED = "suspended"


@dataclass(slots=True)
class CommandRecord:
    """One command: what to run, how far it got, how it ended. Times are seconds since 1970.

    ``numbers`` maps a stream's name to its number on the guest channel; they are chosen before the guest is asked to
    start, together with ``boot_id``, the boot of the guest that is asked. ``tokens`` are fingerprints of the tokens it
    was attached with.
    """

    id: str
    sandbox_id: str
    spec: CommandSpec
    created_at: float
    state: CommandState = CommandState.CREATED
    numbers: dict[str, int] = field(default_factory=dict)
    boot_id: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    exit: Exit | None = None
    produced: dict[str, int] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    pid: int | None = None
    """Of its first process, in the guest, once it has been started."""
    forked_from: str | None = None
    """The command of another sandbox that this one is a copy of."""


class CommandRecords:
    """The directory ``commands/``: one directory per command, with its record and its spools."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._looked_at = -FREE_LOOK_S
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def check_room(self) -> None:
        """Raise ``HostFull`` when the disk is too full to keep more. Cheap: looks anew after ``FREE_LOOK_S`` only."""
        now = time.monotonic()
        if now - self._looked_at < FREE_LOOK_S:
            return
        found = os.statvfs(self._directory)
        if found.f_bavail * found.f_frsize < FREE_BYTES_MIN:
            raise HostFull("The host has no room to keep the output of commands.")
        self._looked_at = now

    def save(self, record: CommandRecord) -> None:
        home = self._directory / record.id
        home.mkdir(mode=0o700, exist_ok=True)
        write_json(home / RECORD, asdict(record))

    def spool_path(self, command_id: str, stream: str) -> Path:
        return self._directory / command_id / stream

    def remove(self, command_id: str) -> None:
        """Drop a command's record and output. The record goes first: what has none is rubbish for the next start."""
        home = self._directory / command_id
        with contextlib.suppress(FileNotFoundError):
            (home / RECORD).unlink()
        shutil.rmtree(home, ignore_errors=True)

    def load(self) -> Iterator[CommandRecord]:
        """Yield every command that was remembered; remove what is not whole (its creation was never answered)."""
        for home in sorted(self._directory.iterdir()):
            try:
                record = _record(json.loads((home / RECORD).read_bytes()))
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.warning("command-record-damaged", command=home.name, error=str(error))
                shutil.rmtree(home, ignore_errors=True)
            else:
                yield record


class MachineRecords:
    """The directory ``machines/``: for each machine what its guest is to be told, and how far that got."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def begin(self, machine: str, request: dict[str, Any]) -> None:
        """Take note that a machine is to be booted. It is who it was, if it was there before."""
        before = self.load(machine) or {}
        kept = {"machine_id": secrets.token_hex(16), **{k: before[k] for k in _KEPT if k in before}}
        if before and request.get("snapshot") == before["request"].get("snapshot"):
            kept["rename"] = before.get("rename")
        self._save(machine, {**kept, "request": request, "phase": BOOTING})

    def load(self, machine: str) -> dict[str, Any] | None:
        """Return what was saved: ``request``, ``phase``, ``machine_id``, ``rename`` (ids of commands of the machine it
        is a copy of, and what they are called here), ``active_at``. None when nothing (whole) was.
        """
        try:
            value = json.loads((self._directory / f"{machine}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def request(self, machine: str) -> dict[str, Any] | None:
        """Return what was last told about the machine: template defaults, env, hostname."""
        saved = self.load(machine)
        return saved["request"] if saved is not None else None

    def phase(self, machine: str) -> str | None:
        """Return how far its guest has been told what it needs."""
        saved = self.load(machine)
        return saved["phase"] if saved is not None else None

    def note(self, machine: str, **changes: Any) -> None:
        """Change what is known of a machine; one of which nothing is known stays so."""
        saved = self.load(machine)
        if saved is not None and (changed := {**saved, **changes}) != saved:
            self._save(machine, changed)

    def remove(self, machine: str) -> None:
        (self._directory / f"{machine}.json").unlink(missing_ok=True)

    def names(self) -> list[str]:
        return [path.stem for path in self._directory.glob("*.json") if is_id("sbx", path.stem)]

    def _save(self, machine: str, value: dict[str, Any]) -> None:
        write_json(self._directory / f"{machine}.json", value)


class SnapshotNotes:
    """The directory ``snapshots/``: for each snapshot the commands that ran in it, so that its copies can go on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, snapshot: str, running: list[CommandRecord]) -> list[str]:
        """Take note of what runs, and return the commands' ids. What was noted before is true: it is not repeated."""
        known = self.load(snapshot)
        if known is None:
            known = {record.id: record for record in running}
            write_json(self._directory / f"{snapshot}.json", {"commands": [asdict(record) for record in running]})
        return list(known)

    def load(self, snapshot: str) -> dict[str, CommandRecord] | None:
        """Return the commands by their ids then; None when nothing (whole) was noted."""
        try:
            rows = json.loads((self._directory / f"{snapshot}.json").read_bytes())["commands"]
            return {record.id: record for record in map(_record, rows)}
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def remove(self, snapshot: str) -> None:
        (self._directory / f"{snapshot}.json").unlink(missing_ok=True)

    def names(self) -> list[str]:
        return [path.stem for path in self._directory.glob("*.json") if is_id("snp", path.stem)]


def write_json(path: Path, value: Any) -> None:
    """Replace a file as a whole: a reader, or this process after its death, sees the old or the new one."""
    draft = path.with_name(f".{path.name}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(value).encode())
    draft.replace(path)


def _record(value: dict[str, Any]) -> CommandRecord:
    spec: dict[str, Any] = dict(value["spec"])
    spec["argv"] = tuple(spec["argv"])
    spec["tty"] = Tty(**spec["tty"]) if spec["tty"] else None
    fields: dict[str, Any] = dict(value)
    fields["spec"] = CommandSpec(**spec)
    fields["state"] = CommandState(value["state"])
    if value["exit"]:
        end: dict[str, Any] = value["exit"]
        fields["exit"] = Exit(ExitKind(end["kind"]), end["code"], end["signal"])
    return CommandRecord(**fields)

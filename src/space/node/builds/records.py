"""What the node remembers of a build on disk: how far it is, and what a node that comes after must clear away.

Nothing of a client's values is in it: what it asked for is there as a fingerprint alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from space.node.records import write_json

log = structlog.get_logger(__name__)

PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLED = "pending", "running", "succeeded", "failed", "cancelled"
_RECORD, _FINDINGS, _LOG = "record.json", "findings.json", "log"


@dataclass(slots=True)
class BuildRecord:
    """One build. Times are seconds since 1970."""

    id: str
    fingerprint: str
    created_at: float
    state: str = PENDING
    step: int = 0
    steps: int = 0
    digest: str | None = None
    defaults: dict[str, Any] | None = None
    bytes: int | None = None
    base: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    timings: dict[str, float] = field(default_factory=dict)
    log: dict[str, Any] = field(default_factory=lambda: {"lines": 0, "bytes": 0, "truncated": False})
    started_at: float | None = None
    finished_at: float | None = None
    machine: str | None = None
    """The builder, as long as anything of it may be there."""
    publishing: bool = False
    """Its machine is stopped, and the broker was or is about to be asked to publish its disk with ``defaults``."""

    @property
    def ended(self) -> bool:
        return self.state in {SUCCEEDED, FAILED, CANCELLED}

    def told(self) -> dict[str, Any]:
        """Return what the api is told."""
        hidden = {"fingerprint", "machine", "publishing"}
        told = {name: value for name, value in asdict(self).items() if name not in hidden}
        if self.state != SUCCEEDED:
            told["defaults"] = None
        return {**told, "lineage": None, "packages": None}


class BuildRecords:
    """The directory ``records/``: one directory per build, with its record and its log."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, record: BuildRecord) -> None:
        home = self._directory / record.id
        home.mkdir(mode=0o700, exist_ok=True)
        write_json(home / _RECORD, asdict(record))

    def save_findings(self, build: str, findings: dict[str, Any]) -> None:
        """Put aside what was found of a build: too much to be kept in memory for every one."""
        write_json(self._directory / build / _FINDINGS, findings)

    def findings(self, build: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self._directory / build / _FINDINGS).read_bytes())
        except (OSError, ValueError):
            return {}
        return found

    def log_path(self, build: str) -> Path:
        return self._directory / build / _LOG

    def remove(self, build: str) -> None:
        (self._directory / build / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(self._directory / build, ignore_errors=True)

    def load(self) -> Iterator[BuildRecord]:
        """Yield every build that was remembered; remove what is not whole (nobody was told of it)."""
        for home in sorted(self._directory.iterdir()):
            try:
                yield BuildRecord(**json.loads((home / _RECORD).read_bytes()))
            except (OSError, ValueError, TypeError) as error:
                log.warning("build-record-damaged", build=home.name, error=str(error))
                shutil.rmtree(home, ignore_errors=True)

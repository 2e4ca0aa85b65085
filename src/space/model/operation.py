"""The record of one asynchronous lifecycle change."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from space.model.sandbox import Failure


class OperationState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINISHED = frozenset({OperationState.SUCCEEDED, OperationState.FAILED, OperationState.CANCELLED})


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. ``timings`` maps a phase to seconds; ``lease_*`` say which runner carries it out until when."""

    id: str
    project_id: str
    sandbox_id: str
    kind: str
    state: OperationState
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error: Failure | None = None
    timings: dict[str, float] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    lease_owner: str | None = None
    lease_until: datetime | None = None

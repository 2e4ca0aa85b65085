"""What is told of a project."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a project. ``number`` counts from 1 without gaps, per project."""

    project_id: str
    number: int
    kind: str
    data: dict[str, Any]
    created_at: datetime

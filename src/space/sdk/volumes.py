"""What is told of a volume. A frozen value."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

from space.sdk.types import Json, parse_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A directory that outlives sandboxes, and that several of them mount."""

    id: str
    name: str
    size_mib: int
    """How much it holds."""
    sandboxes: int = 0
    """How many mount it."""
    created_at: datetime | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            id=data["id"],
            name=data["name"],
            size_mib=data["size_mib"],
            sandboxes=data.get("sandboxes") or 0,
            created_at=parse_time(data.get("created_at")),
            raw=data,
        )

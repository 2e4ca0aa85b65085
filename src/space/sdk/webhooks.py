"""Webhooks and their deliveries as the API tells of them. Frozen values."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Self

from space.sdk.types import Json, parse_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A receiver of the project's events. ``secret`` verifies what it gets; only the answer to its creation has it."""

    id: str
    url: str
    events: tuple[str, ...] = ()
    """What it is told of; empty: everything."""
    description: str = ""
    failures: int = 0
    """Attempts that failed in a row."""
    next_attempt_at: datetime | None = None
    given_up: int = 0
    """Events that were a day old before they could be delivered."""
    disabled: str | None = None
    """Why it is told nothing any more: ``failing`` or ``gone``."""
    created_at: datetime | None = None
    secret: str | None = field(default=None, repr=False)
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            id=data["id"],
            url=data["url"],
            events=tuple(data.get("events") or ()),
            description=data.get("description") or "",
            failures=data.get("failures") or 0,
            next_attempt_at=parse_time(data.get("next_attempt_at")),
            given_up=data.get("given_up") or 0,
            disabled=(data.get("disabled") or {}).get("reason"),
            created_at=parse_time(data.get("created_at")),
            secret=data.get("secret"),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One attempt to tell a webhook something. ``reason`` says why it failed; of an answer only the status is kept."""

    id: str
    type: str
    outcome: Literal["delivered", "failed"]
    attempt: int = 1
    reason: str | None = None
    status: int | None = None
    seconds: float = 0.0
    message_id: str = ""
    created_at: datetime | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            id=data["id"],
            type=data["type"],
            outcome=data["outcome"],
            attempt=data.get("attempt") or 1,
            reason=data.get("reason"),
            status=data.get("status"),
            seconds=data.get("seconds") or 0.0,
            message_id=data.get("message_id") or "",
            created_at=parse_time(data.get("created_at")),
            raw=data,
        )

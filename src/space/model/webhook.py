"""Webhooks: where a project's events are told, and what became of telling them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from space.model.build import OPEN, BuildState
from space.model.event import Event
from space.model.sandbox import State

DISABLED = {
    "failing": "Every delivery failed for days.",
    "gone": "The receiver answered 410: it does not want any more.",
}
"""Why a webhook is told nothing any more."""
KINDS = frozenset(
    {"sandbox", *(f"sandbox.{state}" for state in State), "snapshot"}
    | {"build", *(f"build.{state}" for state in set(BuildState) - OPEN)}
)
"""What a webhook may ask for: a kind of event, or only those of one state."""
TEST_TYPE = "webhook.test"


@dataclass(frozen=True, slots=True)
class Webhook:
    """One receiver. ``cursor`` is the number of the last event that is done with, ``failures`` counts in a row."""

    id: str
    project_id: str
    url: str
    events: tuple[str, ...]
    description: str
    cursor: int
    created_at: datetime
    failures: int = 0
    failing_since: datetime | None = None
    next_at: datetime | None = None
    """When the next attempt is due; None: at once."""
    lease_until: datetime | None = None
    """Until when somebody is delivering."""
    given_up: int = 0
    """Events that became too old before they could be delivered."""
    disabled_at: datetime | None = None
    disabled_reason: str | None = None

    def wants(self, type_of_event: str) -> bool:
        """Whether it asked for such events; without a list it asked for all."""
        kind = type_of_event.partition(".")[0]
        return not self.events or type_of_event in self.events or kind in self.events


@dataclass(frozen=True, slots=True)
class Delivery:
    """One attempt: ``delivered`` (a 2xx came), or ``failed`` with the reason."""

    id: str
    webhook_id: str
    message_id: str
    type: str
    attempt: int
    outcome: str
    reason: str | None
    status: int | None
    seconds: float
    created_at: datetime


def type_of(event: Event) -> str:
    """Return what an event is called outside: its kind, and the state it tells of."""
    state = event.data.get("state")
    return f"{event.kind}.{state}" if isinstance(state, str) else event.kind


def unknown(events: Sequence[str]) -> list[str]:
    """Return what is asked for that no event is called."""
    return [name for name in events if name not in KINDS]

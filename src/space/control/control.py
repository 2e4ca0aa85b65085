"""What the parts of the control plane share. Passed as the first argument; nothing of it is global."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from space.control.changes import Changes
from space.control.keys import Keyring
from space.control.leases import Leases
from space.control.nodes import Node
from space.control.recent import Recent
from space.control.rounds import Rounds
from space.control.tokens import Signer
from space.control.usage import History
from space.model.template import Reference, Template
from space.settings import Settings
from space.store.database import Database

# Each look is a call of the node and the broker, and anybody with a key can name templates that do not exist.
LOOK_FOR_TEMPLATES_EVERY_S = 1.0


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Control:
    """One process's control plane: store, node, signing key, and what is kept in memory beside them."""

    settings: Settings
    store: Database
    node: Node
    signer: Signer
    now: Callable[[], datetime] = utc_now
    changes: Changes = field(default_factory=Changes)
    keyring: Keyring = field(init=False)
    leases: Leases = field(init=False)
    history: History = field(default_factory=History)
    running: Recent = field(default_factory=Recent)
    looking_for_templates: Rounds = field(default_factory=lambda: Rounds(LOOK_FOR_TEMPLATES_EVERY_S))
    templates: dict[Reference, tuple[Template, float]] = field(default_factory=dict[Reference, tuple[Template, float]])

    def __post_init__(self) -> None:
        object.__setattr__(self, "keyring", Keyring(self.store, self.now))
        object.__setattr__(self, "leases", Leases(self.now))

"""What the parts of the control plane share. Passed as the first argument; nothing of it is global."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from weakref import WeakValueDictionary

from space.control.changes import Changes
from space.control.drivers import Drivers
from space.control.gateways import Gateway
from space.control.keyring import KeyStore
from space.control.keys import Keyring
from space.control.leases import Leases
from space.control.nodes import Node
from space.control.outbound import Sender
from space.control.recent import Recent
from space.control.rounds import Rounds
from space.control.telling import Telling
from space.control.tokens import Signer
from space.model.template import Reference, Resolved
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
    outbound: Sender = field(init=False)
    gateway: Gateway = field(init=False)
    telling: Telling = field(default_factory=Telling)
    key_store: KeyStore = field(init=False)
    """The keys that secrets are sealed with."""
    drivers: Drivers = field(init=False)
    token_servers: Sender = field(init=False)
    """What fetches OAuth tokens."""
    running: Recent = field(default_factory=Recent)
    looking_for_templates: Rounds = field(default_factory=lambda: Rounds(LOOK_FOR_TEMPLATES_EVERY_S))
    unsettled: set[str] = field(default_factory=set[str])
    """Sandboxes whose machine had news while an operation held them: to be looked at when it has let go."""
    deadlines_tried: dict[tuple[str, datetime | None, str], datetime] = field(
        default_factory=dict[tuple[str, datetime | None, str], datetime]
    )
    """When a deadline was acted on: which sandbox's, and how. What was in vain is not tried again at once."""
    found: Counter[str] = field(default_factory=Counter[str])
    """How many strays the comparison with the node has found so far, by kind."""
    templates: dict[tuple[str, Reference], tuple[Resolved, float]] = field(
        default_factory=dict[tuple[str, Reference], tuple[Resolved, float]]
    )
    """What references meant to projects a moment ago."""
    strays_since: dict[str, datetime] = field(default_factory=dict[str, datetime])
    """Templates that nobody is known to have released, and since when this process sees that nobody needs them."""
    opening: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary[str, asyncio.Lock])
    """Volumes for whose content a sandbox is being made, or removed."""
    looking: WeakValueDictionary[str, asyncio.Semaphore] = field(
        default_factory=WeakValueDictionary[str, asyncio.Semaphore]
    )
    """Volumes whose content programs look at."""
    registry_auth: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Credentials of builds that the node has not been told of yet. They are nowhere else."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "keyring", Keyring(self.store, self.now))
        object.__setattr__(self, "leases", Leases(self.now))
        object.__setattr__(self, "outbound", Sender(self.settings.webhook_private_hosts))
        object.__setattr__(self, "gateway", Gateway(self.settings.gateway_socket))
        object.__setattr__(self, "drivers", Drivers(self.node))
        keys = KeyStore(self.settings.api_dir / "secrets.key", self.settings.secrets_key_command)
        object.__setattr__(self, "key_store", keys)
        tokens = Sender(self.settings.egress_private_hosts, self.settings.egress_ca_file)
        object.__setattr__(self, "token_servers", tokens)

"""Ports of this node's sandboxes: which of them are exposed and to whom, and connections to them."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from typing import Any

from space.errors import Conflict, LimitExceeded, MachineLost, OutcomeUnknown
from space.node.events import Events
from space.node.machines import Machines
from space.node.ports.guest_tunnel import Tunnels
from space.node.ports.tunnel import Tunnel
from space.node.ports.waking import Wakings
from space.node.records import MachineRecords
from space.node.tokens import Grant

EXPOSED_MAX = 64
"""Ports of one sandbox."""
TRIES = 3
PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class Exposure:
    """One port that was exposed: to everybody, or to holders of tokens that carry its ``key``."""

    port: int
    public: bool
    key: str
    host: str | None
    """What its server sees as ``Host``."""


class Ports:
    """All ports. Which are exposed is kept beside what else is known of a machine, and goes with it."""

    def __init__(self, machines: Machines, records: MachineRecords, events: Events) -> None:
        self._machines = machines
        self._records = records
        self.tunnels = Tunnels()
        self.wakings = Wakings(machines, events)

    async def dial(self, sandbox: str, port: int) -> Tunnel:
        """Connect to a port of a sandbox, which is woken for that if it wakes on request.

        Raises what ``Wakings.guest`` and ``Tunnels.dial`` do.
        """
        for left in reversed(range(TRIES)):
            try:
                return await self.tunnels.dial(await self.wakings.guest(sandbox), port)
            except (Conflict, MachineLost, OutcomeUnknown) as error:
                # It fell asleep under our hands, and nothing was sent to anybody.
                if not left or (isinstance(error, Conflict) and not self._asleep(error)):
                    raise
        raise AssertionError("the last try returns or raises")

    def expose(self, sandbox: str, port: int, *, public: bool | None, host: str | None) -> Exposure:
        """Expose a port, or change how it is; None leaves what is so. Tokens for it stay good until it is hidden."""
        self._machines.known(sandbox)
        exposed = self._load(sandbox)
        known = exposed.get(port)
        if known is None and len(exposed) >= EXPOSED_MAX:
            raise LimitExceeded(f"At most {EXPOSED_MAX} ports of a sandbox can be exposed.", limit=EXPOSED_MAX)
        exposed[port] = one = Exposure(
            port=port,
            public=public if public is not None else known is not None and known.public,
            key=known.key if known is not None else secrets.token_hex(8),
            host=host if host is not None else known.host if known is not None else None,
        )
        self._save(sandbox, exposed)
        return one

    def hide(self, sandbox: str, port: int) -> None:
        """Expose a port no longer: tokens for it are void. One that is not exposed stays so."""
        self._machines.known(sandbox)
        exposed = self._load(sandbox)
        if exposed.pop(port, None) is not None:
            self._save(sandbox, exposed)

    def exposed(self, sandbox: str) -> list[Exposure]:
        self._machines.known(sandbox)
        return sorted(self._load(sandbox).values(), key=lambda one: one.port)

    def find(self, sandbox: str, port: int) -> Exposure | None:
        """Return how a port is exposed; None too when there is no such sandbox."""
        return self._load(sandbox).get(port)

    def admits(self, grant: Grant, sandbox: str, port: int, exposure: Exposure | None) -> bool:
        """Whether a token that has not expired opens a port: one for all of the sandbox, or for this port."""
        if grant.sandbox_id != sandbox or grant.command_id is not None:
            return False
        return grant.port is None or (grant.port == port and exposure is not None and grant.key == exposure.key)

    def _asleep(self, error: Conflict) -> bool:
        return error.code == "wrong-state" and error.details.get("state") == "suspending"

    def _load(self, sandbox: str) -> dict[int, Exposure]:
        kept: Any = (self._records.load(sandbox) or {}).get("ports")
        return {one["port"]: Exposure(**one) for one in kept or ()}

    def _save(self, sandbox: str, exposed: dict[int, Exposure]) -> None:
        self._records.note(sandbox, ports=[asdict(one) for one in exposed.values()])

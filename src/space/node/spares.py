"""Spares: machines of nobody yet, restored and greeted, so that somebody can have one at once."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from space.errors import InvalidRequest, MachineLost, SpaceError
from space.model.ids import new_id
from space.model.sandbox import Resources
from space.node import errands
from space.node.broker import BrokerClient
from space.node.demand import Shape
from space.node.entries import enter
from space.node.guests import Guest
from space.node.introductions import awaken, tell_in_time
from space.node.trust import Trust

if TYPE_CHECKING:
    from space.protocol.messages import Welcome

log = structlog.get_logger(__name__)

BOOT_S = 60.0
DESTROY_S = 60.0
SNAPSHOT_S = 120.0
REHEARSE_S = 10.0
HOSTNAME = "spare"
WARM_MEMORY_MIB = 64
"""The least that any sandbox may have."""
MEMORY_MIB = 40
"""What an idle machine takes of the host's memory, until it was measured."""


class Spare:
    """A machine that waits. Nothing of anybody is in it, and it is used once.

    It may ``rehearse`` what it will be asked for, because everything takes longest when it is done first: what is told
    to it then is told again when it is claimed, and what it runs leaves nothing.
    """

    def __init__(self, shape: Shape, channels: Path, gone: Callable[[Spare], None]) -> None:
        self.id = new_id("sbx")
        self.shape = shape
        self.memory_mib = MEMORY_MIB
        self.guest = Guest(self.id, channels / self.id, self)
        self._gone = gone

    async def rehearse(self) -> None:
        """Be configured and run a program, as if claimed."""
        limits = {"cpus": 1.0, "pids": Resources().pids, "memory_mib": self.shape.memory_mib}
        identity = {"hostname": HOSTNAME, "machine_id": secrets.token_hex(16), "limits": limits}
        await tell_in_time(self.guest, "configure", identity, REHEARSE_S)
        try:
            await errands.run(self.guest, {"argv": ["/bin/sh", "-c", "true"]}, REHEARSE_S)
        except InvalidRequest:
            return  # Its template has no shell.
        except TimeoutError as error:
            raise MachineLost("A program that does nothing did not end.", code="guest-unresponsive") from error

    # --- GuestOwner

    def on_welcome(self, guest: Guest, welcome: Welcome) -> None:
        """It has no commands."""

    def on_exit(self, guest: Guest, fields: dict[str, Any]) -> None:
        """It has no commands."""

    def on_lost(self, guest: Guest, cause: str) -> None:  # noqa: ARG002
        self._gone(self)


class Nursery:
    """Makes spares and ends them."""

    def __init__(self, broker: BrokerClient, channels: Path, trust: Trust) -> None:
        self._broker = broker
        self._trust = trust
        self._channels = channels
        self._unended: set[str] = set()
        """Those that nobody knows any more but the broker, as far as it has said."""
        self._ending: Counter[str] = Counter()
        """How many of each template are just being ended."""

    async def raise_spare(self, shape: Shape, snapshot: str | None, gone: Callable[[Spare], None]) -> Spare:
        """Return a spare that is up to be claimed: restored from a snapshot, or booted; how much of the host's memory
        it takes is measured. ``gone`` is told when it dies.

        Nothing is left of one that fails.
        """
        spare = Spare(shape, self._channels, gone)
        usual = Resources()
        resources = replace(
            usual,
            memory_mib=shape.memory_mib,
            cpus=shape.cpus or usual.cpus,
            disk_mib=shape.disk_mib or usual.disk_mib,
        )
        fields: dict[str, Any] = {
            "template": shape.template,
            "driver": shape.driver,
            "resources": {
                "cpus": resources.cpus,
                "memory_mib": resources.memory_mib,
                "disk_mib": resources.disk_mib,
                "pids": resources.pids,
            },
            "hostname": HOSTNAME,
            "spare": True,
        }
        if snapshot is not None:
            fields["snapshot"] = snapshot
        try:
            await self._broker.call("boot", timeout_s=BOOT_S, machine=spare.id, **fields)
            await spare.guest.greet()
            await self._trust.tell(spare.guest)
            if spare.guest.standing:
                await awaken(spare.guest)
            await spare.rehearse()
            await self._weigh(spare)
        except Exception:
            # Not when the node itself ends: the next one ends all spares, and does not wait for a broker that is gone.
            await self.end(spare)
            raise
        return spare

    async def rest(self, spare: Spare) -> None:
        """Let a spare stand still until it is claimed: a guest that does nothing takes some CPU all the same."""
        try:
            await self._broker.call("pause", timeout_s=BOOT_S, machine=spare.id)
        except Exception:
            await self.end(spare)
            raise

    async def keep_warm(self, shape: Shape, snapshot: str, defaults: dict[str, Any]) -> None:
        """Take the snapshot from which spares are restored, of a machine that is booted for this and ended after it.
        The entry in its template's ``defaults`` runs in it.
        """
        # What is restored may have more memory than this, and never less; or exactly this.
        memory_mib = shape.memory_mib if defaults.get("entry") or shape.cpus else WARM_MEMORY_MIB
        model = await self.raise_spare(replace(shape, memory_mib=memory_mib), None, lambda _: None)
        try:
            await enter(model.guest, defaults)
            await model.guest.request("quiesce")
            await self._broker.call("snapshot", timeout_s=SNAPSHOT_S, machine=model.id, snapshot=snapshot, kind="full")
        except Exception:
            await self.end(model)
            raise
        await self.end(model)

    async def _weigh(self, spare: Spare) -> None:
        seen = await self._broker.call("inspect", timeout_s=BOOT_S, machine=spare.id)
        used = (seen.get("usage") or {}).get("memory_mib")
        if isinstance(used, int | float) and used > 0:
            spare.memory_mib = max(1, round(used))

    async def end(self, spare: Spare) -> None:
        """End a spare. One that the broker does not end now is kept in mind for ``end_again``."""
        spare.guest.close(MachineLost("The spare is no longer needed."))
        self._unended.add(spare.id)
        self._ending[spare.shape.template] += 1
        try:
            await self._destroy(spare.id)
        finally:
            self._ending[spare.shape.template] -= 1

    def is_ending(self, template: str) -> bool:
        """Whether one of a template is just being ended, so that there is something of it for a moment yet."""
        return self._ending[template] > 0

    async def end_again(self) -> None:
        """End those that could not be ended before. What fails comes again."""
        for name in sorted(self._unended):
            try:
                await self._destroy(name)
            except SpaceError as error:
                log.warning("spare-not-ended", spare=name, reason=reason(error))

    async def end_all_of_before(self) -> None:
        """End the spares of a former node: what was said to them is not known."""
        for row in await self._broker.call("machines", timeout_s=BOOT_S):
            if row.get("spare") is True:
                await self._destroy(str(row["machine"]))

    async def _destroy(self, name: str) -> None:
        await self._broker.call("destroy", timeout_s=DESTROY_S, machine=name)
        self._unended.discard(name)


def reason(error: BaseException) -> str:
    """Return what to log of a failure."""
    return error.code if isinstance(error, SpaceError) else repr(error)

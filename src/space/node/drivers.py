"""Which drivers this host has, and which one machines get that name none. The broker decides, by what it has proven.

It is asked when somebody needs to know, as the proof may take seconds once, and again now and then.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any

import structlog

from space.errors import Conflict, HostError, SpaceError, Unavailable
from space.model.sandbox import Resources
from space.node.broker import BrokerClient
from space.node.demand import Shape

log = structlog.get_logger(__name__)

ASK_S = 60.0
RECALL_S = 300.0


class Drivers:
    """`wanted` is the driver that the settings name; it holds without asking."""

    def __init__(self, broker: BrokerClient, wanted: str | None) -> None:
        self._broker = broker
        self._wanted = wanted
        self._asking = asyncio.Lock()
        self._known: dict[str, Any] = {}
        self._until = 0.0

    async def default(self) -> str:
        """Return the driver of machines that name none."""
        if self._wanted:
            return self._wanted
        found = (await self.told())["default"]
        if found is None:
            raise Unavailable("No driver works on this host: `space doctor` says why.", code="no-driver")
        return str(found)

    async def for_builds(self, named: str | None) -> str:
        """Return the driver of a machine that is to be a template, which may be `named`. Raise `Conflict` when no
        template can be made of that one's machines, or of any.
        """
        return await self._able(
            "builds",
            named,
            "No template can be made of a virtual machine's disk: build with the gvisor driver, it starts on all.",
        )

    async def for_volumes(self, named: str | None) -> str:
        """Return the driver of a machine that is to mount volumes, which may be `named`. Raise `Conflict` when that
        one's machines cannot, or none's.
        """
        return await self._able(
            "volumes",
            named,
            "No volume can be mounted in a virtual machine. Use the gvisor driver, or leave the volumes out.",
        )

    async def _able(self, what: str, named: str | None, otherwise: str) -> str:
        """Return the driver that is `named`, else the default, else the strongest whose machines can do that."""
        usable = [one["name"] for one in (await self.told())["drivers"] if one.get(what) and one.get("usable")]
        wanted = named or await self.default()
        if wanted in usable:
            return wanted
        if named or not usable:
            raise Conflict(otherwise, code="not-supported", driver=wanted)
        return str(usable[0])

    async def shape(self, template: str, driver: str, resources: Mapping[str, Any]) -> Shape:
        """Return what a spare must be like to become a machine with these resources."""
        memory_mib = int(resources.get("memory_mib") or 0)
        told = (await self.told())["drivers"]
        if not any(one["name"] == driver and one.get("keeps_hardware") for one in told):
            return Shape(template, driver, memory_mib)
        usual = Resources()
        cpus, disk_mib = resources.get("cpus") or usual.cpus, resources.get("disk_mib") or usual.disk_mib
        return Shape(template, driver, memory_mib, math.ceil(cpus), int(disk_mib))

    async def told(self) -> dict[str, Any]:
        """Return `{default, drivers: [{name, usable, reason, builds, keeps_hardware, volumes}]}`.

        What was known holds while nothing answers.
        """
        async with self._asking:
            if time.monotonic() < self._until:
                return self._known
            try:
                self._known = _checked(await self._broker.call("drivers", timeout_s=ASK_S))
            except SpaceError as error:
                if not self._known:
                    raise
                log.warning("drivers-not-asked", code=error.code)
            self._until = time.monotonic() + RECALL_S
            return self._known


def _checked(answer: Any) -> dict[str, Any]:
    match answer:
        case {"default": str() | None, "drivers": list()}:
            return answer
        case _:
            raise HostError("The broker's answer tells of no drivers.")

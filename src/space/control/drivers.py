"""Which drivers there are for new sandboxes: what the node says, remembered for a moment."""

import time
from typing import Any, cast

import structlog

from space.control.nodes import Node
from space.errors import Conflict, InvalidRequest, SpaceError

log = structlog.get_logger(__name__)

REMEMBER_S = 10.0


class Drivers:
    """What `node` says of its drivers."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._known: dict[str, bool] = {}
        """Which there are, and whether their machines can mount volumes."""
        self._until = 0.0

    async def check(self, name: str, *, volumes: bool = False) -> None:
        """Raise ``InvalidRequest`` when no sandbox can have that driver here, and ``Conflict`` when it cannot mount
        volumes although it is to.

        A node that does not answer now is left to say so itself, once it is asked for the machine.
        """
        if time.monotonic() >= self._until:
            try:
                self._known = _names(await self._node.drivers())
            except SpaceError as error:
                log.warning("drivers-not-asked", code=error.code)
                return
            self._until = time.monotonic() + REMEMBER_S
        if name not in self._known:
            raise no_such_driver(name, tuple(self._known))
        if volumes and not self._known[name]:
            raise Conflict(
                f"A sandbox of the driver {name} cannot mount volumes. Leave out the driver, or the volumes.",
                code="not-supported",
                driver=name,
            )


def no_such_driver(name: str, known: tuple[str, ...]) -> InvalidRequest:
    """Return the error for a driver that no host has."""
    return InvalidRequest(
        f"There is no host with the driver {name}: there are {', '.join(known) or 'none'}. Leave `driver` out for the "
        "strongest that works; `space doctor` tells the operator what another one needs.",
        code="no-such-driver",
        field="driver",
        drivers=list(known),
    )


def _names(answer: dict[str, Any]) -> dict[str, bool]:
    drivers = answer.get("drivers")
    rows = cast("list[Any]", drivers) if isinstance(drivers, list) else []
    return {str(row["name"]): row.get("volumes") is True for row in rows if isinstance(row, dict) and "name" in row}

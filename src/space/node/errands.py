"""Programs that the node runs in a guest for itself: nobody can see or attach to them, what they print is dropped."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from space.errors import MachineLost, SpaceError
from space.model.ids import new_id

if TYPE_CHECKING:
    from space.node.guests import Guest


class Errand:
    """Reads a program's output away."""

    def on_data(self, number: int, offset: int, data: bytes) -> None:
        """Nobody reads it."""

    def on_end(self, number: int, length: int) -> None:
        """The exit follows."""

    def on_reset(self, number: int, error: SpaceError) -> None:
        """The exit follows, or the guest is lost."""

    def on_room(self, number: int, acked: int) -> None:
        """Nothing is sent."""


async def run(guest: Guest, program: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run a program (``argv``, and ``env``, ``cwd``, ``user`` where they matter) to its end; return its exit.

    Raise what starting it met (`InvalidRequest` where there is no such program), `MachineLost` when the guest is lost,
    and `TimeoutError` when the program does not end: then it is left running, so give it a time of its own.
    """
    command = new_id("cmd")
    ended: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    numbers = _listen(guest)
    guest.errands[command] = ended
    try:
        await guest.request("start", {**program, "id": command, "timeout_s": timeout_s, "streams": numbers})
        async with asyncio.timeout(timeout_s + 1):
            fields = await ended
        await guest.request("forget", {"id": command})
    finally:
        del guest.errands[command]
        for number in numbers.values():
            guest.drop(number)
    return fields


async def leave_running(guest: Guest, program: dict[str, Any]) -> None:
    """Start a program that lives on and is nobody's command."""
    if not guest.connected:
        raise MachineLost("The guest is not there.", code="guest-unresponsive")
    numbers = _listen(guest)
    try:
        await guest.request("start", {**program, "id": new_id("cmd"), "detached": True, "streams": numbers})
    finally:
        for number in numbers.values():
            guest.drop(number)


def _listen(guest: Guest) -> dict[str, int]:
    numbers = {name: guest.new_number() for name in ("stdout", "stderr")}
    for number in numbers.values():
        guest.receive(number, Errand(), durable=True)
    return numbers

"""Routes of the api alone: volumes, which the broker makes and drops."""

from __future__ import annotations

from space.errors import NotFound
from space.model.ids import is_id
from space.node.adoption import rows
from space.node.call import Call
from space.node.parse import invalid

ASK_S = 30.0
CHANGE_S = 60.0


async def list_all(call: Call) -> None:
    found = rows(await call.node.broker.call("volumes", timeout_s=ASK_S), "volumes")
    await call.answer({"volumes": found})


async def make(call: Call) -> None:
    """Make a volume of so many MiB; one that is there stays as it is."""
    size_mib = (await call.json()).get("size_mib")
    if type(size_mib) is not int or size_mib < 1:
        raise invalid("size_mib", "must be a number of MiB")
    await call.node.broker.call("make-volume", timeout_s=CHANGE_S, volume=_volume(call), size_mib=size_mib)
    await call.answer({})


async def drop(call: Call) -> None:
    """Leave nothing of a volume. One that is not there: success; one that a machine mounts: refused."""
    await call.node.broker.call("drop-volume", timeout_s=CHANGE_S, volume=_volume(call))
    await call.answer({})


def _volume(call: Call) -> str:
    volume = call.params["volume"]
    if not is_id("vol", volume):
        raise NotFound("There is no such volume on this node.", code="volume-not-found")
    return volume

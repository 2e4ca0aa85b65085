"""The verbs about volumes: directories of the disk store that machines mount, each of its own size."""

from typing import Any

from space.broker.host import Timings
from space.broker.machines import Machines
from space.broker.requests import MakeVolume, OfVolume
from space.errors import Conflict


async def carry_out(machines: Machines, request: MakeVolume | OfVolume) -> dict[str, Any]:
    """Make a volume, or leave nothing of one that no machine mounts. Asked again: no-op."""
    timings, disks = Timings(), machines.host.disks
    if isinstance(request, MakeVolume):
        await timings.of("make", disks.make_volume(request.volume, request.size_mib))
    else:
        # A machine is in the entries before it looks for its volumes, and nothing is awaited between this and the
        # deletion, after whose first moment it finds none.
        _check_unused(machines, request.volume)
        await timings.of("drop", disks.delete_volume(request.volume))
    return {"timings": timings}


def not_supported(driver: str) -> Conflict:
    return Conflict(
        "No volume can be mounted in a virtual machine. Use the gvisor driver, or leave the volumes out.",
        code="not-supported",
        driver=driver,
    )


def not_mounted() -> Conflict:
    return Conflict(
        "The machine did not start with its volumes. Most likely there is a file, and no directory, where one of them"
        " is to be: mount it elsewhere.",
        code="volume-not-mounted",
    )


def changed() -> Conflict:
    return Conflict(
        "The sandbox's memory could not be brought back. It mounts volumes: most likely a file there that one of its"
        " processes had open was changed or deleted meanwhile. `start` boots it afresh on its disk.",
        code="volume-changed",
    )


def _check_unused(machines: Machines, volume: str) -> None:
    users = [entry.machine for entry in machines.entries.values() if any(one.volume == volume for one in entry.volumes)]
    # What cannot be read may mount it.
    if users or machines.damaged:
        raise Conflict(
            "Machines mount that volume.",
            code="volume-in-use",
            volume=volume,
            machines=len(users) + len(machines.damaged),
        )

"""Writing a machine's memory image so that it is either whole, synced and verified under its name, or not there."""

import asyncio
import errno
import os
from pathlib import Path

from space.broker.host import Host, Timings
from space.broker.journal import Entry
from space.drivers.base import Driver, Need
from space.errors import HostFull

MARGIN_MIB = 64
_MIB = 1 << 20


def check_room(host: Host, machine_id: str) -> None:
    """Raise `HostFull` when the image, as large as the machine's memory is now, would not fit."""
    found = os.statvfs(host.snapshots)
    needed = int(host.cgroups.usage(machine_id).memory_mib) + MARGIN_MIB
    free = found.f_bavail * found.f_frsize // _MIB
    if free < needed:
        raise HostFull(
            "There is no room for the machine's memory image.",
            code="snapshot-store-full",
            needed_mib=needed,
            free_mib=free,
        )


async def write(host: Host, driver: Driver, entry: Entry, timings: Timings) -> None:
    """Pause the machine in the driver's own way and write its image. The machine stays paused like that."""
    try:
        await _write(host, driver, entry, timings)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise HostFull("There is no room for the machine's memory image.", code="snapshot-store-full") from error


async def _write(host: Host, driver: Driver, entry: Entry, timings: Timings) -> None:
    working = host.unfinished_image(entry.machine)
    await host.drop_image(entry.machine)
    working.mkdir(mode=0o700)
    if entry.was_paused:
        await host.resume(entry.machine, driver)
    await timings.of("pause", driver.pause(entry.machine))
    await timings.of("checkpoint", driver.checkpoint(entry.machine, working))
    # Memory and disk belong together: the guest goes on from both or from neither.
    syncing = [asyncio.to_thread(_sync_tree, working)]
    if Need.DISK in driver.capabilities.needs:
        syncing.append(host.disks.sync(entry.machine))
    await timings.of("sync", asyncio.gather(*syncing))
    await driver.check_image(working)
    working.rename(host.image(entry.machine))
    await asyncio.to_thread(_sync, host.snapshots)


def _sync_tree(directory: Path) -> None:
    for path in directory.iterdir():
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

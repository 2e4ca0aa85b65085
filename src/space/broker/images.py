"""Writing a machine's memory image so that it is either whole, synced and verified under its name, or not there."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Generator
from contextlib import contextmanager

from space.broker.files import sync_tree
from space.broker.host import Host, Timings
from space.broker.journal import Entry
from space.drivers.base import Driver
from space.errors import HostFull

MARGIN_MIB, MARGIN_MIB_MAX = 64, 1024
"""What images leave free, so that commands still have room for their output: a sixteenth, within these bounds."""
_MIB = 1 << 20


def check_room(host: Host, body: str) -> None:
    """Raise `HostFull` when the image, as large as the machine's memory is now, would not fit."""
    found = os.statvfs(host.images)
    margin = min(max(MARGIN_MIB, found.f_blocks * found.f_frsize // 16 // _MIB), MARGIN_MIB_MAX)
    needed = int(host.cgroups.usage(body).memory_mib) + margin
    free = found.f_bavail * found.f_frsize // _MIB
    if free < needed:
        raise HostFull(
            "There is no room for the machine's memory image.",
            code="snapshot-store-full",
            needed_mib=needed,
            free_mib=free,
        )


async def write(host: Host, driver: Driver, entry: Entry, timings: Timings, spare_mib: int) -> None:
    """Write the image that the machine is to be woken from. It stands still afterwards as it is in there."""
    working = host.unfinished_image(entry.body)
    with full_told():
        await host.drop_image(entry.body)
        working.mkdir(mode=0o700)
        if entry.was_paused:
            await host.resume(entry.body, driver)
        with host.room_to_write(entry, driver, spare_mib):
            await timings.of("checkpoint", driver.checkpoint(entry.body, working))
        saved = asyncio.to_thread(sync_tree, working)
        await timings.of("sync", both(saved, _still_and_synced(host, driver, entry)))
        await driver.check_image(working)
        working.rename(host.image(entry.body))


async def _still_and_synced(host: Host, driver: Driver, entry: Entry) -> None:
    """Memory and disk belong together: the guest goes on from both or from neither."""
    await host.pause(entry.body, driver)
    if store := host.store(driver):
        await store.sync(entry.body)


async def both(one: Awaitable[None], other: Awaitable[None]) -> None:
    """Wait for both, whatever happens to one, so that nothing goes on behind the back of an undo."""
    for result in await asyncio.gather(one, other, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


@contextmanager
def full_told() -> Generator[None]:
    """Let what fails for want of room say so in our words."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise HostFull("There is no room for the machine's memory image.", code="snapshot-store-full") from error

"""What one machine needs of the host, acquired and released as a whole: disk, link, cgroup and channel."""

import asyncio
import grp
import pwd
import shutil
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from space.broker.cgroups import Cgroups
from space.broker.channels import Channels
from space.broker.journal import Entry
from space.broker.links import Links
from space.broker.locks import exclusive
from space.broker.rootfs import Disks, open_disks
from space.broker.templates import Templates
from space.drivers import processes
from space.drivers.base import Driver, Machine, MachineState, Need
from space.errors import HostError
from space.settings import Settings

T = TypeVar("T")
STORE_S = 60.0


class Timings(dict[str, float]):
    """Seconds by phase."""

    async def of(self, phase: str, work: Awaitable[T]) -> T:
        began = time.perf_counter()
        try:
            return await work
        finally:
            self[phase] = round(time.perf_counter() - began, 4)


@dataclass(frozen=True, slots=True)
class Account:
    """The node's user."""

    uid: int
    gid: int


def node_account(settings: Settings) -> Account:
    try:
        user = pwd.getpwnam(settings.node_user)
    except KeyError:
        raise HostError(
            "The node's system user does not exist.", code="no-such-user", user=settings.node_user
        ) from None
    return Account(user.pw_uid, grp.getgrgid(user.pw_gid).gr_gid)


class Host:
    """The host's resources of one installation."""

    def __init__(self, settings: Settings, account: Account, needs: frozenset[Need]) -> None:
        self._needs = needs
        self._directory = settings.broker_dir
        self.disks: Disks = open_disks(settings)
        self.templates = Templates(settings.broker_dir / "templates", self.disks)
        self.links = Links(settings.instance)
        self.cgroups = Cgroups(settings.instance)
        self.channels = Channels(settings.channels_dir, account.uid, account.gid)
        self.snapshots = settings.broker_dir / "snapshots"

    async def open(self, links_used: set[int]) -> None:
        """Make everything ready that any driver of this installation needs."""
        self.snapshots.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.channels.open()
        if Need.DISK in self._needs:
            await self.open_store()
        await self.templates.open()
        if Need.LINK in self._needs:
            await self.links.open(links_used)

    async def open_store(self) -> None:
        """Make or find the disk store; an import may be doing the same."""
        async with exclusive(self._directory / "store.lock", wait_s=STORE_S, busy="The disk store is being set up."):
            await self.disks.open()

    async def acquire(self, entry: Entry, driver: Driver, timings: Timings, *, new_disk: bool) -> Machine:
        """Make what the entry's machine needs, side by side. Repeatable; `release` undoes it, also half-done."""
        needs = driver.capabilities.needs
        groups = await timings.of("cgroup", self._cgroup(entry, driver)) if Need.CGROUP in needs else ()
        root, netns = await _all(
            timings.of("disk", self._disk(entry, new=new_disk)) if Need.DISK in needs else _nothing(),
            timings.of("link", self._link(entry)) if Need.LINK in needs else _nothing(),
        )
        return Machine(entry.machine, entry.hostname, entry.resources, root, netns, groups)

    async def release(self, entry: Entry, driver: Driver | None) -> None:
        """End the machine's processes and give back everything but the disk and the memory image."""
        self.channels.remove(entry.machine)
        await _all(self._end_processes(entry, driver), self.links.delete(entry.machine, entry.link))
        if entry.link is not None:
            self.links.free(entry.link)
        if driver is None or Need.DISK in driver.capabilities.needs:
            await self.disks.detach(entry.machine)

    async def erase(self, entry: Entry, driver: Driver | None) -> None:
        """Release, and remove disk and image, too: nothing is left."""
        await self.release(entry, driver)
        if driver is None or Need.DISK in driver.capabilities.needs:
            await self.disks.delete(entry.machine)
        await self.drop_image(entry.machine)

    async def pause(self, machine_id: str, driver: Driver) -> None:
        """Stop the machine's CPUs: by its cgroup, which is quick and survives a crash, else by the driver."""
        if self._freezes(driver):
            await self.cgroups.freeze(machine_id, still=True)
        else:
            await driver.pause(machine_id)

    async def resume(self, machine_id: str, driver: Driver) -> None:
        """Let a machine that `pause` stopped go on."""
        if self._freezes(driver):
            await self.cgroups.freeze(machine_id, still=False)
        else:
            await driver.resume(machine_id)

    async def is_paused(self, entry: Entry, driver: Driver) -> bool | None:
        """Whether the machine stands still; None when there is no machine. A frozen one would not answer its driver."""
        if entry.process is None or not processes.is_alive(entry.process):
            return None
        if self._freezes(driver):
            return self.cgroups.is_frozen(entry.machine)
        seen = (await driver.inspect(entry.machine)).state
        return None if seen is MachineState.ABSENT else seen is MachineState.PAUSED

    def _freezes(self, driver: Driver) -> bool:
        return Need.CGROUP in driver.capabilities.needs and self.cgroups.can_freeze()

    def image(self, machine_id: str) -> Path:
        return self.snapshots / machine_id

    def unfinished_image(self, machine_id: str) -> Path:
        return self.snapshots / f"{machine_id}.tmp"

    async def drop_image(self, machine_id: str) -> None:
        for path in (self.image(machine_id), self.unfinished_image(machine_id)):
            if path.exists():
                await asyncio.to_thread(shutil.rmtree, path)

    async def _end_processes(self, entry: Entry, driver: Driver | None) -> None:
        if driver:
            if self._freezes(driver):
                # With version 1, what is frozen does not even die.
                await self.cgroups.freeze(entry.machine, still=False)
            await driver.destroy(entry.machine, entry.process)
        await self.cgroups.remove(entry.machine)

    async def _disk(self, entry: Entry, *, new: bool) -> Path:
        if not new:
            return await self.disks.attach(entry.machine)
        template = self.templates.get(entry.template)
        root = self.templates.root(template)
        return await self.disks.create(entry.machine, root, template.bytes, entry.resources.disk_mib)

    async def _link(self, entry: Entry) -> Path:
        if entry.link is None:
            raise HostError("The machine has no link reserved.")
        return await self.links.create(entry.machine, entry.link)

    async def _cgroup(self, entry: Entry, driver: Driver) -> tuple[Path, ...]:
        return self.cgroups.create(entry.machine, driver.limits(entry.resources))


async def _nothing() -> None:
    return None


async def _all(*works: Awaitable[T]) -> list[T]:
    """Wait for all of them, whatever happens to one, so that nothing goes on behind the back of an undo; raise the
    first error.
    """
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]

"""What one machine needs of the host, acquired and released as a whole: disk, link, cgroup and channel."""

import asyncio
import grp
import pwd
import shutil
import time
from collections.abc import Awaitable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from space.broker.blocks import BlockDisks
from space.broker.cgroups import Cgroups
from space.broker.channels import Channels
from space.broker.figures import note_phase
from space.broker.journal import Entry
from space.broker.links import Links
from space.broker.locks import exclusive
from space.broker.quotas import OVER_MAX, Origin
from space.broker.rootfs import Disks, MachineDisks, open_disks
from space.broker.snapshots import Snapshot, Snapshots
from space.broker.templates import PREFIX, Templates
from space.drivers import processes
from space.drivers.base import Blocks, Driver, Machine, MachineState, Need, Shared
from space.errors import HostError, InvalidRequest
from space.model.sandbox import Resources
from space.settings import Settings

T = TypeVar("T")
STORE_S = 60.0
WRITING_TIMES = 8
"""How many times its usual limit a machine may use beyond that while its memory is written."""
_MIB = 1 << 20


class Timings(dict[str, float]):
    """Seconds by phase."""

    async def of(self, phase: str, work: Awaitable[T]) -> T:
        began, began_ns = time.perf_counter(), time.time_ns()
        try:
            return await work
        finally:
            self[phase] = round(time.perf_counter() - began, 4)
            note_phase(phase, began_ns, time.time_ns())


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
        self.blocks = BlockDisks(settings.broker_dir / "disks" / "blocks")
        self._stores: dict[Need, MachineDisks] = {
            need: store for need, store in ((Need.DISK, self.disks), (Need.BLOCKS, self.blocks)) if need in needs
        }
        self.templates = Templates(settings.broker_dir / "templates", self.disks)
        self.links = Links(settings)
        self.cgroups = Cgroups(settings.instance)
        self.channels = Channels(settings.channels_dir, account.uid, account.gid)
        self.images = settings.broker_dir / "snapshots"
        self.snapshots = Snapshots(self.images, self.stores)

    async def open(self, links_used: set[int]) -> None:
        """Make everything ready that any driver of this installation needs."""
        self.images.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.channels.open()
        if self.stores:
            await self.open_store()
        await self.templates.open()
        if self.stores:
            await self.templates.make_scratch()
        if Need.LINK in self._needs:
            await self.links.open(links_used)

    async def open_store(self) -> None:
        """Make or find the disk store; an import may be doing the same."""
        async with exclusive(self._directory / "store.lock", wait_s=STORE_S, busy="The disk store is being set up."):
            await self.disks.open()
            await self.blocks.open()

    async def close_store(self) -> None:
        """Leave nothing of the disk store on the running host. No machine may run."""
        await self.blocks.close()
        await self.disks.close()

    @property
    def stores(self) -> tuple[MachineDisks, ...]:
        """The stores of disks that drivers of this installation need; one of templates is there if any is."""
        return tuple(self._stores.values())

    async def sweep_images(self) -> None:
        """Remove images for machines with their own kernel that are of no template any more."""
        for hexdigest in self.blocks.known_templates() - self.templates.recorded():
            await self.blocks.delete_template(hexdigest)

    def store(self, driver: Driver) -> MachineDisks | None:
        """Return where the disks of a driver's machines are, if they have any."""
        return next((store for need, store in self._stores.items() if need in driver.capabilities.needs), None)

    async def acquire(self, entry: Entry, driver: Driver, timings: Timings, *, new_disk: bool) -> Machine:
        """Make what the entry's machine needs, side by side. Repeatable; `release` undoes it, also half-done."""
        needs = driver.capabilities.needs
        groups = await timings.of("cgroup", self._cgroup(entry, driver)) if Need.CGROUP in needs else ()
        disk, netns = await _all(
            timings.of("disk", self._disk(entry, store, new=new_disk)) if (store := self.store(driver)) else _nothing(),
            timings.of("link", self.link(entry)) if Need.LINK in needs else _nothing(),
        )
        machine = Machine(entry.body, entry.hostname, entry.resources, None, netns, groups, shared=self._shared(entry))
        if disk is None or Need.BLOCKS not in needs:
            return replace(machine, root=disk)
        tree = self.disks.template(entry.template.removeprefix(PREFIX))
        image = await timings.of("image", self.blocks.template(tree))
        return replace(machine, blocks=Blocks(image, disk))

    async def release(self, entry: Entry, driver: Driver | None) -> None:
        """End the machine's processes and give back everything but the disk and the memory image."""
        self.channels.remove(entry.body)
        await _all(self.end_processes(entry, driver), self.links.delete(entry.body, entry.link))
        for store in self._stores_of(driver):
            await store.detach(entry.body)

    async def erase(self, entry: Entry, driver: Driver | None) -> None:
        """Release, and remove disk and image, too: nothing is left."""
        await self.release(entry, driver)
        for store in self._stores_of(driver):
            await store.delete(entry.body)
        await self.drop_image(entry.body)

    async def end_processes(self, entry: Entry, driver: Driver | None) -> None:
        """Kill the machine, and whatever is in its cgroup."""
        if driver:
            await self.strike(entry, driver)
            await driver.destroy(entry.body, entry.process)
        await self.cgroups.remove(entry.body)

    async def strike(self, entry: Entry, driver: Driver) -> None:
        """See to it that the machine never moves again; `end_processes` waits until it is gone."""
        if not self._freezes(driver):
            await driver.destroy(entry.body, entry.process)
            return
        if entry.process:
            processes.send_kill(entry.process)
        # With version 1, what is frozen does not even die.
        await self.cgroups.freeze(entry.body, still=False)

    async def link(self, entry: Entry, former: Sequence[int] = ()) -> Path:
        """Make the machine's link, with the addresses of former ones where the image needs them; say whose it is."""
        if entry.link is None:
            raise HostError("The machine has no link reserved.")
        netns = await self.links.create(entry.body, entry.link, former)
        self.links.enter(entry.link, entry.machine)
        return netns

    async def limit(self, entry: Entry, driver: Driver, resources: Resources) -> None:
        """Give a machine that runs other limits than it was made with. Repeatable."""
        needs = driver.capabilities.needs
        if (store := self.store(driver)) and resources.disk_mib != entry.resources.disk_mib:
            await store.limit(entry.body, self.template_bytes(entry), resources.disk_mib)
        if Need.CGROUP in needs:
            self.cgroups.create(entry.body, driver.limits(resources))

    @contextmanager
    def room_to_write(self, entry: Entry, driver: Driver, spare_mib: int) -> Generator[None]:
        """While the block writes the machine's memory, let it use up to so much more.

        A sentry copies what its kernel holds to write it, socket buffers as several times their size. The guest stands
        still meanwhile. What the machine does not give back at once it keeps until `settle_memory`.
        """
        usual = driver.limits(entry.resources).memory_mib
        if Need.CGROUP in driver.capabilities.needs:
            self.cgroups.limit_memory(entry.body, usual + min(spare_mib, usual * WRITING_TIMES))
        try:
            yield
        finally:
            self.settle_memory(entry, driver)

    def settle_memory(self, entry: Entry, driver: Driver) -> bool:
        """Hold the machine to its usual limit again; False while it uses more."""
        if Need.CGROUP not in driver.capabilities.needs:
            return True
        return self.cgroups.limit_memory(entry.body, driver.limits(entry.resources).memory_mib)

    async def pause(self, body: str, driver: Driver) -> None:
        """Stop the machine's CPUs: by its cgroup, which is quick and survives a crash, else by the driver."""
        if self._freezes(driver):
            await self.cgroups.freeze(body, still=True)
        else:
            await driver.pause(body)

    async def resume(self, body: str, driver: Driver) -> None:
        """Let a machine that `pause` stopped go on."""
        if self._freezes(driver):
            await self.cgroups.freeze(body, still=False)
        else:
            await driver.resume(body)

    async def is_paused(self, entry: Entry, driver: Driver) -> bool | None:
        """Whether the machine stands still; None when there is no machine. A frozen one would not answer its driver."""
        if entry.process is None or not processes.is_alive(entry.process):
            return None
        if self._freezes(driver):
            return self.cgroups.is_frozen(entry.body)
        seen = (await driver.inspect(entry.body)).state
        return None if seen is MachineState.ABSENT else seen is MachineState.PAUSED

    def _freezes(self, driver: Driver) -> bool:
        capabilities = driver.capabilities
        return (
            Need.CGROUP in capabilities.needs and not capabilities.stands_after_checkpoint and self.cgroups.can_freeze()
        )

    def image(self, body: str) -> Path:
        return self.images / body

    def unfinished_image(self, body: str) -> Path:
        return self.images / f"{body}.tmp"

    async def drop_image(self, body: str) -> None:
        for path in (self.image(body), self.unfinished_image(body)):
            if path.exists():
                await asyncio.to_thread(shutil.rmtree, path)

    async def _disk(self, entry: Entry, store: MachineDisks, *, new: bool) -> Path:
        if not new:
            return await store.attach(entry.body)
        if entry.snapshot is None:
            template = self.templates.get(entry.template)
            origin = Origin(self.templates.root(template), template.bytes)
        else:
            snapshot = self.snapshots.get(entry.snapshot)
            in_use = snapshot.kind == "full"
            origin = Origin(store.saved(entry.snapshot), snapshot.template_bytes, snapshot.disk_bytes, in_use)
            check_disk(snapshot, entry.resources)
        return await store.create(entry.body, origin, entry.resources.disk_mib)

    def _shared(self, entry: Entry) -> tuple[Shared, ...]:
        return tuple(Shared(self.disks.volume(one.volume), one.path) for one in entry.volumes)

    def _stores_of(self, driver: Driver | None) -> tuple[MachineDisks, ...]:
        """Return where a machine may have a disk; of a driver that is no more, anywhere."""
        if driver is None:
            return self.stores
        return (store,) if (store := self.store(driver)) else ()

    def template_bytes(self, entry: Entry) -> int:
        """Return the bytes that the machine's disk has begun with and that are not counted as the guest's."""
        if entry.template_bytes is not None:
            return entry.template_bytes
        return self.templates.get(entry.template).bytes

    async def _cgroup(self, entry: Entry, driver: Driver) -> tuple[Path, ...]:
        return self.cgroups.create(entry.body, driver.limits(entry.resources))


def check_disk(snapshot: Snapshot, resources: Resources) -> None:
    """Raise `InvalidRequest` when a disk of that size could not even hold what the snapshot has beyond its template."""
    if resources.disk_mib * _MIB + OVER_MAX < snapshot.disk_bytes:
        raise InvalidRequest(
            "The disk is too small for what the snapshot holds.",
            field="resources.disk_mib",
            min=-(-snapshot.disk_bytes // _MIB),
        )


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

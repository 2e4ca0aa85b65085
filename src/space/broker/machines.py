"""All machines of one installation: what is known of each, its lock, its process, and how it is brought to rest.

The verbs are in `lifecycle.py`, `keeping.py` and `spares.py`. Each of them: check the phase, announce the step in the
journal, act, write down where the machine rests now. One lock per machine; verbs on different ones run side by side.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

import structlog

from space import tracing
from space.broker.admission import Admission
from space.broker.choice import no_such_driver
from space.broker.host import Host
from space.broker.journal import FORMER_LINKS_MAX, RESIDENT, Entry, Journal, Phase
from space.drivers import processes
from space.drivers.base import Driver, Need
from space.drivers.processes import Process
from space.errors import Conflict, HostFull, MachineLost, NotFound, Unavailable
from space.settings import Settings

VERB_S = {"suspend": 900.0, "snapshot": 900.0, "wake": 300.0}
VERB_S_DEFAULT = 120.0
UNDO_S = 60.0
OOM_S = 10.0
"""How long a machine that the kernel kills for want of memory may still be seen alive. On a busy host its memory takes
seconds to be given back.
"""

log = structlog.get_logger()


class Machines:
    """All machines of one installation. Use within ``async with tasks`` of the group given."""

    def __init__(
        self, settings: Settings, drivers: Mapping[str, Driver], host: Host, journal: Journal, tasks: asyncio.TaskGroup
    ) -> None:
        self.settings = settings
        self.drivers = drivers
        self._tasks = tasks
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._watches: dict[str, Any] = {}
        self._unreleased: set[str] = set()
        """Bodies of machines at rest whose link, cgroup and channel are still to be given back."""
        self.stalled: set[str] = set()
        """Bodies of machines that stand still for want of room on the host's disk; see `stalls`."""
        self.oom_kills_seen: dict[str, tuple[int, float]] = {}
        self.admission = Admission(settings)
        self.host = host
        self.journal = journal
        self.entries: dict[str, Entry] = {}
        self.damaged: frozenset[str] = frozenset()
        self.images_going: set[str] = set()
        """Bodies whose image is about to be removed: no strays."""
        """Bodies whose journal cannot be read: what belongs to them is left alone."""

    @asynccontextmanager
    async def locked(self, name: str, timeout_s: float) -> AsyncGenerator[None]:
        """Hold the lock of a machine or snapshot; all under it ends within `timeout_s`, the waiting included."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s), lock:
                yield
        except TimeoutError as error:
            raise Unavailable(
                f"That took longer than {timeout_s:g} s and was given up.", code="broker-timeout"
            ) from error

    def is_locked(self, name: str) -> bool:
        """Whether a request about it is under way."""
        lock = self._locks.get(name)
        return lock is not None and lock.locked()

    def driver(self, name: str) -> Driver:
        try:
            return self.drivers[name]
        except KeyError:
            raise no_such_driver(self.drivers) from None

    def entry(self, machine_id: str) -> Entry:
        try:
            return self.entries[machine_id]
        except KeyError:
            raise NotFound("There is no such machine.", machine=machine_id) from None

    def of_body(self, body: str) -> Entry | None:
        return next((entry for entry in self.entries.values() if entry.body == body), None)

    def write(self, entry: Entry, *, durable: bool = True) -> None:
        """Journal the entry, then believe it."""
        self.journal.write(entry, durable=durable)
        self.entries[entry.machine] = entry

    def watch(self, body: str, process: Process) -> None:
        """See to it that the end of the machine's process is written down and its resources are given back."""
        self.unwatch(body)
        pidfd = processes.open_process(process)
        if pidfd is None:
            self._ended(body, process)
        else:
            self._watches[body] = processes.on_end(pidfd, lambda: self._ended(body, process))

    def unwatch(self, body: str) -> None:
        if stop := self._watches.pop(body, None):
            stop()

    def unwatch_all(self) -> None:
        for body in list(self._watches):
            self.unwatch(body)

    async def reserve(self, driver: Driver) -> int | None:
        """Return a link that no machine has, if need be one that was kept for a machine that is suspended."""
        if Need.LINK not in driver.capabilities.needs:
            return None
        try:
            return await self.host.links.reserve()
        except HostFull:
            kept = (one for one in self.entries.values() if one.phase is Phase.SUSPENDED and one.link is not None)
            sleeper = next(
                (one for one in kept if not (self.is_locked(one.machine) or self.is_unreleased(one.body))), None
            )
            if sleeper is None or sleeper.link is None:
                raise
            former = (sleeper.link, *sleeper.former_links)[:FORMER_LINKS_MAX]
            self.write(sleeper.to(Phase.SUSPENDED, link=None, former_links=former))
            self._free_link(sleeper)
            return await self.host.links.reserve()

    async def erase(self, machine_id: str) -> None:
        """Destroy under the lock held. Each step is repeatable; a failure leaves the journal saying what remains to
        be done.
        """
        entry = self.entries[machine_id]
        self.write(entry.to(Phase.DESTROYING))
        self.unwatch(entry.body)
        await self.host.erase(entry, self.drivers.get(entry.driver))
        self._free_link(entry)
        self.journal.remove(entry.body)
        self.oom_kills_seen.pop(entry.body, None)
        self._unreleased.discard(entry.body)
        del self.entries[machine_id]

    async def rest_without_process(self, entry: Entry, phase: Phase, cause: str | None = None) -> None:
        """End whatever runs, give back all but disk and image, and rest in `phase`."""
        self.unwatch(entry.body)
        await self.host.release(entry, self.drivers.get(entry.driver))
        self._unreleased.discard(entry.body)
        self.oom_kills_seen.pop(entry.body, None)
        # What is to be woken keeps its addresses: sockets in its memory have them.
        link = entry.link if phase is Phase.SUSPENDED else None
        self.write(entry.to(phase, link=link, process=None, cause=cause, was_paused=False))
        if link is None:
            self._free_link(entry)

    async def finish_suspend(self, entry: Entry) -> None:
        """The image is whole: kill the machine. What it has of the host beside its disk is given back afterwards."""
        self.unwatch(entry.body)
        await self.host.strike(entry, self.driver(entry.driver))
        self._unreleased.add(entry.body)
        # After a power cut the image decides, and it is safe.
        self.write(entry.to(Phase.SUSPENDED, was_paused=False), durable=False)
        self.spawn(self._release_soon(entry.machine))

    async def released(self, entry: Entry) -> Entry:
        """Under the lock held: see to it that nothing is left of the machine's last process; return the entry then."""
        if entry.body in self._unreleased:
            await self.rest_without_process(entry, entry.phase)
        return self.entries[entry.machine]

    def is_unreleased(self, body: str) -> bool:
        """Whether something is still to be given back that a machine at rest does not need."""
        return body in self._unreleased

    async def continue_unsuspended(self, entry: Entry) -> None:
        """After a suspend that failed: no image, and the machine is as it was before."""
        await self.host.drop_image(entry.body)
        await self.continue_as_before(entry)

    async def continue_as_before(self, entry: Entry) -> None:
        """Let a machine go on that stood still for an image, or pause it again if it was paused."""
        driver = self.driver(entry.driver)
        try:
            await self.host.resume(entry.body, driver)
            if entry.was_paused:
                await self.host.pause(entry.body, driver)
        except MachineLost:
            await self.note_exit(entry)
        else:
            phase = Phase.PAUSED if entry.was_paused else Phase.RUNNING
            self.write(entry.to(phase, was_paused=False), durable=False)

    def cause(self, entry: Entry) -> str:
        """Say why a machine that is no longer there has ended, once and for all: its cgroup may be gone soon."""
        if entry.cause:
            return entry.cause
        if entry.process and entry.process.boot_id != processes.boot_id():
            return "host-lost"
        # What was killed while the machine lived on is not what it has died of.
        before, when = self.oom_kills_seen.get(entry.body, (0, 0.0))
        more = self.host.cgroups.oom_kills(entry.body) > before
        return "oom-killed" if more or time.monotonic() - when < OOM_S else "machine-exited"

    async def note_exit(self, entry: Entry) -> None:
        """Under the lock held: the machine has ended. Its cause is written down before the evidence is removed."""
        cause = self.cause(entry)
        log.info("machine-exited", machine=entry.machine, cause=cause)
        self.write(entry.to(entry.phase, cause=cause))
        await self.rest_without_process(entry, Phase.EXITED, cause)

    async def undo(self, work: Awaitable[None]) -> None:
        """Carry out what restores order after a failure, whatever ended the attempt. What fails here, recovery does
        later.
        """
        try:
            async with asyncio.timeout(UNDO_S):
                await work
        except Exception:
            log.exception("undo-failed")

    def spawn(self, work: Any) -> None:
        """Do something of the broker's own, beside all requests."""
        try:
            self._tasks.create_task(work)
        except RuntimeError:  # the group is closing: recovery will see to it
            work.close()

    def drop_image_soon(self, entry: Entry) -> None:
        """Remove the image of a machine that was woken from it beside all requests."""
        self.images_going.add(entry.body)
        self.spawn(self._drop_image(entry.machine, entry.body))

    async def _drop_image(self, machine_id: str, body: str) -> None:
        """Remove the image of a machine that was woken from it, unless that is done or it is suspended again. What a
        crash leaves is swept.
        """
        tracing.begin(sandbox=machine_id)
        try:
            async with self.locked(machine_id, VERB_S_DEFAULT):
                entry = self.entries.get(machine_id)
                if entry and entry.body == body and entry.phase is not Phase.SUSPENDED:
                    await self.host.drop_image(body)
        except Exception:
            log.exception("image-not-removed", machine=machine_id)
        finally:
            self.images_going.discard(body)

    async def _release_soon(self, machine_id: str) -> None:
        tracing.begin(sandbox=machine_id)
        try:
            async with self.locked(machine_id, VERB_S_DEFAULT):
                if entry := self.entries.get(machine_id):
                    await self.released(entry)
        except Exception:
            log.exception("not-released", machine=machine_id)

    def _free_link(self, entry: Entry) -> None:
        if entry.link is not None:
            self.host.links.free(entry.link)

    def _ended(self, body: str, process: Process) -> None:
        self._watches.pop(body, None)
        self.spawn(self._note_exit(body, process))

    async def _note_exit(self, body: str, process: Process) -> None:
        try:
            while entry := self.of_body(body):
                tracing.begin(sandbox=entry.machine)
                async with self.locked(entry.machine, VERB_S_DEFAULT):
                    now = self.of_body(body)
                    if now and now.machine != entry.machine:
                        continue  # claimed meanwhile: it is under another lock now
                    if now and now.process == process and now.phase in RESIDENT:
                        await self.note_exit(now)
                    return
        except Exception:
            log.exception("exit-not-noted", body=body)


def conflict(done: str, entry: Entry) -> Conflict:
    """Return the error of a verb that is not possible in the machine's phase."""
    return Conflict(
        f"A machine that is {entry.phase} cannot be {done}.", state=entry.phase.value, machine=entry.machine
    )

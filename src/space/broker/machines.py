"""The verbs: what the broker does to one machine, and in which order it writes that down.

Each verb: check the phase, announce the step in the journal, act, write down where the machine rests now. A verb
asked again finds its work done or does the rest. One lock per machine; verbs on different machines run side by side.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

import structlog

from space.broker import channels, images
from space.broker.host import Host, Timings
from space.broker.journal import RESIDENT, Entry, Journal, Phase
from space.broker.requests import Boot
from space.drivers import processes
from space.drivers.base import Driver, Need
from space.drivers.processes import Process
from space.errors import Conflict, HostFull, InvalidRequest, MachineLost, NotFound, Unavailable
from space.model.sandbox import Resources
from space.settings import Settings

VERB_S = {"suspend": 900.0, "wake": 300.0}
VERB_S_DEFAULT = 120.0
UNDO_S = 60.0
OOM_S = 1.0
"""How long a machine that the kernel kills for want of memory may still be seen alive."""

log = structlog.get_logger()


class Machines:
    """All machines of one installation. Use within ``async with tasks`` of the group given."""

    def __init__(
        self, settings: Settings, drivers: Mapping[str, Driver], host: Host, journal: Journal, tasks: asyncio.TaskGroup
    ) -> None:
        self._settings = settings
        self._drivers = drivers
        self._tasks = tasks
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._watches: dict[str, Any] = {}
        self._oom_kills_seen: dict[str, tuple[int, float]] = {}
        self.host = host
        self.journal = journal
        self.entries: dict[str, Entry] = {}

    @asynccontextmanager
    async def locked(self, machine_id: str, timeout_s: float) -> AsyncGenerator[None]:
        """Hold the machine's lock; everything under it ends within `timeout_s`, the waiting included."""
        lock = self._locks.setdefault(machine_id, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s), lock:
                yield
        except TimeoutError as error:
            raise Unavailable(
                f"That took longer than {timeout_s:g} s and was given up.", code="broker-timeout"
            ) from error

    def driver(self, name: str) -> Driver:
        try:
            return self._drivers[name]
        except KeyError:
            raise InvalidRequest(
                "This host has no such driver.", field="driver", drivers=sorted(self._drivers)
            ) from None

    async def boot(self, request: Boot) -> dict[str, Any]:
        """Make the machine's disk, link, cgroup and channel, and start it."""
        present = self.entries.get(request.machine)
        if present:
            same = (present.template, present.driver) == (request.template, request.driver)
            if present.phase in RESIDENT and same:
                return {"timings": {}}
            raise _conflict("booted", present)
        driver = self.driver(request.driver)
        self._check_limits(request.resources.resources())
        if Need.DISK in driver.capabilities.needs:
            self.host.templates.get(request.template)
        timings = Timings()
        entry = Entry(
            machine=request.machine,
            driver=request.driver,
            template=request.template,
            hostname=request.hostname,
            resources=request.resources.resources(),
            phase=Phase.BOOTING,
            link=await self._reserve(driver),
        )
        self.write(entry)
        try:
            await self._start(entry, driver, timings, new_disk=True)
        except BaseException:
            await self._undo(self.erase(request.machine))
            raise
        return {"timings": timings}

    async def pause(self, machine_id: str) -> dict[str, Any]:
        entry = self._entry(machine_id)
        if entry.phase is Phase.PAUSED:
            return {"timings": {}}
        if entry.phase is not Phase.RUNNING:
            raise _conflict("paused", entry)
        return await self._toggle(entry, Phase.PAUSING, Phase.PAUSED)

    async def resume(self, machine_id: str) -> dict[str, Any]:
        entry = self._entry(machine_id)
        if entry.phase is Phase.RUNNING:
            return {"timings": {}}
        if entry.phase is not Phase.PAUSED:
            raise _conflict("resumed", entry)
        return await self._toggle(entry, Phase.RESUMING, Phase.RUNNING)

    async def suspend(self, machine_id: str) -> dict[str, Any]:
        """Write the memory image, verified and synced, then end the machine. A failure leaves the machine as it was."""
        entry = self._entry(machine_id)
        if entry.phase is Phase.SUSPENDED:
            return {"timings": {}}
        if entry.phase not in RESIDENT:
            raise _conflict("suspended", entry)
        driver = self.driver(entry.driver)
        if not driver.capabilities.checkpoint:
            raise Conflict("This driver cannot suspend.", code="not-supported", driver=entry.driver)
        timings = Timings()
        images.check_room(self.host, machine_id)
        going = entry.to(Phase.SUSPENDING, was_paused=entry.phase is Phase.PAUSED)
        self.write(going)
        try:
            await images.write(self.host, driver, going, timings)
        except BaseException:
            await self._undo(self.continue_unsuspended(going))
            raise
        await timings.of("release", self.finish_suspend(going))
        return {"timings": timings}

    async def wake(self, machine_id: str) -> dict[str, Any]:
        """Restore the machine from its image. A failure keeps the image; the machine stays suspended."""
        entry = self._entry(machine_id)
        if entry.phase is Phase.RUNNING:
            return {"timings": {}}
        if entry.phase is not Phase.SUSPENDED:
            raise _conflict("woken", entry)
        driver = self.driver(entry.driver)
        await driver.check_image(self.host.image(machine_id))
        timings = Timings()
        going = entry.to(Phase.WAKING, link=await self._reserve(driver))
        self.write(going)
        try:
            await self._start(going, driver, timings, new_disk=False)
        except BaseException:
            await self._undo(self.rest_without_process(going, Phase.SUSPENDED))
            raise
        await self.host.drop_image(machine_id)
        return {"timings": timings}

    async def stop(self, machine_id: str) -> dict[str, Any]:
        entry = self._entry(machine_id)
        if entry.phase is Phase.STOPPED:
            return {"timings": {}}
        if entry.phase not in RESIDENT | {Phase.EXITED}:
            raise _conflict("stopped", entry)
        timings = Timings()
        going = entry.to(Phase.STOPPING)
        self.write(going)
        if Need.DISK in self.driver(entry.driver).capabilities.needs:
            await timings.of("sync", self.host.disks.sync(machine_id))
        await timings.of("release", self.rest_without_process(going, Phase.STOPPED))
        return {"timings": timings}

    async def start(self, machine_id: str) -> dict[str, Any]:
        """Boot afresh on the kept disk. A memory image, if there is one, is given up."""
        entry = self._entry(machine_id)
        if entry.phase is Phase.RUNNING:
            return {"timings": {}}
        if entry.phase not in {Phase.STOPPED, Phase.EXITED, Phase.SUSPENDED}:
            raise _conflict("started", entry)
        driver = self.driver(entry.driver)
        timings = Timings()
        going = entry.to(Phase.STARTING, link=await self._reserve(driver), cause=None)
        self.write(going)
        await self.host.drop_image(machine_id)
        try:
            await self._start(going, driver, timings, new_disk=False)
        except BaseException:
            await self._undo(self.rest_without_process(going, Phase.STOPPED))
            raise
        return {"timings": timings}

    async def destroy(self, machine_id: str) -> dict[str, Any]:
        """Leave nothing. An unknown machine: success."""
        timings = Timings()
        if machine_id in self.entries:
            await timings.of("erase", self.erase(machine_id))
        return {"timings": timings}

    async def inspect(self, machine_id: str) -> dict[str, Any]:
        return self.report(machine_id, await self._disks_used())

    async def all(self) -> list[dict[str, Any]]:
        disks = await self._disks_used()
        return [self.report(machine_id, disks) for machine_id in sorted(self.entries)]

    def report(self, machine_id: str, disks: Mapping[str, float]) -> dict[str, Any]:
        """Return what `inspect` answers. One whose process has ended is `exited` even before that is journaled."""
        entry = self.entries.get(machine_id)
        if entry is None:
            return {"machine": machine_id, "state": "absent"}
        usage = self.host.cgroups.usage(machine_id)
        found: dict[str, Any] = {
            "machine": machine_id,
            "state": _STATE.get(entry.phase, entry.phase.value),
            "template": entry.template,
            "driver": entry.driver,
            "usage": {
                "cpu_s": round(usage.cpu_s, 3),
                "memory_mib": usage.memory_mib,
                "memory_peak_mib": usage.memory_peak_mib,
                "pids": usage.pids,
                "oom_kills": usage.oom_kills,
                "disk_mib": round(max(0.0, disks.get(machine_id, 0.0) - self._template_mib(entry)), 1),
            },
        }
        if entry.process and found["state"] in {"running", "paused"}:
            if processes.is_alive(entry.process):
                found["pid"] = entry.process.pid
                if usage.oom_kills > self._oom_kills_seen.get(machine_id, (0, 0.0))[0]:
                    self._oom_kills_seen[machine_id] = (usage.oom_kills, time.monotonic())
            else:
                found |= {"state": "exited", "cause": self.cause(entry)}
        elif entry.cause:
            found["cause"] = entry.cause
        return found

    def write(self, entry: Entry, *, durable: bool = True) -> None:
        """Journal the entry, then believe it."""
        self.journal.write(entry, durable=durable)
        self.entries[entry.machine] = entry

    def watch(self, machine_id: str, process: Process) -> None:
        """See to it that the end of the machine's process is written down and its resources are given back."""
        self.unwatch(machine_id)
        pidfd = processes.open_process(process)
        if pidfd is None:
            self._ended(machine_id, process)
        else:
            self._watches[machine_id] = processes.on_end(pidfd, lambda: self._ended(machine_id, process))

    def unwatch(self, machine_id: str) -> None:
        if stop := self._watches.pop(machine_id, None):
            stop()

    def unwatch_all(self) -> None:
        for machine_id in list(self._watches):
            self.unwatch(machine_id)

    async def erase(self, machine_id: str) -> None:
        """Destroy under the lock held. Each step is repeatable; a failure leaves the journal saying what remains to
        be done.
        """
        entry = self.entries[machine_id]
        self.write(entry.to(Phase.DESTROYING))
        self.unwatch(machine_id)
        await self.host.erase(entry, self._drivers.get(entry.driver))
        self.journal.remove(machine_id)
        self._oom_kills_seen.pop(machine_id, None)
        del self.entries[machine_id]

    async def rest_without_process(self, entry: Entry, phase: Phase, cause: str | None = None) -> None:
        """End whatever runs, give back all but disk and image, and rest in `phase`."""
        self.unwatch(entry.machine)
        await self.host.release(entry, self._drivers.get(entry.driver))
        self.write(entry.to(phase, link=None, process=None, cause=cause, was_paused=False))
        self._oom_kills_seen.pop(entry.machine, None)

    async def finish_suspend(self, entry: Entry) -> None:
        """The image is whole: end the machine."""
        await self.rest_without_process(entry, Phase.SUSPENDED)

    async def continue_unsuspended(self, entry: Entry) -> None:
        """After a failed suspend: no image, and the machine is as it was before."""
        driver = self.driver(entry.driver)
        await self.host.drop_image(entry.machine)
        try:
            if entry.was_paused:  # not let go yet, or let go and paused by the driver: either way it goes on first
                await self.host.resume(entry.machine, driver)
            await driver.resume(entry.machine)
            if entry.was_paused:
                await self.host.pause(entry.machine, driver)
        except MachineLost:
            await self.note_exit(entry)
        else:
            self.write(entry.to(Phase.PAUSED if entry.was_paused else Phase.RUNNING, was_paused=False))

    def cause(self, entry: Entry) -> str:
        """Say why a machine that is no longer there has ended, once and for all: its cgroup may be gone soon."""
        if entry.cause:
            return entry.cause
        if entry.process and entry.process.boot_id != processes.boot_id():
            return "host-lost"
        # What was killed while the machine lived on is not what it has died of.
        before, when = self._oom_kills_seen.get(entry.machine, (0, 0.0))
        more = self.host.cgroups.oom_kills(entry.machine) > before
        return "oom-killed" if more or time.monotonic() - when < OOM_S else "machine-exited"

    async def exited(self, machine_id: str, process: Process) -> None:
        """The process has ended by itself: say why, and keep the disk."""
        async with self.locked(machine_id, VERB_S_DEFAULT):
            entry = self.entries.get(machine_id)
            if entry is None or entry.process != process or entry.phase not in RESIDENT:
                return
            await self.note_exit(entry)

    async def note_exit(self, entry: Entry) -> None:
        """Under the lock held: the machine has ended. Its cause is written down before the evidence is removed."""
        cause = self.cause(entry)
        log.info("machine-exited", machine=entry.machine, cause=cause)
        self.write(entry.to(entry.phase, cause=cause))
        await self.rest_without_process(entry, Phase.EXITED, cause)

    async def _start(self, entry: Entry, driver: Driver, timings: Timings, *, new_disk: bool) -> None:
        machine = await self.host.acquire(entry, driver, timings, new_disk=new_disk)
        channel = self.host.channels.create(entry.machine)
        try:
            await driver.prepare(machine)
            if entry.phase is Phase.WAKING:
                process = await timings.of("machine", driver.restore(machine, channel, self.host.image(entry.machine)))
            else:
                process = await timings.of("machine", driver.start(machine, channel))
        finally:
            channels.close(channel)
        self.write(entry.to(Phase.RUNNING, process=process, cause=None))
        self.watch(entry.machine, process)

    async def _toggle(self, entry: Entry, passing: Phase, target: Phase) -> dict[str, Any]:
        driver = self.driver(entry.driver)
        timings = Timings()
        self.write(entry.to(passing), durable=False)
        act = self.host.pause if target is Phase.PAUSED else self.host.resume
        # A failure leaves the passing phase: whoever comes next asks the machine itself how far it got.
        await timings.of("machine", act(entry.machine, driver))
        self.write(entry.to(target), durable=False)
        return {"timings": timings}

    async def _undo(self, work: Any) -> None:
        """Carry out what restores order after a failure, whatever ended the attempt. What fails here, recovery does
        later.
        """
        try:
            async with asyncio.timeout(UNDO_S):
                await work
        except Exception:
            log.exception("undo-failed")

    def _ended(self, machine_id: str, process: Process) -> None:
        self._watches.pop(machine_id, None)
        with suppress(RuntimeError):  # the group is closing: recovery will see it
            self._tasks.create_task(self._note_exit(machine_id, process))

    async def _note_exit(self, machine_id: str, process: Process) -> None:
        try:
            await self.exited(machine_id, process)
        except Exception:
            log.exception("exit-not-noted", machine=machine_id)

    def _entry(self, machine_id: str) -> Entry:
        try:
            return self.entries[machine_id]
        except KeyError:
            raise NotFound("There is no such machine.", machine=machine_id) from None

    def _check_limits(self, resources: Resources) -> None:
        if len(self.entries) >= self._settings.sandboxes_max:
            raise HostFull("This host has as many sandboxes as it may.", sandboxes_max=self._settings.sandboxes_max)
        for name in ("cpus", "memory_mib", "disk_mib", "pids"):
            most = getattr(self._settings, f"{name}_max")
            if getattr(resources, name) > most:
                raise InvalidRequest(f"`{name}` is more than a sandbox may have here.", field=name, max=most)

    async def _reserve(self, driver: Driver) -> int | None:
        return await self.host.links.reserve() if Need.LINK in driver.capabilities.needs else None

    async def _disks_used(self) -> Mapping[str, float]:
        needed = any(Need.DISK in driver.capabilities.needs for driver in self._drivers.values())
        return await self.host.disks.used_mib() if needed else {}

    def _template_mib(self, entry: Entry) -> float:
        with suppress(NotFound):
            return self.host.templates.get(entry.template).bytes / (1 << 20)
        return 0.0


# How phases in passing look from outside: as the state they come from, which is where a crash would lead back to.
_STATE = {
    Phase.BOOTING: "absent",
    Phase.STARTING: "stopped",
    Phase.WAKING: "suspended",
    Phase.PAUSING: "running",
    Phase.RESUMING: "paused",
    Phase.SUSPENDING: "running",
    Phase.STOPPING: "running",
    Phase.DESTROYING: "exited",
}


def _conflict(done: str, entry: Entry) -> Conflict:
    return Conflict(
        f"A machine that is {entry.phase} cannot be {done}.", state=entry.phase.value, machine=entry.machine
    )

"""What a broker makes of what its predecessor left: every phase, with the machine there and gone. On the fake."""

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from space.broker.journal import Entry, Journal, Phase
from space.broker.machines import Machines
from space.drivers import processes
from space.drivers.base import Channel, MachineState
from space.drivers.processes import Process
from space.model.ids import new_id
from space.settings import Settings
from space.testing import FakeDriver
from tests.brokers import Site, serving, settings_in, until


class Place:
    """One data directory over several brokers."""

    def __init__(self, directory: Path) -> None:
        self.settings: Settings = settings_in(directory / "data", directory / "run")
        self.driver = FakeDriver(directory / "fake")

    def journal(self) -> Journal:
        one = Journal(self.settings.broker_dir / "machines")
        one.open()
        return one

    def entry(self, machine: str) -> Entry:
        return self.journal().read_all().entries[machine]

    def rewrite(self, machine: str, phase: Phase, **changes: object) -> None:
        """Leave the journal as a broker that was killed there would have."""
        self.journal().write(self.entry(machine).to(phase, **changes))

    async def with_broker(self, do: Callable[[Site, Machines], Awaitable[None]]) -> None:
        async with serving(self.settings, {"fake": self.driver}) as (site, machines):
            await do(site, machines)

    async def booted(self) -> tuple[str, Process]:
        machine = new_id("sbx")

        async def boot(site: Site, _: Machines) -> None:
            await site.boot(machine)

        await self.with_broker(boot)
        process = self.entry(machine).process
        assert process is not None
        return machine, process

    async def state_after_recovery(self, machine: str) -> str:
        seen: list[str] = []

        async def look(site: Site, _: Machines) -> None:
            seen.append(await site.state(machine))

        await self.with_broker(look)
        return seen[0]

    async def end(self) -> None:
        async def destroy_all(site: Site, _: Machines) -> None:
            for machine in await site.call("machines"):
                await site.call("destroy", machine=machine["machine"])

        await self.with_broker(destroy_all)
        assert await self.driver.known() == frozenset()


@pytest.fixture
async def place(tmp_path: Path):
    one = Place(tmp_path)
    yield one
    await one.end()


async def kill(process: Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not processes.is_alive(process), "the process ends")


async def test_a_running_machine_is_adopted_and_its_end_noticed(place: Place) -> None:
    """L12: the broker is gone and comes back; the machine never notices."""
    machine, process = await place.booted()

    async def look(site: Site, _: Machines) -> None:
        assert (await site.call("inspect", machine=machine))["pid"] == process.pid
        with site.peer(machine) as peer:
            assert peer.run("/bin/echo", "here").stdout == b"here\n"
        await kill(process)
        assert (await site.until(machine, "exited"))["cause"] == "machine-exited"
        await until(lambda: place.entry(machine).phase is Phase.EXITED, "the end is journaled")
        await site.call("start", machine=machine)
        assert await site.state(machine) == "running"

    await place.with_broker(look)


async def test_a_machine_that_ended_meanwhile_is_found_exited(place: Place) -> None:
    machine, process = await place.booted()
    await kill(process)
    assert await place.state_after_recovery(machine) == "exited"


async def test_a_recycled_pid_is_not_taken_for_the_machine(place: Place) -> None:
    """L12: same number, other process."""
    machine, process = await place.booted()
    await kill(process)
    place.rewrite(machine, Phase.RUNNING, process=Process(os.getpid(), process.start_ticks, process.boot_id))
    assert await place.state_after_recovery(machine) == "exited"
    assert processes.identify(os.getpid()) is not None


async def test_after_a_reboot_of_the_host_the_machine_is_lost_with_it(place: Place) -> None:
    machine, process = await place.booted()
    await kill(process)
    place.rewrite(machine, Phase.RUNNING, process=Process(process.pid, process.start_ticks, "another boot"))
    seen: list[object] = []

    async def look(site: Site, _: Machines) -> None:
        seen.append((await site.call("inspect", machine=machine))["cause"])

    await place.with_broker(look)
    assert seen == ["host-lost"]


@pytest.mark.parametrize("phase", [Phase.BOOTING, Phase.STARTING, Phase.WAKING])
async def test_a_machine_that_came_up_before_that_was_written_is_adopted(place: Place, phase: Phase) -> None:
    machine, process = await place.booted()
    place.rewrite(machine, phase, process=None)
    assert await place.state_after_recovery(machine) == "running"
    assert place.entry(machine).process == process


@pytest.mark.parametrize(
    ("phase", "state"), [(Phase.BOOTING, "absent"), (Phase.STARTING, "stopped"), (Phase.WAKING, "suspended")]
)
async def test_a_machine_that_did_not_come_up_is_where_it_was_before(place: Place, phase: Phase, state: str) -> None:
    machine, process = await place.booted()
    await kill(process)
    place.rewrite(machine, phase, process=None)
    assert await place.state_after_recovery(machine) == state
    assert machine not in await place.driver.known()


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("phase", [Phase.PAUSING, Phase.RESUMING])
async def test_a_pause_or_resume_in_between_is_asked_of_the_machine(place: Place, phase: Phase, paused: bool) -> None:
    machine, _ = await place.booted()
    if paused:
        await place.driver.pause(machine)
    place.rewrite(machine, phase)
    assert await place.state_after_recovery(machine) == ("paused" if paused else "running")


@pytest.mark.parametrize("phase", [Phase.PAUSING, Phase.RESUMING, Phase.SUSPENDING])
async def test_a_machine_that_ended_in_between_is_found_exited(place: Place, phase: Phase) -> None:
    machine, process = await place.booted()
    await kill(process)
    place.rewrite(machine, phase)
    assert await place.state_after_recovery(machine) == "exited"


@pytest.mark.parametrize(("was_paused", "state"), [(False, "running"), (True, "paused")])
@pytest.mark.parametrize("written", ["nothing", "half", "all but its name"])
async def test_a_suspend_cut_short_is_undone(place: Place, written: str, was_paused: bool, state: str) -> None:
    """F10, L12: no image under its name, no suspend; the machine goes on as before."""
    machine, process = await place.booted()
    image = place.settings.broker_dir / "snapshots" / f"{machine}.tmp"
    if written != "nothing":
        image.mkdir()
    if written == "half":
        (image / "memory").write_bytes(b"half")
    if written == "all but its name":
        await place.driver.checkpoint(machine, image)
        await place.driver.pause(machine)
    place.rewrite(machine, Phase.SUSPENDING, was_paused=was_paused)
    assert await place.state_after_recovery(machine) == state
    assert not image.exists()
    assert processes.is_alive(process)


async def test_a_suspend_whose_image_has_its_name_is_finished(place: Place) -> None:
    machine, _ = await place.booted()
    image = place.settings.broker_dir / "snapshots" / machine
    image.mkdir()
    await place.driver.checkpoint(machine, image)
    await place.driver.pause(machine)
    place.rewrite(machine, Phase.SUSPENDING)
    assert await place.state_after_recovery(machine) == "suspended"
    assert (await place.driver.inspect(machine)).state is MachineState.ABSENT

    async def wake(site: Site, _: Machines) -> None:
        await site.call("wake", machine=machine)
        with site.peer(machine) as peer:
            assert peer.run("/bin/echo", "back").stdout == b"back\n"

    await place.with_broker(wake)


@pytest.mark.parametrize(("phase", "state"), [(Phase.STOPPING, "stopped"), (Phase.DESTROYING, "absent")])
@pytest.mark.parametrize("alive", [False, True])
async def test_a_stop_or_destroy_cut_short_is_finished(place: Place, phase: Phase, state: str, alive: bool) -> None:
    machine, process = await place.booted()
    if not alive:
        await kill(process)
    place.rewrite(machine, phase)
    assert await place.state_after_recovery(machine) == state
    assert not processes.is_alive(process)


@pytest.mark.parametrize("still", [False, True])
@pytest.mark.parametrize(("was_paused", "state"), [(False, "running"), (True, "paused")])
async def test_a_machine_goes_on_after_a_snapshot_cut_short_and_nothing_is_left_of_it(
    place: Place, was_paused: bool, state: str, still: bool
) -> None:
    """L12: killed before the snapshot had its name."""
    machine, process = await place.booted()
    name = new_id("snp")
    working = place.settings.broker_dir / "snapshots" / f"{name}.tmp" / "memory"
    working.mkdir(parents=True)
    await place.driver.checkpoint(machine, working)
    if still:
        await place.driver.pause(machine)
    place.rewrite(machine, Phase.SNAPSHOTTING, was_paused=was_paused)
    assert await place.state_after_recovery(machine) == state
    assert processes.is_alive(process)
    assert list((place.settings.broker_dir / "snapshots").iterdir()) == []
    if state == "running":

        async def end(site: Site, _: Machines) -> None:
            await kill(process)
            await site.until(machine, "exited")

        await place.with_broker(end)


async def test_a_machine_that_ended_during_its_snapshot_is_found_exited(place: Place) -> None:
    machine, process = await place.booted()
    await kill(process)
    place.rewrite(machine, Phase.SNAPSHOTTING)
    assert await place.state_after_recovery(machine) == "exited"


async def test_a_snapshot_that_was_being_dropped_is_gone(place: Place) -> None:
    machine, _ = await place.booted()
    name = new_id("snp")

    async def keep(site: Site, _: Machines) -> None:
        await site.call("snapshot", machine=machine, snapshot=name, kind="full")

    await place.with_broker(keep)
    snapshots = place.settings.broker_dir / "snapshots"
    (snapshots / name).rename(snapshots / f"{name}.tmp")
    await place.state_after_recovery(machine)
    assert list(snapshots.iterdir()) == []


async def test_a_machine_that_came_up_from_a_snapshot_before_that_was_written_is_to_be_awakened(place: Place) -> None:
    machine, _ = await place.booted()
    place.rewrite(machine, Phase.BOOTING, process=None, snapshot=new_id("snp"), restored=True, spare=True)

    async def look(site: Site, _: Machines) -> None:
        entry = place.entry(machine)
        resources = {"cpus": 1.0, "memory_mib": 256, "disk_mib": 64, "pids": 128}
        fields = {"template": entry.template, "driver": "fake", "resources": resources, "hostname": "guest"}
        answer = await site.call("boot", machine=machine, snapshot=entry.snapshot, spare=True, **fields)
        assert (answer["restored"], answer["timings"]) == (True, {})

    await place.with_broker(look)


async def test_what_a_suspended_machine_had_not_given_back_yet_is_gone(place: Place) -> None:
    """The answer came, and then the broker was killed."""
    machine, process = await place.booted()
    image = place.settings.broker_dir / "snapshots" / machine
    image.mkdir()
    await place.driver.checkpoint(machine, image)
    place.rewrite(machine, Phase.SUSPENDED)
    assert await place.state_after_recovery(machine) == "suspended"
    assert place.entry(machine).process is None
    assert not (place.settings.channels_dir / machine).exists()
    assert (await place.driver.inspect(machine)).state is MachineState.ABSENT
    assert process.pid


async def test_what_no_journal_knows_is_removed(place: Place) -> None:
    """L12: zero strays."""
    await place.booted()
    stray = new_id("sbx")
    place_channel = place.settings.channels_dir / stray
    place_channel.mkdir()
    for name in ("in", "out"):
        os.mkfifo(place_channel / name)
    for name in (stray, f"{stray}.tmp"):
        (place.settings.broker_dir / "snapshots" / name).mkdir()
    from space.drivers.base import Machine
    from space.model.sandbox import Resources

    unknown = Machine(stray, "h", Resources())
    await place.driver.prepare(unknown)
    null = os.open(os.devnull, os.O_RDWR)
    fifo = os.open(place_channel / "in", os.O_RDWR)
    process = await place.driver.start(unknown, Channel(fifo, null))
    os.close(null)
    os.close(fifo)
    await place.state_after_recovery(stray)
    assert not processes.is_alive(process)
    assert stray not in await place.driver.known()
    assert not place_channel.exists()
    assert list((place.settings.broker_dir / "snapshots").iterdir()) == []


async def test_names_that_are_no_machines_are_left_alone(place: Place) -> None:
    await place.booted()
    foreign = place.settings.channels_dir / "somebody-elses"
    foreign.mkdir()
    await place.state_after_recovery(new_id("sbx"))
    assert foreign.is_dir()
    foreign.rmdir()


async def test_a_damaged_journal_protects_what_belongs_to_its_machine(place: Place) -> None:
    machine, process = await place.booted()
    path = place.settings.broker_dir / "machines" / machine / "journal.json"
    good = path.read_text()
    path.write_text("{")
    assert await place.state_after_recovery(machine) == "absent"
    assert processes.is_alive(process)
    path.write_text(good)
    assert await place.state_after_recovery(machine) == "running"


async def test_a_machine_that_cannot_be_settled_does_not_keep_the_others_from_it(place: Place) -> None:
    troubled, _ = await place.booted()
    other, _ = await place.booted()
    (place.settings.broker_dir / "snapshots" / troubled).mkdir()
    place.rewrite(troubled, Phase.SUSPENDING)

    async def look(site: Site, _: Machines) -> None:
        assert await site.state(other) == "running"
        await site.call("pause", machine=other)
        await site.call("destroy", machine=troubled)
        assert await site.state(troubled) == "absent"

    await place.with_broker(look)

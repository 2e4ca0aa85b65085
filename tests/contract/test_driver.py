"""One suite for every driver: what `space.drivers.base.Driver` promises, claimed one by one and tried on real machines."""

# ruff: noqa: ASYNC221 - a test has nothing else to do while a program runs

import asyncio
import dataclasses
import os
import shutil
import signal
import subprocess

import pytest

from space.drivers import processes
from space.drivers.base import Blocks, MachineState, Need
from space.errors import HostError, HostFull, MachineLost
from space.model.ids import new_id
from space.testing import FakeDriver
from tests.agent import Peer
from tests.driver_bench import COUNTER, RESOURCES, Bench, bench, counted, hung_up, is_ended, produced, silent, wait

__all__ = ["bench"]


async def test_a_started_machine_answers_and_runs_programs(bench: Bench) -> None:
    machine = bench.machine()
    await bench.start(machine)
    with bench.peer(machine) as peer:
        assert peer.run(*bench.python, "print(6 * 7)").stdout == b"42\n"


async def test_a_started_machine_is_seen_running_with_the_process_that_start_returned(bench: Bench) -> None:
    machine = bench.machine()
    process = await bench.start(machine)
    seen = await bench.driver.inspect(machine.id)
    assert seen.state is MachineState.RUNNING
    assert seen.process == process
    assert processes.is_alive(process)
    assert machine.id in await bench.driver.known()


async def test_a_paused_machine_stands_still_until_it_is_resumed(bench: Bench) -> None:
    machine = bench.machine()
    await bench.start(machine)
    with bench.peer(machine) as peer:
        counter = peer.start(*bench.python, COUNTER)
        number = counter.streams["stdout"]
        peer.until(lambda: counted(peer, number) > 3, "the counter counts")
        await bench.driver.pause(machine.id)
        assert (await bench.driver.inspect(machine.id)).state is MachineState.PAUSED
        assert silent(peer, number)
        before = counted(peer, number)
        await bench.driver.resume(machine.id)
        assert (await bench.driver.inspect(machine.id)).state is MachineState.RUNNING
        peer.until(lambda: counted(peer, number) > before + 3, "the counter goes on")


async def test_pause_and_resume_may_be_repeated(bench: Bench) -> None:
    machine = bench.machine()
    await bench.start(machine)
    for _ in range(2):
        await bench.driver.resume(machine.id)
    for _ in range(2):
        await bench.driver.pause(machine.id)
    assert (await bench.driver.inspect(machine.id)).state is MachineState.PAUSED


async def test_a_checkpoint_leaves_a_machine_that_goes_on(bench: Bench) -> None:
    machine = bench.machine()
    await bench.start(machine)
    with bench.peer(machine) as peer:
        counter = peer.start(*bench.python, COUNTER)
        number = counter.streams["stdout"]
        peer.until(lambda: counted(peer, number) > 3, "the counter counts")
        for _ in range(2):
            image = bench.image()
            await bench.checkpoint(machine, image)
            await bench.driver.check_image(image)
            assert (await bench.driver.inspect(machine.id)).state is MachineState.RUNNING
            goes_on(peer, number)


def goes_on(peer: Peer, number: int) -> None:
    before = counted(peer, number)
    peer.until(lambda: counted(peer, number) > before + 3, "the counter goes on")


async def test_a_restored_machine_goes_on_where_the_checkpoint_was_made(bench: Bench) -> None:
    """L1 at the level of the driver: memory and processes, and a new channel."""
    machine = bench.machine()
    first = await bench.start(machine)
    with bench.peer(machine) as peer:
        counter = peer.start(*bench.python, COUNTER, id="cmdcounter")
        number = counter.streams["stdout"]
        peer.until(lambda: counted(peer, number) > 3, "the counter counts")
        image = bench.image()
        await bench.checkpoint(machine, image)
        await bench.driver.destroy(machine.id, first)
    assert (await bench.driver.inspect(machine.id)).state is MachineState.ABSENT
    process = await bench.restore(machine, image)
    shutil.rmtree(image)
    assert (await bench.driver.inspect(machine.id)).state is MachineState.RUNNING
    assert (await bench.driver.inspect(machine.id)).process == process
    with bench.peer(machine) as peer:
        assert peer.welcome is not None
        commands = {command["id"]: command for command in peer.welcome["commands"]}
        assert commands["cmdcounter"]["state"] == "running"
        before = commands["cmdcounter"]["streams"]["stdout"]["produced"]
        peer.until(lambda: produced(peer) > before, "the counter goes on")
        assert peer.run(*bench.python, "print('still here')").stdout == b"still here\n"


async def test_a_checkpoint_that_does_not_fit_is_refused_and_the_machine_goes_on(bench: Bench) -> None:
    """F10: the host's store is full; nothing happens to the machine."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    machine = bench.machine()
    await bench.start(machine)
    small = bench.image()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], check=True)
    try:
        (small / "image").mkdir()
        with pytest.raises(HostFull) as caught:
            await bench.driver.checkpoint(machine.id, small / "image")
    finally:
        subprocess.run(["umount", small], check=True)
    assert caught.value.code == "snapshot-store-full"
    assert (await bench.driver.inspect(machine.id)).state is MachineState.RUNNING
    with bench.peer(machine) as peer:
        assert peer.run(*bench.python, "print('as before')").stdout == b"as before\n"


async def test_an_image_that_is_not_whole_is_refused(bench: Bench) -> None:
    machine = bench.machine()
    await bench.start(machine)
    image = bench.image()
    await bench.checkpoint(machine, image)
    largest = max(image.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(HostError, match="image"):
        await bench.driver.check_image(image)
    with pytest.raises(HostError):
        await bench.driver.check_image(bench.image())


async def _unknown(bench: Bench, machine_id: str) -> None:
    """Wait until what helped the machine has seen, too, that it has ended."""
    for _ in range(1000):
        if machine_id not in await bench.driver.known():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the driver still knows the machine")


async def test_a_destroyed_machine_leaves_no_process_no_state_and_a_closed_channel(bench: Bench) -> None:
    machine = bench.machine()
    process = await bench.start(machine)
    out = os.open(bench.channel_directory(machine) / "out", os.O_RDONLY | os.O_NONBLOCK)
    try:
        await bench.driver.destroy(machine.id, process)
        assert is_ended(process)
        await _unknown(bench, machine.id)
        assert (await bench.driver.inspect(machine.id)).state is MachineState.ABSENT
        wait(lambda: hung_up(out), "end of file on the channel")
    finally:
        os.close(out)


@pytest.mark.parametrize("paused", [False, True])
async def test_destroy_needs_no_hint_and_no_running_machine(bench: Bench, paused: bool) -> None:
    machine = bench.machine()
    process = await bench.start(machine)
    if paused:
        await bench.driver.pause(machine.id)
    await bench.driver.destroy(machine.id, None)
    assert is_ended(process)
    await bench.driver.destroy(machine.id, None)


async def test_destroy_takes_away_a_machine_that_was_only_prepared(bench: Bench) -> None:
    machine = bench.machine()
    await bench.driver.prepare(machine)
    assert machine.id in await bench.driver.known()
    await bench.driver.destroy(machine.id, None)
    assert machine.id not in await bench.driver.known()


async def test_verbs_on_an_absent_machine_say_that_it_is_lost(bench: Bench) -> None:
    absent = new_id("sbx")
    for verb in (bench.driver.pause, bench.driver.resume):
        with pytest.raises(MachineLost):
            await verb(absent)
    with pytest.raises(MachineLost):
        await bench.driver.checkpoint(absent, bench.image())


async def test_a_machine_that_was_killed_is_absent_and_lost(bench: Bench) -> None:
    machine = bench.machine()
    process = await bench.start(machine)
    os.kill(process.pid, signal.SIGKILL)
    wait(lambda: is_ended(process), "the process ends")
    assert (await bench.driver.inspect(machine.id)).state is MachineState.ABSENT
    with pytest.raises(MachineLost):
        await bench.driver.pause(machine.id)


async def test_a_new_driver_object_finds_the_machines_of_an_earlier_one(bench: Bench) -> None:
    machine = bench.machine()
    process = await bench.start(machine)
    again = bench.make()
    await again.end_strays()
    assert machine.id in await again.known()
    assert (await again.inspect(machine.id)).process == process
    await again.pause(machine.id)
    await again.resume(machine.id)
    await again.destroy(machine.id, None)
    assert is_ended(process)


def test_a_machine_outlives_the_process_that_started_it(bench: Bench) -> None:
    machine = bench.machine()
    starter = os.fork()
    if starter == 0:
        try:
            asyncio.run(bench.start(machine))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(starter, 0)[1]) == -signal.SIGKILL
    assert asyncio.run(bench.driver.inspect(machine.id)).state is MachineState.RUNNING
    with bench.peer(machine) as peer:
        assert peer.run(*bench.python, "print('alone')").stdout == b"alone\n"


async def test_a_start_that_cannot_work_fails_and_can_be_taken_away(bench: Bench) -> None:
    nothing = bench.directory / "no such thing"
    if Need.DISK in bench.driver.capabilities.needs:
        machine = dataclasses.replace(bench.machine(), root=nothing)
    elif Need.BLOCKS in bench.driver.capabilities.needs:
        machine = dataclasses.replace(bench.machine(), blocks=Blocks(nothing, nothing))
    else:
        machine = bench.machine()
        bench.driver = FakeDriver(bench.directory / "state", ["/no/such/agent"])
    with pytest.raises(HostError):
        await bench.start(machine)
    await bench.driver.destroy(machine.id, None)
    assert machine.id not in await bench.driver.known()


def test_host_limits_leave_the_guest_what_it_was_promised(bench: Bench) -> None:
    limits = bench.driver.limits(RESOURCES)
    assert RESOURCES.cpus <= limits.cpus <= RESOURCES.cpus + 1
    assert limits.memory_mib >= RESOURCES.memory_mib
    assert limits.pids >= RESOURCES.pids


async def test_ids_are_told_apart_to_the_last_letter(bench: Bench) -> None:
    first = bench.machine()
    await bench.start(first)
    twin = first.id[:-1] + ("a" if first.id[-1] != "a" else "b")
    assert (await bench.driver.inspect(twin)).state is MachineState.ABSENT
    await bench.driver.destroy(twin, None)
    await bench.driver.destroy(first.id[:-1], None)
    assert (await bench.driver.inspect(first.id)).state is MachineState.RUNNING

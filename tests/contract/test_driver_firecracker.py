"""What is true of Firecracker's machines as far as it goes without a guest that runs programs: jails, the API, pausing,
images, links, cgroups, and what is left when anything is killed.

All of it is the real Firecracker under its real jailer. Where KVM emulates its guests, the kernel gets no further than
its first lines, which is as far as these tests look. A machine eats a processor there: one runs at a time.
"""

# ruff: noqa: ASYNC240 - a test has nothing else to do meanwhile

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
from pathlib import Path

import pytest

from space.drivers import processes
from space.drivers.base import Machine, MachineState
from space.drivers.firecracker import FirecrackerDriver
from space.drivers.processes import Process
from space.drivers.vm import network, users
from space.drivers.vm.bundles import Bundle
from space.errors import HostError, MachineLost
from space.model.sandbox import Resources
from tests.driver_bench import FIRECRACKER, Bench, bench, hung_up, largest_file, wait
from tests.installation import printed_path

__all__ = ["bench"]

pytestmark = pytest.mark.parametrize("bench", ["firecracker"], indirect=True)

RESOURCES = Resources(cpus=1, memory_mib=128, disk_mib=64, pids=64)
BOOT_S = 60
TICKS = os.sysconf("SC_CLK_TCK")


def small(bench: Bench) -> Machine:
    machine = dataclasses.replace(bench.machine(), resources=RESOURCES)
    bench.started[-1] = machine
    return machine


def bundle(bench: Bench, machine: Machine) -> Path:
    return bench.directory / "state/firecracker" / machine.id


def relay(bench: Bench, machine: Machine) -> Process:
    found = Bundle(bundle(bench, machine)).process("relay")
    assert found
    return found


def status(process: Process) -> dict[str, list[str]]:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}


def threads(process: Process) -> dict[str, str]:
    """The kind of system call filter that each thread has."""
    found = {}
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        text = (task / "status").read_text()
        found[(task / "comm").read_text().strip()] = text.partition("\nSeccomp:\t")[2][:1]
    return found


def used_s(process: Process) -> float:
    """Processor time of the machine."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def at_work(process: Process) -> None:
    before = used_s(process)
    wait(lambda: used_s(process) > before + 0.05, "its processor runs", 20)


def links(machine: Machine) -> str:
    assert machine.netns
    return subprocess.run(
        ["ip", "-n", machine.netns.name, "-d", "link"], check=True, capture_output=True, text=True
    ).stdout


def left(bench: Bench, machine: Machine) -> list[str]:
    """Whatever is still there of a machine."""
    found = [str(path) for path in (bench.directory / "state/firecracker").glob(f"{machine.id}*")]
    found += [str(path) for path in (bench.directory / "images/jails").glob("*")]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(bench.directory) in line]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes()
            if machine.id.encode() in words and b"pytest" not in words:
                found.append(str(path))
    found += [str(path) for path in users.TAKEN.iterdir() if path.readlink().name == machine.id]
    return found + ([network.TAP] if network.TAP in links(machine) else [])


async def test_each_machine_has_a_user_a_jail_and_namespaces_of_its_own(bench: Bench) -> None:
    users = set()
    for machine in (small(bench), small(bench)):
        process = await bench.start(machine)
        await bench.driver.pause(machine.id)
        found = status(process)
        assert len(set(found["Uid"] + found["Gid"])) == 1
        assert found["Groups"] == []
        assert 256 << 20 < largest_file(process) < 320 << 20, "its layer is the largest"
        assert {found[name][0] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
        assert found["NSpid"][1:] == ["1"]
        assert set(threads(process).values()) == {"2"}
        assert "fc_vcpu 0" in threads(process)
        user = found["Uid"][0]
        users.add(user)
        for name in ("mnt", "net", "pid"):
            assert Path(f"/proc/{process.pid}/ns/{name}").readlink() != Path(f"/proc/self/ns/{name}").readlink()
        assert f"user {user}" in links(machine)
        inside = {path.name for path in Path(f"/proc/{process.pid}/root").iterdir()}
        assert inside >= {"template", "layer", "space", "vmlinux", "initrd", "out", "dev", "api.sock", "vsock.sock"}
        assert not inside & {"etc", "usr", "proc", "sys", "home", "root", "tmp"}
        assert machine.blocks
        assert machine.blocks.layer.stat().st_uid == int(user)
        assert machine.blocks.template.stat().st_mode & 0o222 == 0
        assert str(bench.directory) not in Path("/proc/self/mountinfo").read_text()
    assert len(users) == 2
    assert "0" not in users


async def test_its_serial_line_shows_the_kernel_that_boots(bench: Bench) -> None:
    machine = small(bench)
    await bench.start(machine)
    said = []

    def boots() -> bool:
        said.append(bench.driver.console(machine.id))
        return "Linux version" in "".join(said)

    await asyncio.to_thread(wait, boots, "the kernel tells its version", BOOT_S)
    assert (bundle(bench, machine) / "console").is_fifo()


async def test_a_paused_machine_uses_no_processor_and_goes_on_when_it_is_resumed(bench: Bench) -> None:
    machine = small(bench)
    process = await bench.start(machine)
    await asyncio.to_thread(at_work, process)
    assert await bench.driver.inspect(machine.id) == dataclasses.replace(
        await bench.driver.inspect(machine.id), state=MachineState.RUNNING, process=process
    )
    for _ in range(2):
        await bench.driver.pause(machine.id)
        assert (await bench.make().inspect(machine.id)).state is MachineState.PAUSED
    before = used_s(process)
    await asyncio.sleep(0.5)
    assert used_s(process) - before < 0.1
    for _ in range(2):
        await bench.driver.resume(machine.id)
        assert (await bench.make().inspect(machine.id)).state is MachineState.RUNNING
    await asyncio.to_thread(at_work, process)


async def test_an_image_is_restored_in_other_jails_that_share_its_memory_and_cannot_write_it(bench: Bench) -> None:
    machine, image = small(bench), bench.image()
    process = await bench.start(machine)
    await asyncio.to_thread(at_work, process)
    await bench.checkpoint(machine, image)
    assert (await bench.driver.inspect(machine.id)).state is MachineState.RUNNING
    assert list((bench.directory / "images/jails" / machine.id / "out").iterdir()) == []
    await bench.driver.check_image(image)
    for name in ("state", "memory"):
        info = (image / name).stat()
        assert (info.st_uid, info.st_mode & 0o777) == (0, 0o444)
    assert (image / "memory").stat().st_size == RESOURCES.memory_mib << 20
    await bench.driver.destroy(machine.id, process)
    users = set()
    for _ in range(2):
        fork = small(bench)
        restored = await bench.restore(fork, image)
        assert (await bench.driver.inspect(fork.id)).state is MachineState.RUNNING
        await asyncio.to_thread(at_work, restored)
        maps = Path(f"/proc/{restored.pid}/maps").read_text().splitlines()
        [memory] = [line.split() for line in maps if line.endswith("/memory")]
        assert memory[1] == "rw-p"
        assert memory[4] == str((image / "memory").stat().st_ino)
        users.add(status(restored)["Uid"][0])
        await bench.driver.pause(fork.id)
    assert len(users) == 2


async def test_an_image_that_is_cut_or_of_another_release_or_processor_is_refused(bench: Bench) -> None:
    machine, image = small(bench), bench.image()
    await bench.start(machine)
    await bench.driver.checkpoint(machine.id, image)
    manifest = image / "space.json"
    was = manifest.read_text()
    for old, new in (('"version": "1.12.1"', '"version": "1.13.0"'), ('"processor": "', '"processor": "x')):
        assert old in was
        manifest.write_text(was.replace(old, new))
        with pytest.raises(HostError) as caught:
            await bench.driver.check_image(image)
        assert caught.value.code == "image-version"
    manifest.write_text(was)
    os.truncate(image / "memory", 4096)
    with pytest.raises(HostError) as caught:
        await bench.driver.check_image(image)
    assert caught.value.code == "image-damaged"


async def test_a_machine_joins_its_cgroups_before_it_runs(bench: Bench) -> None:
    first = Path("/sys/fs/cgroup/pids")  # of version 1; version 2 has one tree for all
    group = (first if first.is_dir() else first.parent) / f"spct-{os.getpid()}"
    group.mkdir()
    try:
        machine = dataclasses.replace(small(bench), cgroups=(group / "cgroup.procs",))
        process = await bench.start(machine)
        inside = {process.pid, relay(bench, machine).pid}
        assert {int(word) for word in (group / "cgroup.procs").read_text().split()} == inside
        await bench.driver.destroy(machine.id, process)
        assert (group / "cgroup.procs").read_text() == ""
    finally:
        group.rmdir()


async def test_a_firecracker_that_was_killed_is_absent_and_leaves_nothing_once_destroyed(bench: Bench) -> None:
    machine = small(bench)
    process = await bench.start(machine)
    assert machine.id in await bench.driver.known()
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.to_thread(wait, lambda: not processes.is_alive(process), "it has ended")
    assert (await bench.driver.inspect(machine.id)).state is MachineState.ABSENT
    for method in (bench.driver.pause, bench.driver.resume):
        with pytest.raises(MachineLost):
            await method(machine.id)
    for _ in range(2):
        await bench.driver.destroy(machine.id, process)
    assert left(bench, machine) == []
    assert await bench.driver.known() == frozenset()


@pytest.mark.parametrize("seen", ["sh", "firecracker", "relay.py"])
def test_a_start_that_is_cut_off_at_any_moment_leaves_nothing(bench: Bench, seen: str) -> None:
    """The broker is killed while the jailer is about to be started (held up by a cgroup that nobody may join yet), when
    it has become Firecracker, or when the relay is started.
    """
    machine = small(bench)
    if seen == "sh":
        os.mkfifo(bench.directory / "cgroup.procs")
        machine = dataclasses.replace(machine, cgroups=(bench.directory / "cgroup.procs",))
    starter = os.fork()
    if starter == 0:
        try:
            asyncio.run(bench.start(machine))
        finally:
            os._exit(1)

    def runs() -> bool:
        bundle_path = bundle(bench, machine)
        found = [words for _, words in processes.processes_with_argument(f"vm-{machine.id}")]
        found += [words for _, words in processes.processes_with_argument(str(bundle_path / "relay.json"))]
        return any(Path(word).name == seen for words in found for word in words)

    wait(runs, f"{seen} runs")
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    again = bench.make()
    asyncio.run(again.end_strays())
    asyncio.run(again.destroy(machine.id, None))
    assert left(bench, machine) == []


async def test_a_checkpoint_whose_caller_died_leaves_a_machine_that_stands_until_it_is_resumed(bench: Bench) -> None:
    machine = small(bench)
    process = await bench.start(machine)
    # As a broker leaves it that is killed after the request to stand still.
    await bench.driver.pause(machine.id)
    Bundle(bundle(bench, machine)).note_standing(still=True)
    (bench.directory / "images/jails" / machine.id / "out" / "memory").touch()
    again = bench.make()
    await again.end_strays()
    assert (await again.inspect(machine.id)).state is MachineState.PAUSED
    await again.resume(machine.id)
    assert (await again.inspect(machine.id)).state is MachineState.RUNNING
    assert not Bundle(bundle(bench, machine)).standing
    assert list((bench.directory / "images/jails" / machine.id / "out").iterdir()) == []
    await asyncio.to_thread(at_work, process)


async def test_jails_that_a_reboot_left_are_removed_and_no_others(bench: Bench) -> None:
    machine = small(bench)
    await bench.driver.prepare(machine)
    stale = bench.directory / "images/jails" / f"{machine.id[:-1]}0"
    (stale / "firecracker/root").mkdir(parents=True)
    await bench.make().end_strays()
    assert not stale.exists()
    assert (stale.parent / machine.id).exists()


async def test_the_channel_has_a_relay_of_the_machines_user_that_ends_with_the_machine(bench: Bench) -> None:
    machine = small(bench)
    process = await bench.start(machine)
    carrier = relay(bench, machine)
    found = status(carrier)
    assert found["Uid"] == status(process)["Uid"]
    assert found["CapEff"] == ["0" * 16]
    out = os.open(bench.channel_directory(machine) / "out", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert not hung_up(out)
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(wait, lambda: hung_up(out), "end of file on the channel")
        await asyncio.to_thread(wait, lambda: not processes.is_alive(carrier), "the relay has ended")
    finally:
        os.close(out)


async def test_a_machine_whose_relay_was_killed_is_absent_and_leaves_nothing_once_destroyed(bench: Bench) -> None:
    machine = small(bench)
    await bench.start(machine)
    carrier = relay(bench, machine)
    os.kill(carrier.pid, signal.SIGKILL)
    await asyncio.to_thread(wait, lambda: not processes.is_alive(carrier), "it has ended")
    assert (await bench.driver.inspect(machine.id)).state is MachineState.ABSENT
    await bench.driver.destroy(machine.id, None)
    assert left(bench, machine) == []


async def test_a_checkpoint_that_fails_leaves_a_machine_that_goes_on_and_can_be_written_again(bench: Bench) -> None:
    machine = small(bench)
    process = await bench.start(machine)
    out = bench.directory / "images/jails" / machine.id / "out"
    image = bench.image()
    (image / "memory").touch()
    with pytest.raises(HostError) as caught:
        await bench.driver.checkpoint(machine.id, image)
    assert caught.value.code == "checkpoint-failed"
    assert (await bench.driver.inspect(machine.id)).state is MachineState.RUNNING
    await asyncio.to_thread(at_work, process)
    (out / "memory").mkdir()  # as one that was taken over may leave it
    image = bench.image()
    await bench.checkpoint(machine, image)
    await bench.driver.check_image(image)
    assert list(out.iterdir()) == []


async def test_why_a_firecracker_did_not_start_is_told_without_host_paths(bench: Bench) -> None:
    kernel = bench.directory / "kernel"
    kernel.mkdir()
    for name in ("vmlinux", "initrd"):
        (kernel / name).write_text("no kernel")
    guest, state = printed_path("guest-runtime"), bench.directory / "state"
    bench.driver = FirecrackerDriver(FIRECRACKER, kernel, guest, bench.directory / "images", state)
    machine = small(bench)
    with pytest.raises(HostError, match=r"did not start: .* refused /actions") as caught:
        await bench.start(machine)
    assert caught.value.code == "start-failed"
    assert str(bench.directory) not in str(caught.value)
    await bench.driver.destroy(machine.id, None)
    assert left(bench, machine) == []

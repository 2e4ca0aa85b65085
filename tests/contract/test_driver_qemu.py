"""What virtual machines promise beyond the contract of all drivers: their link, their disks, and who their QEMU is."""

import asyncio
import base64
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from space.drivers.base import Machine, MachineState
from space.drivers.processes import Process
from space.drivers.qemu import QemuDriver
from space.errors import HostError
from tests import installation
from tests.agent import Peer
from tests.driver_bench import Bench, bench, largest_file, wait

__all__ = ["bench"]

pytestmark = pytest.mark.parametrize("bench", ["qemu"], indirect=True)

CLOCK_OFF_NS = 500_000_000
SHIFT_NS = 3600 * 10**9
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as one:
    one.sendall(b"hello")
    print(one.recv(100).decode(), one.getsockname()[0])
"""
# Opens a connection, and tells what becomes of it whenever it is asked to.
HOLD = """
import socket, sys, time
one = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
one.settimeout(10)
print("connected", flush=True)
sys.stdin.readline()
try:
    one.sendall(b"still there?")
    print("answered", one.recv(100), flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""
# Starts as many processes as it can, at most a hundred; says how many, and ends them.
MANY = """
import os
waits, goes_on = os.pipe()
count = 0
try:
    for count in range(100):
        if os.fork() == 0:
            os.close(goes_on)
            os.read(waits, 1)
            os._exit(0)
except BlockingIOError:
    pass
os.close(goes_on)
for _ in range(count):
    os.wait()
print(count)
"""
FACTS = """
import os
print(os.uname().release)
print(open("/proc/1/comm").read().strip())
print(open("/sys/fs/cgroup/cgroup.controllers").read().strip())
print(os.statvfs("/").f_frsize * os.statvfs("/").f_blocks >> 20)
try:
    os.open("/.space/x", os.O_CREAT)
except OSError as error:
    print(error.errno)
for disk in ("vda", "vdc"):
    try:
        os.pwrite(os.open("/dev/" + disk, os.O_RDWR), b"x", 0)
    except OSError as error:
        print(error.errno)
"""


@pytest.fixture
def qemu(bench: Bench) -> Bench:
    return bench


@pytest.fixture
def host() -> Iterator[socket.socket]:
    with socket.create_server(("0.0.0.0", 0)) as one:
        one.settimeout(20)
        yield one


def answer(host: socket.socket) -> str:
    """Answer one caller; return from where it called."""
    connection, (address, _) = host.accept()
    with connection:
        connection.sendall(connection.recv(100).upper())
    return address


def status(process: Process) -> dict[str, list[str]]:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}


def jailed(process: Process) -> set[str]:
    """What a machine's program has in its root directory, none of which it could write even if it were root."""
    root = Path(f"/proc/{process.pid}/root")
    for directory in (root, root / "usr", root / "kernel"):
        with pytest.raises(OSError, match="Read-only"):
            (directory / "new").touch()
    return {path.name for path in root.iterdir()}


def namespace(process: str) -> Path:
    return Path(f"/proc/{process}/ns/net").readlink()


async def test_a_machine_has_a_kernel_and_disks_of_its_own_and_a_qemu_without_rights(qemu: Bench) -> None:
    machine, other = qemu.machine(), qemu.machine()
    process = await qemu.start(machine)
    with qemu.peer(machine) as peer:
        release, first, controllers, mib, *errors = peer.run(*qemu.python, FACTS).stdout.decode().split("\n")
    assert release != os.uname().release
    assert first.startswith("ld-linux")
    assert {"cpu", "memory", "pids"} <= set(controllers.split())
    assert 256 <= int(mib) < 300
    read_only, not_permitted = "30", "1"
    assert [error for error in errors if error] == [read_only, not_permitted, not_permitted]

    await qemu.driver.prepare(other)
    second = await qemu.start(other)
    users = set()
    for one in (process, second):
        found = status(one)
        assert found["Groups"] == []
        assert {found[name][0] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert found["NoNewPrivs"] == ["1"]
        assert found["Seccomp"] == ["2"]
        assert len(set(found["Uid"] + found["Gid"])) == 1
        users.add(found["Uid"][0])
        assert namespace(str(one.pid)) != namespace("self")
        assert 512 << 20 < largest_file(one) < 640 << 20, (
            "room for an image of its memory, which is larger than its disk"
        )
        assert jailed(one) == {"usr", "bin", "lib", "lib64", "kernel"}
    assert len(users) == 2
    assert "0" not in users


async def test_a_machine_reaches_its_link_as_the_links_address_and_a_fork_by_its_own(
    qemu: Bench, host: socket.socket
) -> None:
    """L15: what led out of a machine is dead in its fork, whose new connections come from the fork's own address."""
    numbers = secrets.SystemRandom().sample(range(120), 2)
    port = str(host.getsockname()[1])
    machine = qemu.machine()
    address = qemu.join(machine, numbers[0])
    await qemu.start(machine)
    with qemu.peer(machine) as peer:
        asking = peer.start(*qemu.python, ASK, address, port)
        assert await asyncio.to_thread(answer, host) == f"192.0.2.{2 * numbers[0] + 1}"
        assert peer.finish(asking).stdout.startswith(b"HELLO ")
        held = peer.start(*qemu.python, HOLD, address, port, id="cmdhold", stdin=True)
        connection, _ = await asyncio.to_thread(host.accept)
        number = held.streams["stdout"]
        peer.until(lambda: b"connected\n" in peer.data.get(number, b""), "it is connected")
    image = qemu.image()
    await qemu.checkpoint(machine, image)
    fork = fork_of(qemu, machine)
    address = qemu.join(fork, numbers[1])
    await qemu.restore(fork, image)
    with qemu.peer(fork) as peer:
        peer.adopts = {"cmdhold": {"stdout": b"", "stderr": b""}}
        peer.greet()
        asking = peer.start(*qemu.python, ASK, address, port)
        assert await asyncio.to_thread(answer, host) == f"192.0.2.{2 * numbers[1] + 1}"
        assert peer.finish(asking).stdout.startswith(b"HELLO ")
        assert peer.welcome is not None
        [command] = [one for one in peer.welcome["commands"] if one["id"] == "cmdhold"]
        stdin, stdout = (command["streams"][name]["number"] for name in ("stdin", "stdout"))
        peer.channel.send(stdin, b"\n")
        peer.until(lambda: b"\n" in bytes(peer.data[stdout]).removeprefix(b"connected\n"), "it tells", 30)
        assert bytes(peer.data[stdout]) in (b"connected\nConnectionResetError\n", b"connected\nBrokenPipeError\n")
    with connection:
        connection.settimeout(0)
        with pytest.raises(BlockingIOError):
            connection.recv(1)


def fork_of(bench: Bench, machine: Machine) -> Machine:
    fork = bench.machine()
    assert machine.blocks is not None
    assert fork.blocks is not None
    fork.blocks.layer.write_bytes(machine.blocks.layer.read_bytes())
    return fork


async def test_what_a_machine_wrote_is_there_after_it_was_killed_and_started_again(qemu: Bench) -> None:
    machine = qemu.machine()
    process = await qemu.start(machine)
    with qemu.peer(machine) as peer:
        write = "import os; f = open('/kept', 'w'); f.write('kept'); f.flush(); os.fsync(f.fileno()); os.sync()"
        assert peer.run(*qemu.python, write).exit["code"] == 0
    os.kill(process.pid, signal.SIGKILL)
    wait(lambda: not Path(f"/proc/{process.pid}").exists(), "it has ended")
    await qemu.driver.destroy(machine.id, process)
    await qemu.start(machine)
    with qemu.peer(machine) as peer:
        assert peer.run(*qemu.python, "print(open('/kept').read())").stdout == b"kept\n"


async def test_a_checkpoint_whose_caller_died_leaves_a_machine_that_stands_until_it_is_resumed(qemu: Bench) -> None:
    machine = qemu.machine()
    await qemu.start(machine)
    bundle = qemu.directory / "state/qemu" / machine.id
    # As a broker leaves it that is killed between the request to stand still and the one to go on.
    await qemu.driver.pause(machine.id)
    (bundle / "standing").touch()
    again = qemu.make()
    await again.end_strays()
    assert (await again.inspect(machine.id)).state is MachineState.PAUSED
    await again.resume(machine.id)
    assert (await again.inspect(machine.id)).state is MachineState.RUNNING
    assert not (bundle / "standing").exists()


async def test_an_image_of_another_version_or_processor_is_refused(qemu: Bench) -> None:
    machine = qemu.machine()
    await qemu.start(machine)
    image = qemu.image()
    await qemu.checkpoint(machine, image)
    manifest = image / "space.json"
    was = manifest.read_text()
    khz = f'"counter_khz": {int(was.partition(chr(34) + "counter_khz" + chr(34) + ": ")[2].split("}")[0])}'
    for now in (was.replace("QEMU emulator", "QEMU later"), was.replace(khz, '"counter_khz": 1000')):
        assert now != was
        manifest.write_text(now)
        with pytest.raises(HostError) as caught:
            await qemu.driver.check_image(image)
        assert caught.value.code == "image-version"
    manifest.write_text(was)
    await qemu.driver.check_image(image)


async def test_why_a_qemu_did_not_start_is_told_and_nothing_is_left(qemu: Bench) -> None:
    kernel = qemu.directory / "kernel"
    kernel.mkdir()
    for name in ("vmlinux", "initrd"):
        (kernel / name).write_text("no kernel")
    guest, state = installation.printed_path("guest-runtime"), qemu.directory / "state"
    qemu.driver = QemuDriver(kernel, guest, qemu.directory / "images", state)
    machine = qemu.machine()
    with pytest.raises(HostError, match=r"did not start: .*kernel") as caught:
        await qemu.start(machine)
    assert caught.value.code == "start-failed"
    assert str(qemu.directory) not in str(caught.value)
    await qemu.driver.destroy(machine.id, None)
    assert processes_of(qemu, machine) == []


@pytest.mark.parametrize("seen", ["launch.py", "qemu-system-x86_64"])
def test_a_start_that_is_cut_off_at_any_moment_leaves_nothing(qemu: Bench, seen: str) -> None:
    """The broker is killed while the machine's program is about to be started, or has just been."""
    machine = qemu.machine()
    starter = os.fork()
    if starter == 0:
        try:
            asyncio.run(qemu.start(machine))
        finally:
            os._exit(1)
    wait(lambda: any(seen in word for words in processes_of(qemu, machine) for word in words), f"{seen} runs")
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    again = qemu.make()
    asyncio.run(again.end_strays())
    asyncio.run(again.destroy(machine.id, None))
    assert processes_of(qemu, machine) == []
    assert machine.id not in asyncio.run(again.known())


def processes_of(bench: Bench, machine: Machine) -> list[list[str]]:
    """Command lines of all that works for the machine."""
    bundle = str(bench.directory / "state/qemu" / machine.id)
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if any(word.startswith(bundle) for word in words):
                found.append(words)
    return found


def told(bench: Bench, peer: Peer, shift_ns: int) -> list[str]:
    """The guest's name for itself and how many CPUs it sees; its clock is the host's, but for the shift."""
    look = "import os, socket, time; print(socket.gethostname(), os.cpu_count(), time.time_ns())"
    before = time.time_ns()
    *names, now = peer.run(*bench.python, look).stdout.decode().split()
    assert before - CLOCK_OFF_NS < int(now) - shift_ns < time.time_ns() + CLOCK_OFF_NS
    return names


async def test_a_restored_guest_takes_over_the_hosts_time_and_its_new_name(qemu: Bench) -> None:
    """What the agent does at boot and after a restore, it can do with a kernel of its own."""
    machine = qemu.machine()
    process = await qemu.start(machine)
    with qemu.peer(machine) as peer:
        limits = {"cpus": 1, "memory_mib": 512, "pids": 64}
        peer.call("configure", hostname="first", machine_id="a" * 32, now_ns=time.time_ns(), limits=limits)
        assert told(qemu, peer, 0) == ["first", "1"]
        assert int(peer.run(*qemu.python, MANY).stdout) < limits["pids"]
        peer.call("quiesce", event="suspend")
    image = qemu.image()
    await qemu.checkpoint(machine, image)
    await qemu.driver.destroy(machine.id, process)
    await qemu.restore(machine, image)
    with qemu.peer(machine) as peer:
        entropy = base64.b64encode(os.urandom(32)).decode()
        shifted = time.time_ns() + SHIFT_NS
        answer = peer.call("awaken", now_ns=shifted, entropy=entropy, hostname="second", machine_id="b" * 32)
        assert abs(answer["clock_off_ns"]) < CLOCK_OFF_NS
        assert told(qemu, peer, SHIFT_NS) == ["second", "1"]


async def test_a_guest_that_uses_up_its_memory_ends_its_own_programs_and_not_the_machine(qemu: Bench) -> None:
    machine = qemu.machine()
    process = await qemu.start(machine)
    with qemu.peer(machine) as peer:
        hog = peer.start(*qemu.python, "kept = []\nwhile True: kept.append(b'x' * (8 << 20))")
        assert peer.finish(hog, 60).exit["kind"] in {"oom-killed", "signaled"}
        assert peer.run(*qemu.python, "print('lives')").stdout == b"lives\n"
    assert (await qemu.driver.inspect(machine.id)).process == process

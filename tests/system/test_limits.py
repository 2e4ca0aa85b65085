"""What a sandbox may use: memory, disk, and how its limits change while it runs. On gVisor, through broker and api."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from space import Client, Sandbox, Tty
from space.broker import cgroups
from space.broker.cgroups import Cgroups
from space.drivers.base import HostLimits
from space.errors import HostError
from tests.agent import Peer, Running
from tests.brokers import GUEST_PYTHON, Separate, Site, cleared, started, until
from tests.client import Api, wait_until
from tests.installation import Installation, gvisor_alone, patient, usual_driver

# It measures, or needs the host's memory and processors to itself.
pytestmark = pytest.mark.alone

MIB = 1 << 20
SIZE_MIB, GIVEN_MIB = 512, 1024
PATIENCE_S = 120
TOUCH = """
import ctypes, mmap, time

kept = []
def touch(mib):
    area = mmap.mmap(-1, mib << 20)
    whole = (ctypes.c_char * len(area)).from_buffer(area)
    ctypes.memset(ctypes.addressof(whole), 1, len(area))
    kept.append((area, whole))
"""
HOLD_50 = TOUCH + "touch(50)\nprint('holds', flush=True)\ntime.sleep(600)"
SLEEP = "import time\nprint('holds', flush=True)\ntime.sleep(600)"
# A file system in memory, larger than the machine's.
HOARD = """
import ctypes, os
os.makedirs('/hoard', exist_ok=True)
assert ctypes.CDLL(None).mount(b'none', b'/hoard', b'tmpfs', 0, b'size=8g') == 0
piece = os.urandom(1 << 20)
with open('/hoard/file', 'wb', buffering=0) as file:
    while True:
        file.write(piece)
"""
FILL = """
import errno, os, sys
size, piece = 0, os.urandom(1 << 20)
try:
    with open(sys.argv[1], 'wb', buffering=0) as file:
        while size < 4 << 30:
            size += file.write(piece)
            if sys.argv[2:]: os.fsync(file.fileno())
except OSError as error:
    print(errno.errorcode[error.errno], size >> 20)
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separate]:
    with started(Separate(tmp_path_factory.mktemp("broker"))) as one:
        yield one


@pytest.fixture
async def site(broker: Separate) -> AsyncIterator[Site]:
    async with cleared(broker) as one:
        yield one


@pytest.fixture
def small(api: Api) -> Iterator[str]:
    """A sandbox with a small disk."""
    sandbox = api.create(resources={"cpus": 1, "memory_mib": GIVEN_MIB, "disk_mib": 512, "pids": 256})
    yield sandbox
    api.delete(sandbox)


def holds(peer: Peer, command: Running) -> bool:
    return b"holds" in peer.data.get(command.streams["stdout"], b"")


def start_all(peer: Peer, code: str, count: int) -> list[Running]:
    """Start so many commands, and wait until each has what it wants or has ended."""
    commands = [peer.start(*GUEST_PYTHON, code) for _ in range(count)]
    peer.until(lambda: all(holds(peer, one) or one.id in peer.exits for one in commands), "settled", PATIENCE_S)
    return commands


def limit_of(instance: str, body: str) -> Path:
    """The file that holds the limit of all memory of a machine."""
    if cgroups.is_version_2():
        return cgroups.ROOT / instance / body / "memory.max"
    return cgroups.ROOT / "memory" / instance / body / "memory.limit_in_bytes"


@contextlib.contextmanager
def squeezed(limit: Path, size: int) -> Iterator[None]:
    """Hold a limit where it is put until the block ends, whatever gives the machine its usual one back meanwhile."""
    over = threading.Event()

    def hold() -> None:
        while not over.wait(0.02):
            # Version 1 refuses what is less than the machine uses; and the group goes with its machine.
            with contextlib.suppress(OSError):
                limit.write_text(str(size))

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        wait_until(lambda: int(limit.read_text()) == size, what="the limit")
        yield
    finally:
        over.set()
        holder.join()


def python(api: Api, sandbox: str, code: str, *arguments: str) -> dict[str, Any]:
    return api.exec(sandbox, ["python3", "-c", code, *arguments], user="root", timeout_s=patient(PATIENCE_S))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rounds", [2, pytest.param(5, marks=pytest.mark.long)])
async def test_sixty_four_processes_of_fifty_mib_end_for_want_of_memory_and_the_machine_lives(
    site: Site, rounds: int
) -> None:
    """E18, again and again on one machine: the fat are ended one by one, who is small lives on, and an exec answers."""
    machine = await site.boot(memory_mib=SIZE_MIB, pids=512)
    process = (await site.call("inspect", machine=machine))["pid"]
    with site.peer(machine) as peer:
        others = start_all(peer, SLEEP, 3)
        for _ in range(rounds):
            hogs = start_all(peer, HOLD_50, 64)
            assert peer.run(*GUEST_PYTHON, "print('answers')").stdout == b"answers\n"
            ended = [peer.exits[hog.id] for hog in hogs if hog.id in peer.exits]
            assert {one["kind"] for one in ended} == {"oom-killed"}
            assert 64 - SIZE_MIB // 50 <= len(ended) < 64, "no more than had to be"
            assert not {one.id for one in others} & peer.exits.keys()
            for hog in hogs:
                if hog.id not in peer.exits:
                    peer.call("signal", id=hog.id, signal=9, tree=True)
                peer.finish(hog)
    seen = await site.call("inspect", machine=machine)
    assert (seen["state"], seen["pid"], seen["usage"]["oom_kills"]) == ("running", process, 0)


@pytest.mark.parametrize(("chunk_mib", "count"), [(64, 32), (1, 2048)])
def test_a_program_that_takes_memory_at_full_speed_is_ended_alone(
    api: Api, small: str, chunk_mib: int, count: int
) -> None:
    """E18: 2 GiB in large pieces, and in many small ones."""
    result = python(api, small, f"{TOUCH}for _ in range({count}): touch({chunk_mib})")
    assert result["exit"] == {"kind": "oom-killed", "code": None, "signal": 9}
    assert api.output(small, "echo alive") == "alive\n"


def test_a_command_is_ended_for_all_that_it_has_started(api: Api, small: str) -> None:
    script = 'for n in $(seq 40); do python3 -c "$HOLD" & done; wait'
    result = api.exec(small, script, env={"HOLD": HOLD_50}, timeout_s=patient(PATIENCE_S))
    assert result["exit"]["kind"] == "oom-killed"
    assert api.exec(small, ["pgrep", "python3"])["exit"]["code"] == 1


@pytest.mark.parametrize("path", ["/dev/shm/filler", "/run/filler"])
def test_the_file_systems_in_memory_are_full_before_the_memory_is(api: Api, small: str, path: str) -> None:
    result = python(api, small, FILL, path)
    assert result["stdout"].split()[0] == "ENOSPC", result
    assert api.output(small, "echo alive") == "alive\n"
    api.output(small, ["rm", path], user="root")


def test_memory_that_no_kill_gives_back_ends_its_writer_and_hangs_nothing(api: Api, small: str) -> None:
    """E18: a file system in memory of the guest's own making, without bounds."""
    assert python(api, small, HOARD)["exit"]["kind"] == "oom-killed"
    api.http.delete(f"/v1/sandboxes/{small}/files", params={"path": "/hoard/file", "user": "root"}).raise_for_status()
    assert api.output(small, "echo alive") == "alive\n"


def test_a_shell_does_not_find_its_job_stopped_when_somebody_else_runs_out_of_memory(
    installation: Installation, api: Api, small: str
) -> None:
    with Client(installation.url, installation.key) as client:
        shell = Sandbox.connect(small, client=client).start(["bash", "-i"], tty=Tty(24, 80))
        shell.stdin.write("echo be''gun; sleep 300\n")
        wait_until(lambda: api.exec(small, ["pgrep", "-x", "sleep"])["exit"]["code"] == 0, what="the job runs")
        # Seconds each on gVisor's, half a minute on an emulated processor.
        for _ in range(8 if usual_driver() == "gvisor" else 2):
            assert python(api, small, f"{TOUCH}for _ in range(32): touch(64)")["exit"]["kind"] == "oom-killed"
        shell.stdin.write("\x03jobs; exit\n")
        seen = shell.result().stdout
    assert "begun" in seen
    assert "Stopped" not in seen


@gvisor_alone("a kernel of the machine's own keeps a part of its memory for itself")
def test_memory_inside_is_what_was_given_and_less_is_left_when_more_is_used(api: Api, small: str) -> None:
    # Usage is counted anew every 10 ms at the most: the sleep is for that.
    read = "dict((line.split()[0], int(line.split()[1])) for line in open('/proc/meminfo'))"
    code = f"{TOUCH}before = {read}\ntouch(100)\ntime.sleep(0.1)\nafter = {read}\nprint(before['MemTotal:'], before['MemAvailable:'], after['MemAvailable:'])"
    total, before, after = (int(word) // 1024 for word in python(api, small, code)["stdout"].split())
    assert total == GIVEN_MIB
    assert GIVEN_MIB // 2 < before < GIVEN_MIB
    assert 90 <= before - after <= 110


@gvisor_alone("the host takes no memory of a virtual machine that its own kernel has given")
def test_a_machine_that_ends_for_want_of_memory_says_so_with_its_limit_and_keeps_its_disk(
    installation: Installation, api: Api, small: str
) -> None:
    """The guard inside cannot help when the host takes away what it has given."""
    api.write(small, "/home/user/kept", b"kept")
    body = str(api.get(small)["id"])
    bodies = {one["machine"]: one["body"] for one in machines_of(installation)}
    with squeezed(limit_of(installation.settings.instance, bodies.get(body, body)), 100 * MIB):
        result = python(api, small, f"{TOUCH}for _ in range(300): touch(1)")
        assert result["exit"]["kind"] == "oom-killed"
        wait_until(lambda: api.get(small)["state"] == "failed", what="the sandbox has failed")
    failure = api.get(small)["failure"]
    assert failure["code"] == "oom-killed"
    assert f"{GIVEN_MIB} MiB" in failure["message"]
    api.verb(small, "start")
    assert api.read(small, "/home/user/kept") == b"kept"


async def test_one_machine_without_memory_ends_alone_and_at_once(broker: Separate, site: Site) -> None:
    """It does not linger half dead, and neither its neighbour nor the broker is touched."""
    poor, neighbour = await site.boot(memory_mib=128), await site.boot(memory_mib=128)
    process = (await site.call("inspect", machine=neighbour))["pid"]
    with squeezed(limit_of(site.settings.instance, poor), 60 * MIB), site.peer(poor) as peer:
        peer.start(*GUEST_PYTHON, f"{TOUCH}for _ in range(100): touch(1)")
        seen = await site.until(poor, "exited", patience_s=30)
    assert seen["cause"] == "oom-killed"
    beside = await site.call("inspect", machine=neighbour)
    assert (beside["state"], beside["pid"], beside["usage"]["oom_kills"]) == ("running", process, 0)
    assert broker.process is not None
    assert broker.process.poll() is None
    await site.call("start", machine=poor)
    with site.peer(poor) as peer:
        assert peer.run(*GUEST_PYTHON, "print('again')").stdout == b"again\n"


async def test_the_kernel_takes_machines_before_anything_else_when_the_whole_host_is_out_of_memory(
    broker: Separate, site: Site
) -> None:
    machine = await site.boot()
    sentry = (await site.call("inspect", machine=machine))["pid"]
    assert Path(f"/proc/{sentry}/oom_score_adj").read_text() == "1000\n"  # noqa: ASYNC240 a file of the kernel
    assert broker.process is not None
    own = Path(f"/proc/{broker.process.pid}/oom_score_adj").read_text()  # noqa: ASYNC240
    assert int(own) <= 0


async def test_every_limit_of_a_running_machine_can_be_changed(site: Site) -> None:
    machine = await site.boot(memory_mib=128)
    groups = Cgroups(site.settings.instance)
    with site.peer(machine) as peer:
        holder = peer.start(*GUEST_PYTHON, HOLD_50)
        peer.until(lambda: holds(peer, holder))
        more = HostLimits(cpus=1.25, memory_mib=700, pids=900, io_weight=300)
        groups.limit(machine, more)
        assert int(limit_of(site.settings.instance, machine).read_text()) == 700 * MIB
        with pytest.raises(HostError) as caught:
            groups.limit(machine, HostLimits(cpus=1, memory_mib=40, pids=100))
        assert caught.value.code == "cgroup-busy"
        assert int(limit_of(site.settings.instance, machine).read_text()) == 700 * MIB, "nothing has changed"
        peer.call("signal", id=holder.id, signal=9, tree=True)
        peer.finish(holder)
        await until(lambda: groups.usage(machine).memory_mib < 100, "the memory is given back")
        groups.limit(machine, HostLimits(cpus=1, memory_mib=200, pids=400))
        assert int(limit_of(site.settings.instance, machine).read_text()) == 200 * MIB
        assert peer.run(*GUEST_PYTHON, "print('goes on')").stdout == b"goes on\n"


def test_a_full_disk_is_an_error_inside_and_takes_nothing_from_the_host(
    installation: Installation, api: Api, small: str
) -> None:
    """F10: every block of the store was the store's before; what is deleted can be written again."""
    store = installation.settings.broker_dir / "disks.btrfs"
    before = store.stat()
    assert before.st_blocks * 512 >= before.st_size, "the store's file is whole"
    sizes: list[int] = []
    for _ in range(2):
        error, size = python(api, small, FILL, "/home/user/filler", "sync")["stdout"].split()
        assert error in {"ENOSPC", "EDQUOT"}
        sizes.append(int(size))
        assert api.exec(small, "head -c 4M /dev/zero >/home/user/more")["exit"]["code"] != 0
        assert abs(store.stat().st_blocks - before.st_blocks) * 512 < MIB
        api.output(small, "rm -f /home/user/filler /home/user/more; sync", user="root")
    assert sizes[0] > 300
    assert sizes[1] > sizes[0] * 0.8
    assert api.output(small, "echo again >/home/user/more && cat /home/user/more") == "again\n"


def machines_of(installation: Installation) -> list[dict[str, Any]]:
    """What the broker says of all machines; a machine's body is its own unless it was a spare."""

    async def ask() -> list[dict[str, Any]]:
        from space.node.broker import BrokerClient

        client = BrokerClient(installation.settings.broker_socket)
        try:
            return await client.call("machines", timeout_s=30)
        finally:
            await client.close()

    return [{"body": one["machine"], **one} for one in asyncio.run(ask())]

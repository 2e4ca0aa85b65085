"""Commands in a machine with a kernel of its own: each in a control group, which the agent is never in. One machine."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from space.drivers.qemu import QemuDriver
from tests import installation
from tests.agent import Peer, Running
from tests.driver_bench import KERNEL, LOADER, Bench, unfit_for_qemu

PYTHON = (*LOADER, "-I", "-S", "-c")
PIDS = 64
PATIENCE_S = 60.0
ANSWER_S = 5.0
"""In which the agent answers, whatever commands do; processors are emulated and shared."""
OWN = "own = '/sys/fs/cgroup' + open('/proc/self/cgroup').read().strip().rpartition(':')[2]\n"
PLACES = """
import os
print(open('/proc/1/cgroup').read().strip(), open('/proc/self/cgroup').read().strip())
print(*(entry.name for entry in os.scandir('/sys/fs/cgroup/commands') if entry.is_dir()))
"""
TOGETHER = """
total = int(open('/proc/meminfo').readline().split()[1]) << 10
top = '/sys/fs/cgroup'
print(total, *(open(f'{top}/{name}').read().strip() for name in ('commands/memory.max', 'commands/pids.max', 'agent/memory.min')))
"""
DYING = "print(open('/sys/fs/cgroup/cgroup.stat').read().split()[3])"
# Every part of it multiplies for as long as it lives.
BOMB = """
import os, time
while True:
    try:
        os.fork()
    except BlockingIOError:
        os.write(1, b'full ')
        time.sleep(0.2)
"""
# The limit of its own group, which is in force only once it has been born.
LIMIT = f"""{OWN}
import time
until = time.monotonic() + 10
while time.monotonic() < until and not open(own + '/pids.max').read().strip().isdigit():
    time.sleep(0.01)
print(open(own + '/pids.max').read())
"""
HOG = """
kept = []
while True:
    kept.append(b'x' * (8 << 20))
"""
# Whose group may have little, and whose child takes it all while it does nothing but wait.
PARENT = f"""{OWN}
import os, sys
open(own + '/memory.max', 'w').write(str(48 << 20))
if os.fork():
    os.wait()
    sys.exit(0)
{HOG}"""
KILLS_ITSELF = "import os, sys\nsys.stdin.readline()\nos.kill(os.getpid(), 9)"
# In another session, twice over, in a group below its own, deaf to signals.
ESCAPE = f"""{OWN}
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.makedirs(own + '/below/deeper')
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(own + '/below/deeper/cgroup.procs', 'w').write('0')
        print(os.getpid(), flush=True)
        for fd in (0, 1, 2):
            os.close(fd)
        time.sleep(600)
    os._exit(0)
os.wait()
if sys.argv[1] == 'stays':
    time.sleep(600)
"""
ALIVE = """
import os, sys
for pid in sys.argv[1:]:
    try:
        print(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0])
    except OSError:
        print('gone')
"""


@pytest.fixture(scope="module", params=["qemu"])
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    if reason := installation.unfit() or unfit_for_qemu():
        pytest.skip(f"driver qemu {reason}")
    directory = tmp_path_factory.mktemp("machine")
    guest = installation.printed_path("guest-runtime")
    bench = Bench(directory, lambda: QemuDriver(KERNEL, guest, directory / "images", directory / "state"), PYTHON)
    try:
        asyncio.run(bench.start(bench.machine()))
        yield bench
    finally:
        bench.end()


@pytest.fixture
def peer(machine: Bench) -> Iterator[Peer]:
    with machine.peer(machine.started[0]) as one:
        one.call("configure", hostname="guest", limits={"cpus": 1, "memory_mib": 512, "pids": PIDS})
        yield one


def says(peer: Peer, code: str, *arguments: str) -> str:
    result = peer.run(*PYTHON, code, *arguments)
    assert result.exit["code"] == 0, result
    return result.stdout.decode()


def groups(peer: Peer) -> list[str]:
    """The groups that there are but for that of the one who looks."""
    places, names = says(peer, PLACES).splitlines()
    return [name for name in names.split() if not places.endswith(f"/{name}")]


def wait_for_output(peer: Peer, command: Running) -> str:
    number = command.streams["stdout"]
    peer.until(lambda: peer.data.get(number), "it says something", PATIENCE_S)
    return peer.data[number].decode()


def wait_for_no_group(peer: Peer) -> None:
    """Empty groups are looked for once a second."""
    deadline = time.monotonic() + PATIENCE_S
    while left := groups(peer):
        assert time.monotonic() < deadline, left


def answers(peer: Peer) -> None:
    began = time.monotonic()
    peer.call("metrics")
    assert time.monotonic() - began < ANSWER_S


def test_each_command_has_a_group_that_is_gone_with_it_and_the_agent_has_its_own(peer: Peer) -> None:
    waiting = peer.start(*PYTHON, "import sys; sys.stdin.readline()", stdin=True)
    agent, asking = says(peer, PLACES).splitlines()[0].split()
    assert agent == "0::/agent"
    assert asking.startswith("0::/commands/c")
    assert len(groups(peer)) == 1
    peer.call("signal", id=waiting.id, signal=9, tree=True)
    assert peer.finish(waiting).exit["kind"] == "signaled"
    assert groups(peer) == []


def test_all_commands_together_leave_memory_and_processes_for_the_agent(peer: Peer) -> None:
    total, memory, pids, reserved = map(int, says(peer, TOGETHER).split())
    assert total // 2 < memory < total - (32 << 20)
    assert PIDS < pids < 4 * PIDS
    assert reserved >= 32 << 20


def test_a_fork_bomb_leaves_room_for_another_command_and_is_ended_by_one_signal(peer: Peer) -> None:
    bomb = peer.start(*PYTHON, BOMB)
    wait_for_output(peer, bomb)
    answers(peer)
    assert 0 < int(says(peer, LIMIT)) < PIDS, "a limit of its own, and room within it"
    assert peer.call("metrics")["pids"] < 2 * PIDS + 100
    answers(peer)
    peer.call("signal", id=bomb.id, signal=9, tree=True)
    assert peer.finish(bomb).exit["kind"] == "signaled"
    assert groups(peer) == []


def test_only_who_the_kernel_has_ended_for_want_of_memory_is_said_to_be_and_ends_whole(peer: Peer) -> None:
    itself = peer.start(*PYTHON, KILLS_ITSELF, stdin=True)
    result = peer.finish(peer.start(*PYTHON, PARENT), PATIENCE_S)
    assert (result.exit["kind"], result.exit["signal"]) == ("oom-killed", 9)
    peer.feed(itself.streams["stdin"], b"\n")
    assert peer.finish(itself).exit["kind"] == "signaled"
    wait_for_no_group(peer)


def test_who_takes_all_memory_is_ended_alone_and_the_agent_answers_meanwhile(peer: Peer) -> None:
    small = peer.start(*PYTHON, "import sys; print(sys.stdin.readline())", stdin=True)
    hogs = [peer.start(*PYTHON, HOG) for _ in range(3)]
    deadline = time.monotonic() + PATIENCE_S
    while not all(hog.id in peer.exits for hog in hogs):
        assert time.monotonic() < deadline
        answers(peer)
        peer.step(0.2)
    assert {peer.finish(hog).exit["kind"] for hog in hogs} == {"oom-killed"}
    peer.feed(small.streams["stdin"], b"lives\n")
    assert peer.finish(small).stdout == b"lives\n\n"


def test_a_timeout_ends_what_is_deaf_and_in_another_session_and_group(peer: Peer) -> None:
    """E13"""
    command = peer.start(*PYTHON, ESCAPE, "stays", timeout_s=6)
    pids = [str(command.pid), wait_for_output(peer, command).strip()]
    peer.call("signal", id=command.id, signal=15, tree=True)
    assert says(peer, ALIVE, *pids).split() == ["S", "S"]
    assert peer.finish(command).exit["kind"] == "timed-out"
    assert says(peer, ALIVE, *pids).split() == ["gone", "gone"]
    assert groups(peer) == []


def test_what_a_command_has_left_running_lives_on_in_its_group_until_it_ends(peer: Peer) -> None:
    """E7"""
    result = peer.run(*PYTHON, ESCAPE, "ends")
    assert result.exit["kind"] == "exited"
    pid = result.stdout.decode().strip()
    assert says(peer, ALIVE, pid).split() == ["S"]
    assert len(groups(peer)) == 1
    says(peer, "import os, sys; os.kill(int(sys.argv[1]), 9)", pid)
    wait_for_no_group(peer)
    assert says(peer, ALIVE, pid).split() == ["gone"]


def test_the_kernel_does_not_remember_every_command_that_has_written_a_file(peer: Peer) -> None:
    before = int(says(peer, DYING))
    for number in range(70):
        says(peer, f"open('/tmp/file{number}', 'w').write('x')")
    assert int(says(peer, DYING)) < before + 55

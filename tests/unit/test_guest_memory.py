"""The agent's guard of memory, on ordinary processes of this machine and a meminfo that the test writes."""

import base64
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent import Agent, Peer, Running, alive

TOTAL_MIB = 800
LOW_MIB, FAT_MIB = TOTAL_MIB // 16, TOTAL_MIB // 32
HOLD = "import time\nheld = bytearray(b'x') * ({} << 20)\nprint('holds', flush=True)\ntime.sleep(600)"


class Memory(threading.Thread):
    """What the agent takes for the machine's memory: less is left the more the processes in ``users`` have resident."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.users: list[int] = []
        self._other_mib = TOTAL_MIB // 2
        self._over = threading.Event()

    def left(self, mib: int) -> None:
        """Have so much left with who uses memory now; less than nothing: more is used than there is."""
        self._other_mib = TOTAL_MIB - mib - self._resident()

    def run(self) -> None:
        while not self._over.wait(0.002):
            self.write()

    def end(self) -> None:
        self._over.set()
        self.join()

    def write(self) -> None:
        used = self._other_mib + self._resident()
        # As gVisor tells it: nothing is left, and the parts sum up to more than there is.
        values = {"MemTotal": TOTAL_MIB, "MemAvailable": max(0, TOTAL_MIB - used), "Cached": 90, "AnonPages": used - 90}
        text = "".join(f"{name}: {value << 10:9} kB\n" for name, value in values.items())
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        os.pwrite(fd, text.encode(), 0)  # in one piece and never shorter, so that no half is ever read
        os.close(fd)

    def _resident(self) -> int:
        return sum(map(resident_mib, self.users))


def resident_mib(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    except (OSError, IndexError):
        return 0


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    one = Memory(tmp_path / "meminfo")
    one.write()
    one.start()
    yield one
    one.end()


@pytest.fixture
def peer(tmp_path: Path, memory: Memory) -> Iterator[Peer]:
    agent = Agent(tmp_path / "channel", ("--meminfo", str(memory.path)))
    try:
        one = agent.peer()
        yield one
        one.close()
    finally:
        agent.stop()


def hold(peer: Peer, memory: Memory, mib: int) -> Running:
    """Start a command that uses so much, and wait until it does."""
    command = peer.start("python3", "-c", HOLD.format(mib))
    peer.until(lambda: b"holds" in peer.data.get(command.streams["stdout"], b""))
    memory.users.append(command.pid)
    return command


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def runs(peer: Peer, command: Running) -> None:
    """It lives, and does not stand still for longer than the guard needs."""
    peer.until(lambda: state(command.pid) == "S", "goes on")
    assert command.id not in peer.exits


def test_the_fattest_command_is_ended_and_the_others_go_on(peer: Peer, memory: Memory):
    """E18"""
    small, fat, middle = (hold(peer, memory, mib) for mib in (1, 4 * FAT_MIB, 2 * FAT_MIB))
    memory.left(LOW_MIB - 1)
    assert peer.finish(fat).exit["kind"] == "oom-killed"
    memory.left(TOTAL_MIB // 2)
    runs(peer, small)
    runs(peer, middle)


def test_who_is_to_be_ended_first_is_ended_before_who_is_fatter(peer: Peer, memory: Memory):
    fat, first = hold(peer, memory, 3 * FAT_MIB), hold(peer, memory, 2 * FAT_MIB)
    Path(f"/proc/{first.pid}/oom_score_adj").write_text("500")
    memory.left(LOW_MIB - 1)
    assert peer.finish(first).exit["kind"] == "oom-killed"
    memory.left(TOTAL_MIB // 2)
    runs(peer, fat)


def test_as_many_are_ended_as_it_takes_and_no_more(peer: Peer, memory: Memory):
    commands = [hold(peer, memory, size) for size in (FAT_MIB + 10, 60, 3 * FAT_MIB)]
    memory.left(-50)
    assert peer.finish(commands[2]).exit["kind"] == "oom-killed"
    assert peer.finish(commands[1]).exit["kind"] == "oom-killed"
    runs(peer, commands[0])


def test_all_of_a_command_is_ended_with_it(peer: Peer, memory: Memory):
    script = 'python3 -c "$HOLD" & echo $!; wait'
    command = peer.start("sh", "-c", script, env={"HOLD": HOLD.format(4 * FAT_MIB)})
    out = command.streams["stdout"]
    peer.until(lambda: b"holds" in peer.data.get(out, b""))
    child = int(peer.data[out].split()[0])
    memory.users.append(child)
    memory.left(0)
    result = peer.finish(command)
    assert (result.exit["kind"], result.exit["signal"]) == ("oom-killed", 9)
    assert not alive(child)


def test_what_an_ended_command_left_running_is_ended_too(peer: Peer, memory: Memory):
    script = 'nohup python3 -c "$HOLD" >/dev/null 2>&1 & echo $!'
    command = peer.start("sh", "-c", script, env={"HOLD": HOLD.format(4 * FAT_MIB)})
    result = peer.finish(command, forget=False)
    assert result.exit["kind"] == "exited"
    left = int(result.stdout)
    peer.until(lambda: resident_mib(left) >= 4 * FAT_MIB, "holds its memory")
    memory.users.append(left)
    memory.left(LOW_MIB - 1)
    peer.until(lambda: not alive(left), "is ended")


def test_of_what_nobody_waits_for_the_fattest_process_is_ended_and_the_rest_goes_on(peer: Peer, memory: Memory):
    script = 'python3 -c "$HOLD" & echo $!; sleep 600'
    service = peer.start("sh", "-c", script, env={"HOLD": HOLD.format(4 * FAT_MIB)})
    out = service.streams["stdout"]
    peer.until(lambda: b"holds" in peer.data.get(out, b""))
    worker = int(peer.data[out].split()[0])
    memory.users.append(worker)
    small = hold(peer, memory, 1)
    # As in a fork: what is not named is nobody's from then on.
    peer.call("quiesce")
    peer.greet()
    entropy = base64.b64encode(bytes(64)).decode()
    peer.call("awaken", now_ns=time.time_ns(), entropy=entropy, rename={small.id: small.id})
    memory.left(LOW_MIB - 1)
    peer.until(lambda: not alive(worker), "is ended")
    peer.until(lambda: state(service.pid) == "S", "goes on")
    runs(peer, small)


def test_a_command_whose_time_ran_out_is_not_said_to_have_used_up_the_memory(peer: Peer, memory: Memory):
    command = peer.start("python3", "-c", HOLD.format(4 * FAT_MIB), timeout_s=0.5)
    result = peer.finish(command)
    memory.left(0)
    assert result.exit["kind"] == "timed-out"


def test_small_commands_are_left_alone_when_what_is_used_is_nobodys(peer: Peer, memory: Memory):
    """E18: memory in a file system; ending the small does not help, and starting others goes on."""
    small = hold(peer, memory, 1)
    memory.left(LOW_MIB - 1)
    for _ in range(5):
        assert peer.run("true").exit["code"] == 0
    runs(peer, small)
    memory.left(-10)
    assert peer.run("true").exit["code"] == 0
    runs(peer, small)


def test_once_far_more_is_used_than_there_is_the_small_are_ended_too(peer: Peer, memory: Memory):
    small = hold(peer, memory, 1)
    memory.left(-2 * LOW_MIB)
    assert peer.finish(small).exit["kind"] == "oom-killed"


def test_a_command_that_is_started_meanwhile_runs_when_the_others_go_on(peer: Peer, memory: Memory):
    small, fat = hold(peer, memory, 1), hold(peer, memory, 4 * FAT_MIB)
    memory.left(LOW_MIB - 1)
    peer.finish(fat)
    assert peer.run("echo", "started").stdout == b"started\n"
    runs(peer, small)


def test_a_checkpoint_in_the_middle_of_it_finds_and_leaves_everything_in_order(peer: Peer, memory: Memory):
    small, fat = hold(peer, memory, 1), hold(peer, memory, 4 * FAT_MIB)
    memory.left(LOW_MIB - 1)
    peer.call("quiesce")
    assert state(small.pid) == "T"
    memory.left(TOTAL_MIB // 2)
    peer.greet()
    peer.call("awaken", now_ns=time.time_ns(), entropy=base64.b64encode(bytes(64)).decode())
    runs(peer, small)
    memory.left(LOW_MIB - 1)
    assert peer.finish(fat).exit["kind"] == "oom-killed"


def test_memory_that_cannot_be_told_is_not_watched(tmp_path: Path, memory: Memory):
    agent = Agent(tmp_path / "channel", ("--meminfo", str(tmp_path / "none")))
    try:
        peer = agent.peer()
        fat = hold(peer, memory, 4 * FAT_MIB)
        assert peer.run("true").exit["code"] == 0
        runs(peer, fat)
        peer.close()
    finally:
        agent.stop()

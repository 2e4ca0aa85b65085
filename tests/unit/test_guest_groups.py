"""Groups of processes by this kernel's own control groups, where they can be had."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent import SOURCE, Agent, Peer, alive
from tests.unit.test_guest_memory import FAT_MIB, LOW_MIB, TOTAL_MIB, Memory, hold, memory, state

__all__ = ["memory"]

HIERARCHIES = {
    "cgroup1": Path("/sys/fs/cgroup/pids"),
    "cgroup2": Path("/sys/fs/cgroup/unified"),
    "cgroup2-only": Path("/sys/fs/cgroup"),
}


def usable(name: str) -> Path | None:
    path = HIERARCHIES[name]
    mark = "tasks" if name == "cgroup1" else "cgroup.procs"
    fits = (path / mark).exists() and (name == "cgroup1" or not (path / "tasks").exists())
    return path if fits and os.access(path, os.W_OK) and os.getuid() == 0 else None


@pytest.fixture(params=list(HIERARCHIES))
def own_cgroup(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A control group of the test's own, with the agent's place and the commands' groups below it."""
    path = usable(request.param)
    if path is None:
        pytest.skip(f"no {request.param} hierarchy that root may write")
    top = path / f"space-test-{os.getpid()}"
    (top / "commands").mkdir(parents=True)
    try:
        yield top
    finally:
        deadline = time.monotonic() + 10
        for directory in [Path(one) for one, _, _ in os.walk(top, topdown=False)]:
            while directory.exists():
                try:
                    directory.rmdir()
                except OSError:
                    assert time.monotonic() < deadline, f"{directory} cannot be removed"


@pytest.fixture
def peer(own_cgroup: Path, tmp_path: Path) -> Iterator[Peer]:
    agent = Agent(tmp_path / "channel", options=("--cgroups", str(own_cgroup / "commands")))
    one = agent.peer()
    yield one
    agent.stop()


def groups_left(own_cgroup: Path) -> list[str]:
    return [path.name for path in (own_cgroup / "commands").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    "script",
    [
        "setsid env -i sleep 300 & echo $!; wait",
        "(setsid env -i sh -c 'sleep 300 & echo $!; exec >/dev/null 2>&1; wait' &); sleep 300",
        "trap '' TERM INT HUP; env -i sleep 300 & echo $!; wait",
    ],
    ids=["setsid", "double-fork", "ignores-signals"],
)
def test_a_timeout_kills_what_escaped_in_every_other_way(peer: Peer, own_cgroup: Path, script: str):
    """E13"""
    result = peer.sh(script, timeout_s=0.3)
    assert result.exit["kind"] == "timed-out"
    pids = [int(word) for word in result.stdout.split()]
    assert pids
    assert not any(alive(pid) for pid in pids)
    assert groups_left(own_cgroup) == []


def test_the_agent_is_never_in_a_commands_group(peer: Peer, own_cgroup: Path):
    command = peer.start("sleep", "300")
    inside = (next((own_cgroup / "commands").glob("c*/")) / "cgroup.procs").read_text().split()
    assert inside == [str(command.pid)]
    peer.call("signal", id=command.id, signal=9)
    peer.finish(command)


def test_the_group_of_a_background_child_is_removed_when_it_ends(peer: Peer, own_cgroup: Path):
    result = peer.sh("sleep 300 >/dev/null 2>&1 & echo $!")
    assert len(groups_left(own_cgroup)) == 1
    os.kill(int(result.stdout), 9)
    peer.until(lambda: groups_left(own_cgroup) == [])


def test_a_command_that_cannot_be_started_leaves_no_group(peer: Peer, own_cgroup: Path):
    with pytest.raises(Exception, match="not-found"):
        peer.run("nonesuch-program")
    assert groups_left(own_cgroup) == []


def test_what_multiplies_while_it_is_killed_is_ended(peer: Peer, own_cgroup: Path):
    """E13"""
    script = "breed() { while :; do (setsid sleep 0.02 &); done; }; (breed &); (breed &); breed"
    assert peer.run("bash", "-c", script, timeout_s=0.5).exit["kind"] == "timed-out"
    assert groups_left(own_cgroup) == []


def test_environments_are_left_alone_where_groups_do_not_need_them(peer: Peer):
    assert b"SPACE_COMMAND" not in peer.run("env").stdout


@pytest.mark.parametrize("own_cgroup", ["cgroup2", "cgroup2-only"], indirect=True)
def test_what_made_groups_of_its_own_is_signaled_and_killed_and_leaves_none(peer: Peer, own_cgroup: Path) -> None:
    """E13: as a program does that manages containers."""
    script = """
        trap : USR1
        own=$(echo "$TOP"/commands/c[0-9]*)
        mkdir -p "$own/below/deeper"
        for place in below below/deeper; do
            sh -c 'echo $$ >"$0/cgroup.procs"; trap "echo told" USR1; echo $$; while :; do sleep 0.1; done' "$own/$place" &
        done
        wait; wait; sleep 300
    """
    command = peer.start("sh", "-c", script, env={"TOP": str(own_cgroup)}, timeout_s=1.5)
    number = command.streams["stdout"]
    peer.until(lambda: len(peer.data.get(number, b"").split()) == 2, "both run")
    pids = [int(word) for word in peer.data[number].split()]
    peer.call("signal", id=command.id, signal=10, tree=True)
    peer.until(lambda: peer.data[number].count(b"told") == 2, "both are told")
    assert peer.finish(command).exit["kind"] == "timed-out"
    assert not any(alive(pid) for pid in pids)
    assert groups_left(own_cgroup) == []


@pytest.mark.parametrize("own_cgroup", ["cgroup2", "cgroup2-only"], indirect=True)
def test_the_agent_is_in_a_group_of_its_own_before_and_after_it_has_started_something(
    peer: Peer, own_cgroup: Path
) -> None:
    for _ in range(2):
        assert peer.run("true").exit["code"] == 0
        assert (own_cgroup / "agent/cgroup.procs").read_text().split() == [str(peer.welcome["pid"])]


WATCH = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
child = os.fork()
if not child:
    while True: time.sleep(0.01)
print(child, flush=True)
print("killed" if signal.sigwaitinfo({signal.SIGCHLD}).si_code == os.CLD_KILLED else "stopped", flush=True)
"""


def test_a_parent_is_not_told_that_its_child_stood_still_while_somebody_was_ended_for_want_of_memory(
    own_cgroup: Path, tmp_path: Path, memory: Memory
) -> None:
    if not (own_cgroup / "commands/cgroup.kill").exists():
        pytest.skip("version 1 is gVisor's, which freezes nothing")
    options = ("--cgroups", str(own_cgroup / "commands"), "--meminfo", str(memory.path))
    agent = Agent(tmp_path / "channel", options=options)
    try:
        peer = agent.peer()
        parent = peer.start("python3", "-c", WATCH)
        said = parent.streams["stdout"]
        peer.until(lambda: b"\n" in peer.data.get(said, b""), "it has a child")
        child = int(peer.data[said])
        for _ in range(3):
            fat = hold(peer, memory, 4 * FAT_MIB)
            memory.left(LOW_MIB - 1)
            assert peer.finish(fat).exit["kind"] == "oom-killed"
            memory.left(TOTAL_MIB // 2)
            peer.until(lambda: (own_cgroup / "commands/cgroup.freeze").read_text() == "0\n", "all go on")
        assert state(child) in "SR"
        os.kill(child, 9)
        assert peer.finish(parent).stdout.endswith(b"\nkilled\n")
    finally:
        agent.stop()


def test_who_starts_something_in_groups_that_stand_still_does_not_stand_still(own_cgroup: Path) -> None:
    script = (
        "import sys; from space.guest.cgroups import Groups\n"
        "groups = Groups(sys.argv[1]); group = groups.new('one'); frozen = groups.freeze(frozen=True)\n"
        "with group: print(frozen)\n"
    )
    words = [sys.executable, "-c", script, str(own_cgroup / "commands")]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == f"{(own_cgroup / 'commands/cgroup.kill').exists()}\n"

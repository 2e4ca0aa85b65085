"""Groups of processes by this kernel's own control groups, where they can be had."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent import Agent, Peer, alive

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
        for directory in [*sorted(top.glob("commands/*/")), top / "commands", top]:
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

"""What happens around a checkpoint: hooks, copies with names of their own, a source that goes on without a greeting."""

import base64
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from space.guest import hooks, identity, standstill
from space.guest.system import Refused
from tests.agent import Agent, Peer, Refusal, alive

ROOT = pytest.mark.skipif(os.getuid() != 0, reason="hooks are root's: needs root")
MACHINE_ID = "0123456789abcdef" * 2


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    one = tmp_path / "hooks"
    for event in (hooks.PRE_SUSPEND, hooks.POST_WAKE):
        (one / event).mkdir(parents=True)
    return one


@pytest.fixture
def agent(tmp_path: Path, directory: Path) -> Iterator[Agent]:
    one = Agent(tmp_path / "channel", ("--hooks", str(directory)))
    yield one
    one.stop()


def hook(directory: Path, event: str, name: str, script: str, mode: int = 0o755) -> Path:
    path = directory / event / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(mode)
    return path


def wake(peer: Peer, **fields: object) -> dict:
    return peer.call("awaken", now_ns=time.time_ns(), entropy=base64.b64encode(os.urandom(32)).decode(), **fields)


class TestHooks:
    @ROOT
    def test_they_run_in_order_before_the_standstill_and_before_going_on(
        self, agent: Agent, directory: Path, tmp_path: Path
    ):
        said, mark = tmp_path / "said", tmp_path / "mark"
        told = f'echo "$0 $SPACE_EVENT $SPACE_SANDBOX $(cat {mark})" >> {said}'
        for event in (hooks.PRE_SUSPEND, hooks.POST_WAKE):
            hook(directory, event, "20-second", f"{told}; exit 3")
            hook(directory, event, "10-first", told)
        peer = agent.peer()
        peer.call("configure", hostname="box")
        command = peer.start("sh", "-c", f"while :; do date +%N > {mark}.new; mv {mark}.new {mark}; done")
        peer.until(mark.exists)
        before = peer.call("quiesce", event="suspend")["hooks"]
        stood = mark.read_text().strip()
        peer.greet()
        after = wake(peer)["hooks"]
        outcomes = [
            {"name": "10-first", "outcome": "exited", "exit": 0},
            {"name": "20-second", "outcome": "exited", "exit": 3},
        ]
        assert before == after == outcomes
        lines = [line.split() for line in said.read_text().splitlines()]
        assert [(Path(line[0]).name, line[1], line[2]) for line in lines] == [
            ("10-first", "suspend", "box"),
            ("20-second", "suspend", "box"),
            ("10-first", "wake", "box"),
            ("20-second", "wake", "box"),
        ]
        assert lines[2][3] == lines[3][3] == stood, "no user process had gone on yet"
        peer.until(lambda: mark.read_text().strip() not in ("", stood))
        peer.call("signal", id=command.id, signal=9)
        peer.finish(command)

    @ROOT
    def test_a_hook_that_takes_too_long_is_killed_with_all_it_started_and_the_next_one_runs(
        self, agent: Agent, directory: Path, tmp_path: Path
    ):
        pids = tmp_path / "pids"
        hook(directory, hooks.POST_WAKE, "1", f"setsid sleep 91 & echo $! > {pids}; sleep 91")
        hook(directory, hooks.POST_WAKE, "2", "exit 0")
        peer = agent.peer()
        peer.call("quiesce", event="suspend")
        peer.greet()
        number = peer.ask("awaken")
        peer.until(lambda: pids.exists() and pids.read_text().strip() != "")
        assert peer.call("activity")["commands"] == 0, "the agent answers while hooks run"
        results = peer.answer(number, hooks.EACH_S + 10)["hooks"]
        assert [(one["name"], one["outcome"]) for one in results] == [("1", "timed-out"), ("2", "exited")]
        assert not alive(int(pids.read_text()))
        assert peer.run("echo", "on").stdout == b"on\n"

    @ROOT
    def test_a_new_greeting_ends_hooks_and_the_guest_does_not_stop_behind_the_hosts_back(
        self, agent: Agent, directory: Path, tmp_path: Path
    ):
        pid = tmp_path / "pid"
        hook(directory, hooks.PRE_SUSPEND, "slow", f"echo $$ > {pid}; sleep 92")
        peer = agent.peer()
        peer.ask("quiesce", event="suspend")
        peer.until(lambda: pid.exists() and pid.read_text().strip() != "")
        peer.greet()
        peer.until(lambda: not alive(int(pid.read_text())))
        for _ in range(20):
            peer.step(0.01)
        assert peer.run("echo", "on").stdout == b"on\n"

    @ROOT
    def test_only_what_root_alone_can_have_put_there_is_run(self, directory: Path, tmp_path: Path):
        own = hook(directory, hooks.PRE_SUSPEND, "own", "exit 0")
        hook(directory, hooks.PRE_SUSPEND, "note", "exit 0", 0o644)
        hook(directory, hooks.PRE_SUSPEND, "open", "exit 0", 0o757)
        os.chown(hook(directory, hooks.PRE_SUSPEND, "others", "exit 0"), 1000, 1000)
        (directory / hooks.PRE_SUSPEND / "through").symlink_to(own)
        found = hooks.find(str(directory), hooks.PRE_SUSPEND)
        assert found == [("open", None), ("others", None), ("own", str(own)), ("through", None)]
        (directory / hooks.PRE_SUSPEND).chmod(0o777)
        assert hooks.find(str(directory), hooks.PRE_SUSPEND) == []
        (directory / hooks.PRE_SUSPEND).chmod(0o755)
        os.chown(directory, 1000, 1000)
        assert hooks.find(str(directory), hooks.PRE_SUSPEND) == []
        link = tmp_path / "link"
        os.chown(directory, 0, 0)
        link.symlink_to(directory)
        assert hooks.find(str(link), hooks.PRE_SUSPEND) == []
        assert hooks.find(str(tmp_path / "none"), hooks.PRE_SUSPEND) == []

    @ROOT
    def test_stopping_and_a_second_awaken_run_none(self, agent: Agent, directory: Path, tmp_path: Path):
        ran = tmp_path / "ran"
        for event in (hooks.PRE_SUSPEND, hooks.POST_WAKE):
            hook(directory, event, "1", f"echo {event} >> {ran}")
        peer = agent.peer()
        assert peer.call("quiesce")["hooks"] == []
        peer.greet()
        assert not ran.exists()
        assert len(wake(peer)["hooks"]) == 1
        assert wake(peer)["hooks"] == []
        assert ran.read_text() == "post-wake.d\n"


class TestGoingOnWithoutAGreeting:
    """A snapshot leaves its source where it is: no byte was lost, so nothing is made anew."""

    def test_what_is_asked_meanwhile_waits_and_transfers_go_on(self, agent: Agent, tmp_path: Path):
        size = 8 << 20
        (tmp_path / "f").write_bytes(os.urandom(size))
        peer = agent.peer(acks=False)
        number = peer.channel.new_number()
        peer.channel.open_receive(number)
        peer.call("file-read", path=str(tmp_path / "f"), stream=number)
        peer.until(lambda: len(peer.data.get(number, b"")) == 1 << 20)
        command = peer.start("sh", "-c", "while :; do echo x; done")
        peer.until(lambda: peer.data.get(command.streams["stdout"]))
        peer.call("quiesce", event="snapshot")
        count = peer.count
        started = peer.ask("start", id="later", argv=["true"], streams={"stdout": 9001, "stderr": 9002})
        stat = peer.ask("stat", path=str(tmp_path / "f"))
        for _ in range(20):
            peer.step(0.01)
        assert peer.count == count
        assert not peer.replies
        assert wake(peer)["hooks"] == []
        assert peer.answer(stat)["size"] == size
        assert peer.answer(started)["pid"] > 0
        peer.acks = True
        peer.channel.ack(number, 1 << 20)
        peer.channel.ack(command.streams["stdout"], len(peer.data[command.streams["stdout"]]))
        peer.until(lambda: number in peer.ends)
        assert peer.data[number] == (tmp_path / "f").read_bytes()
        peer.call("signal", id=command.id, signal=9)
        peer.finish(command)

    def test_an_exit_during_the_standstill_is_told_afterwards(self, agent: Agent):
        peer = agent.peer()
        command = peer.start("sleep", "60")
        peer.call("quiesce", event="snapshot")
        os.kill(command.pid, signal.SIGKILL)
        peer.until(lambda: not alive(command.pid))
        for _ in range(10):
            peer.step(0.01)
        assert not peer.exits
        wake(peer)
        assert peer.finish(command).exit["signal"] == 9

    def test_a_host_that_comes_back_has_to_ask_again(self, agent: Agent):
        peer = agent.peer()
        peer.call("quiesce", event="snapshot")
        number = peer.ask("stat", path="/")
        peer.step(0.01)
        peer.close()
        second = Peer(agent.directory)
        second.greet()
        with pytest.raises(Refusal, match="quiesced"):
            second.call("stat", path="/")
        wake(second)
        assert number not in second.replies
        assert second.call("stat", path="/")["type"] == "directory"


class TestCopies:
    def test_running_commands_go_on_under_new_names_and_the_rest_is_forgotten(self, agent: Agent, tmp_path: Path):
        peer = agent.peer()
        named = peer.start("sh", "-c", "while read l; do echo got $l; done; exit 5", stdin=True)
        gate = tmp_path / "gate"
        other = peer.start(
            "sh", "-c", f"echo early; until [ -e {gate} ]; do sleep 0.01; done; seq 1 100000; echo $? > {gate}2"
        )
        fed = peer.start("sh", "-c", f"cat; touch {tmp_path}/eof; sleep 93", stdin=True)
        ended = peer.start("true")
        peer.until(lambda: ended.id in peer.exits and peer.data.get(other.streams["stdout"]) == b"early\n")
        peer.call("quiesce", event="snapshot")
        peer.greet()
        for _ in range(2):  # The host may have died before it could note the answer.
            wake(peer, rename={named.id: "copied"}, machine_id=MACHINE_ID, env={"FROM": "copy"})
            assert [one["id"] for one in peer.call("list")["commands"]] == ["copied"]
        peer.feed(named.streams["stdin"], b"one\n", end=True)
        named.id = "copied"
        result = peer.finish(named)
        assert (result.exit["code"], result.stdout) == (5, b"got one\n")
        gate.touch()
        status = tmp_path / "gate2"
        peer.until(lambda: status.exists() and status.read_text() == "0\n", "it could write all it wanted to")
        peer.until((tmp_path / "eof").exists)
        assert alive(fed.pid)
        assert peer.data[other.streams["stdout"]] == b"early\n"
        assert peer.exits.keys() == {ended.id, "copied"}
        assert peer.call("activity")["commands"] == 0
        assert peer.sh("echo $FROM").stdout == b"copy\n"
        os.kill(fed.pid, signal.SIGKILL)

    def test_a_terminal_that_nobody_owns_does_not_hang_up(self, agent: Agent, tmp_path: Path):
        peer = agent.peer()
        command = peer.start(
            "sh",
            "-c",
            f"trap 'touch {tmp_path}/hup' HUP; stty size; while :; do date; sleep 0.02; done",
            tty={"rows": 24, "cols": 80},
        )
        peer.until(lambda: peer.data.get(command.streams["tty"]))
        peer.call("quiesce", event="snapshot")
        peer.greet()
        wake(peer, rename={})
        for _ in range(20):
            peer.step(0.01)
        assert alive(command.pid)
        assert not (tmp_path / "hup").exists()
        os.kill(command.pid, signal.SIGKILL)


class TestIdentity:
    def test_the_machine_id_is_written_and_no_link_is_followed(self, tmp_path: Path):
        for name in ("etc", "var/lib/dbus"):
            (tmp_path / name).mkdir(parents=True)
        outside = tmp_path / "outside"
        outside.write_text("untouched")
        (tmp_path / "etc/machine-id").symlink_to(outside)
        (tmp_path / "var/lib/dbus/machine-id").write_text("old\n")
        identity.write_machine_id(MACHINE_ID, str(tmp_path))
        assert outside.read_text() == "untouched"
        for path in (tmp_path / "etc/machine-id", tmp_path / "var/lib/dbus/machine-id"):
            assert path.read_text() == f"{MACHINE_ID}\n"
            assert path.stat().st_mode & 0o777 == 0o444
            assert not path.is_symlink()
        assert [path.name for path in (tmp_path / "etc").iterdir()] == ["machine-id"]

    def test_a_link_of_dbus_to_it_is_left_alone_and_one_without_dbus_is_fine(self, tmp_path: Path):
        (tmp_path / "etc").mkdir()
        identity.write_machine_id(MACHINE_ID, str(tmp_path))
        (tmp_path / "var/lib/dbus").mkdir(parents=True)
        (tmp_path / "var/lib/dbus/machine-id").symlink_to("/etc/machine-id")
        identity.write_machine_id(MACHINE_ID[::-1], str(tmp_path))
        assert (tmp_path / "etc/machine-id").read_text() == f"{MACHINE_ID[::-1]}\n"
        assert (tmp_path / "var/lib/dbus/machine-id").is_symlink()

    def test_one_that_cannot_be_written_is_an_error(self, tmp_path: Path):
        (tmp_path / "etc/machine-id/x").mkdir(parents=True)
        with pytest.raises(Refused, match="machine-id"):
            identity.write_machine_id(MACHINE_ID, str(tmp_path))

    @pytest.mark.parametrize("wrong", ["", "ABCDEF" * 6, "0" * 31, "0" * 33, "../../../../../../../../../../etc"])
    def test_what_is_no_machine_id_is_refused(self, agent: Agent, wrong: str):
        with pytest.raises(Exception, match="machine_id"):
            agent.peer().call("configure", machine_id=wrong)

    def test_a_guest_whose_identity_cannot_be_had_stays_stopped(self, agent: Agent, tmp_path: Path):
        """L13 L15: nothing runs with the time, the randomness or the name of another."""
        peer = agent.peer()
        mark = tmp_path / "mark"
        command = peer.start("sh", "-c", f"while :; do date +%N > {mark}; done")
        peer.until(mark.exists)
        peer.call("quiesce", event="suspend")
        peer.greet()
        before = mark.read_bytes()
        with pytest.raises(Refusal, match="entropy"):
            peer.call("awaken", entropy="no base64")
        with pytest.raises(Refusal, match="quiesced"):
            peer.start("true")
        for _ in range(20):
            peer.step(0.01)
        assert mark.read_bytes() == before
        wake(peer)
        peer.until(lambda: mark.read_bytes() not in (before, b""))
        peer.call("signal", id=command.id, signal=9)
        peer.finish(command)

    @pytest.mark.parametrize(("cpus", "seen"), [(0.5, 1), (1.0, 1), (1.5, 2), (2.0, 2), (4000.0, None)])
    def test_programs_see_as_many_cpus_as_they_have(self, agent: Agent, cpus: float, seen: int | None):
        there = len(os.sched_getaffinity(0))
        peer = agent.peer()
        peer.call("configure", limits={"cpus": cpus})
        assert peer.run("nproc").stdout == f"{min(seen or there, there)}\n".encode()
        peer.call("configure", limits={"cpus": 4000.0})
        assert peer.run("nproc").stdout == f"{there}\n".encode()

    def test_answers_tell_how_far_the_clock_is_off(self, agent: Agent):
        """L13: as an ordinary process the agent leaves this machine's clock alone, and says so."""
        peer = agent.peer()
        off = peer.call("awaken", now_ns=time.time_ns() + 3600 * 10**9)
        assert json.dumps(off["clock_stepped_ns"]) == "0"
        assert 3599 * 10**9 < off["clock_off_ns"] < 3601 * 10**9


def test_a_stop_that_a_process_missed_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[int] = []

    def sent(pid: int, number: int) -> None:
        if number == signal.SIGSTOP and pid not in lost:
            lost.append(pid)
        else:
            os.kill(pid, number)

    monkeypatch.setattr(standstill, "send_signal", sent)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        one = standstill.Standstill()
        began = time.monotonic()
        try:
            one.begin()
            assert lost == [sleeper.pid]
            assert Path(f"/proc/{sleeper.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
            assert time.monotonic() - began < standstill._STOP_S_MAX
        finally:
            one.end()
            sleeper.kill()

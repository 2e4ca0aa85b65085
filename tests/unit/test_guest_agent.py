"""The agent and its channel: hosts that come and go, nonsense, standing still."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from space.protocol.frames import PADDING, FrameType, encode
from tests.agent import SOURCE, Agent, Peer, Refusal, descendants

COUNTER = "i=0; while [ $i -lt 200000 ]; do echo $i; i=$((i+1)); done"
COUNTED = "".join(f"{i}\n" for i in range(200_000)).encode()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    one = Agent(tmp_path / "channel")
    yield one
    one.stop()


def frame(kind: FrameType, number: int, payload: bytes) -> bytes:
    return b"".join(encode(kind, number, payload))


def adopt(peer: Peer, command_id: str, stored: dict[str, bytes]) -> dict[str, int]:
    """Greet as a host that has been started anew and has ``stored`` of a command's output."""
    peer.adopts[command_id] = stored
    welcome = peer.greet()
    record = next(command for command in welcome["commands"] if command["id"] == command_id)
    return {name: place["number"] for name, place in record["streams"].items()}


def test_no_byte_is_lost_or_doubled_when_the_host_is_killed_again_and_again(agent: Agent):
    peer = agent.peer()
    command = peer.start("sh", "-c", COUNTER)
    stored = {"stdout": b"", "stderr": b""}
    for round_number in range(8):
        before = len(stored["stdout"])
        number = command.streams["stdout"]
        peer.until(lambda n=number, b=before, p=peer: len(p.data.get(n, b"")) > b + 10_000)
        stored = {name: bytes(peer.data.get(number, b"")) for name, number in command.streams.items()}
        if round_number % 2:
            # It dies with half of a frame written, too.
            os.write(peer.to_guest, frame(FrameType.REQUEST, 4000 + round_number, b'{"op":"list"}')[: 5 + round_number])
        peer.close()
        peer = Peer(agent.directory)
        command.streams = adopt(peer, command.id, stored)
    assert peer.finish(command).stdout == COUNTED
    peer.close()


def test_a_command_goes_on_and_its_exit_is_kept_while_there_is_no_host(agent: Agent):
    peer = agent.peer()
    command = peer.start("sh", "-c", "sleep 0.2; echo out; exit 6")
    peer.close()
    second = Peer(agent.directory)
    second.greet()
    second.until(lambda: command.id in second.exits)
    assert second.exits[command.id]["code"] == 6
    third = Peer(agent.directory)
    command.streams = adopt(third, command.id, {"stdout": b"", "stderr": b""})
    assert third.finish(command).stdout == b"out\n"
    fourth = Peer(agent.directory)
    assert fourth.greet()["commands"] == []


def test_input_goes_on_where_the_guest_is(agent: Agent):
    peer = agent.peer()
    command = peer.start("cat", stdin=True)
    peer.feed(command.streams["stdin"], b"first ")
    peer.until(lambda: peer.data.get(command.streams["stdout"]) == b"first ")
    peer.close()
    second = Peer(agent.directory)
    numbers = adopt(second, command.id, {"stdout": b"first ", "stderr": b""})
    assert second.welcome is not None
    place = second.welcome["commands"][0]["streams"]["stdin"]
    assert place["produced"] == 6
    second.feed(numbers["stdin"], b"second", end=True)
    command.streams = numbers
    assert second.finish(command).stdout == b"first second"


def test_a_hello_ends_transfers_and_the_next_ones_work(agent: Agent, tmp_path: Path):
    (tmp_path / "f").write_bytes(bytes(8 << 20))
    peer = agent.peer(acks=False)
    for _ in range(3):
        number = peer.channel.new_number()
        peer.channel.open_receive(number)
        peer.call("file-read", path=str(tmp_path / "f"), stream=number)
        peer.greet()
        assert peer.resets[number] == "resynchronised"
    peer.acks = True
    assert len(peer.fetch("file-read", path=str(tmp_path / "f"))[1]) == 8 << 20


@pytest.mark.parametrize(
    "noise",
    [
        os.urandom(10_000),
        b"SP" * 5000,
        frame(FrameType.REQUEST, 5, b"\xff\x00"),
        frame(FrameType.REQUEST, 5, b'{"op":"' + b"x" * 100_000 + b'"}'),
        frame(FrameType.REQUEST, 5, b"[" * 200_000),
        frame(FrameType.REQUEST, 5, json.dumps({"op": "signal", "id": "x", "signal": 10**300}).encode()),
        frame(FrameType.WELCOME, 5, b"{}") + frame(FrameType.REPLY, 5, b"{}") + frame(FrameType.EVENT, 5, b"{}"),
        frame(FrameType.ACK, 5, b"\xff" * 8) + frame(FrameType.EOF, 5, b"\xff" * 8) + frame(FrameType.RESET, 5, b"?"),
        frame(FrameType.DATA, 2**32 - 1, bytes(200_000)),
        frame(FrameType.HELLO, 0, b"nonsense"),
        PADDING[:1000],
    ],
    ids=[
        "random",
        "magic",
        "not-utf8",
        "long-op",
        "nested",
        "huge-number",
        "wrong-way",
        "unknown-streams",
        "unknown-data",
        "bad-hello",
        "zeros",
    ],
)
def test_no_input_ends_the_agent(agent: Agent, noise: bytes):
    peer = agent.peer()
    command = peer.start("sh", "-c", "read x; echo $x", stdin=True)
    stored = {"stdout": b"", "stderr": b""}
    view = memoryview(noise)
    while view:
        view = view[os.write(peer.to_guest, view[:4096]) :]
        peer.step(0)
    numbers = adopt(peer2 := Peer(agent.directory), command.id, stored)
    peer2.feed(numbers["stdin"], b"still here\n")
    command.streams = numbers
    assert peer2.finish(command).stdout == b"still here\n"


def test_it_waits_for_a_host_that_closed_the_channel_and_comes_back(tmp_path: Path):
    for name in ("in", "out"):
        os.mkfifo(tmp_path / name)
    keep = os.open(tmp_path / "out", os.O_RDWR)
    source = os.open(tmp_path / "in", os.O_RDONLY | os.O_NONBLOCK)
    process = subprocess.Popen(
        [sys.executable, "-m", "space.guest"],
        stdin=source,
        stdout=keep,
        env={"PYTHONPATH": str(SOURCE), "PATH": os.defpath},
    )
    os.close(source)
    try:
        for _ in range(2):
            peer = Peer(tmp_path)
            peer.greet()
            peer.close()
            used = cpu_ticks(process.pid)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            assert cpu_ticks(process.pid) - used < 20, "it does not spin while nobody is there"
    finally:
        process.kill()
        process.wait()
        os.close(keep)


def cpu_ticks(pid: int) -> int:
    return sum(int(field) for field in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])


def test_an_unfinished_request_of_a_dead_host_does_not_answer_the_next(agent: Agent):
    peer = agent.peer()
    peer.ask("list")
    peer.channel.hello()
    peer.until(lambda: peer.welcome is not None and peer.channel.welcomed)
    assert [reply.failure["code"] for reply in peer.replies.values() if reply.failure] == ["outcome-unknown"]
    assert peer.call("list") == {"commands": []}


def test_metrics_and_activity(agent: Agent):
    peer = agent.peer()
    assert peer.call("activity")["commands"] == 0
    command = peer.start("sleep", "60")
    assert peer.call("activity")["commands"] == 1
    metrics = peer.call("metrics")
    assert metrics["commands"] == 1
    assert metrics["pids"] >= 2
    assert 0 < metrics["memory_used"] < metrics["memory_total"]
    assert 0 < metrics["disk_used"] < metrics["disk_total"]
    peer.call("signal", id=command.id, signal=9)
    peer.finish(command)
    assert peer.call("activity")["commands"] == 0


class TestStandingStill:
    def test_nothing_runs_and_nothing_is_said_between_quiesce_and_awaken(self, agent: Agent, tmp_path: Path):
        peer = agent.peer()
        mark = tmp_path / "mark"
        command = peer.start(
            "sh", "-c", f"(setsid sh -c 'while :; do date +%N > {mark}; done' &); while :; do echo x; done"
        )
        number = command.streams["stdout"]
        peer.until(lambda: mark.exists() and len(peer.data.get(number, b"")) > 1000)
        peer.call("quiesce")
        states = {state_of(pid) for pid in descendants(agent.process.pid)}
        assert states <= {"T", "Z", "D"}, "D: waits in the kernel for a stopped child"
        before, count = mark.read_bytes(), peer.count
        for _ in range(20):
            peer.step(0.01)
        assert mark.read_bytes() == before
        assert peer.count == count, "the reply was the last word"
        peer.greet()
        with pytest.raises(Refusal, match="quiesced"):
            peer.start("true")
        assert mark.read_bytes() == before
        peer.call("awaken", now_ns=time.time_ns(), entropy=base64.b64encode(os.urandom(32)).decode())
        peer.until(lambda: mark.read_bytes() not in (before, b"") and peer.count > count)
        peer.call("signal", id=command.id, signal=9)
        result = peer.finish(command)
        assert result.stdout == b"x\n" * (len(result.stdout) // 2)

    def test_what_was_stopped_already_stays_stopped(self, agent: Agent):
        peer = agent.peer()
        command = peer.start("sleep", "60")
        os.kill(command.pid, signal.SIGSTOP)
        peer.until(lambda: state_of(command.pid) == "T")
        peer.call("quiesce")
        peer.greet()
        peer.call("awaken")
        assert state_of(command.pid) == "T"
        peer.call("signal", id=command.id, signal=9)
        peer.finish(command)

    def test_a_shell_with_job_control_notices_nothing(self, agent: Agent):
        peer = agent.peer()
        plain = {"PS1": "$ ", "TERM": "dumb"}
        command = peer.start("bash", "--norc", "--noprofile", "-i", env=plain, tty={"rows": 24, "cols": 80})
        number = command.streams["tty"]
        peer.until(lambda: peer.data.get(number, b"").endswith(b"$ "), "the prompt")
        peer.feed(number, b"sleep 61 & sleep 62\n")
        peer.until(lambda: len(descendants(command.pid)) == 2)
        # The job's line is the last thing that the shell has to say until the second program ends.
        peer.until(lambda: re.search(rb"\[1\] \d+\r\n$", peer.data[number]), "the job's line")
        said = bytes(peer.data[number])
        for _ in range(3):
            peer.call("quiesce")
            peer.greet()
            peer.call("awaken")
            for _ in range(10):
                peer.step(0.02)
        assert bytes(peer.data[number]) == said
        assert len(descendants(command.pid)) == 2
        peer.feed(number, b"\x03")
        peer.until(lambda: len(descendants(command.pid)) == 1)
        peer.feed(number, b"jobs; exit 3\n")
        peer.until(lambda: b"Running" in peer.data[number])
        assert b"Stopped" not in peer.data[number]
        peer.feed(number, b"exit 3\n")
        peer.call("signal", id=command.id, signal=9)
        peer.finish(command)

    def test_a_time_limit_stands_still_too(self, agent: Agent):
        peer = agent.peer()
        command = peer.start("sleep", "60", timeout_s=2)
        peer.call("quiesce")
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            peer.step(0.05)
        peer.greet()
        assert peer.call("list")["commands"][0]["state"] == "running"
        peer.call("awaken")
        assert peer.finish(command).exit["kind"] == "timed-out"


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


class TestWatching:
    def watch(self, peer: Peer, path: Path, *, recursive: bool) -> int:
        number = peer.channel.new_number()
        peer.channel.open_receive(number)
        peer.call("watch", path=str(path), recursive=recursive, stream=number)
        return number

    def seen(self, peer: Peer, number: int) -> set[tuple[str, str]]:
        lines = bytes(peer.data.get(number, b"")).splitlines()
        return {(line["event"], line["path"]) for line in map(json.loads, lines)}

    def test_creations_in_directories_made_a_moment_ago_are_seen(self, agent: Agent, tmp_path: Path):
        """F8"""
        peer = agent.peer()
        top = tmp_path / "top"
        top.mkdir()
        number = self.watch(peer, top, recursive=True)
        for i in range(10):
            subprocess.run(f"mkdir -p {top}/{i}/b/c/d && touch {top}/{i}/b/c/d/x", shell=True, check=True)
        expected = {("create", f"{i}/b/c/d/x") for i in range(10)}
        peer.until(lambda: expected <= self.seen(peer, number))

    def test_every_kind_of_change_is_told_apart(self, agent: Agent, tmp_path: Path):
        peer = agent.peer()
        top = tmp_path / "top"
        top.mkdir()
        number = self.watch(peer, top, recursive=False)
        (top / "a").write_bytes(b"x")
        (top / "a").chmod(0o600)
        (top / "a").rename(top / "b")
        (top / "b").unlink()
        expected = {
            ("create", "a"),
            ("modify", "a"),
            ("attributes", "a"),
            ("moved-from", "a"),
            ("moved-to", "b"),
            ("delete", "b"),
        }
        peer.until(lambda: expected <= self.seen(peer, number))

    def test_the_end_of_what_is_watched_is_told(self, agent: Agent, tmp_path: Path):
        peer = agent.peer()
        (tmp_path / "top").mkdir()
        number = self.watch(peer, tmp_path / "top", recursive=True)
        (tmp_path / "top").rmdir()
        peer.until(lambda: number in peer.ends)
        assert ("gone", "") in self.seen(peer, number)

    def test_a_reader_who_is_too_slow_is_told_that_events_are_lost(self, agent: Agent, tmp_path: Path):
        """F8"""
        peer = agent.peer(acks=False)
        top = tmp_path / "top"
        top.mkdir()
        number = self.watch(peer, top, recursive=False)
        names = [top / f"{i:0200d}" for i in range(12_000)]
        for name in names:
            name.touch()
            peer.step(0)
        before = agent.memory_kib()
        for name in names:
            name.unlink()
            peer.step(0)
        assert agent.memory_kib() - before < 8192
        peer.acks = True
        peer.channel.ack(number, len(peer.data[number]))
        peer.until(lambda: ("overflow", "") in self.seen(peer, number))

    def test_watching_what_is_not_there_is_refused(self, agent: Agent, tmp_path: Path):
        peer = agent.peer()
        with pytest.raises(Refusal, match="not-found"):
            self.watch(peer, tmp_path / "gone", recursive=True)

    def test_a_reset_ends_the_watch(self, agent: Agent, tmp_path: Path):
        peer = agent.peer()
        files = Path(f"/proc/{agent.process.pid}/fd")
        before = len(list(files.iterdir()))
        number = self.watch(peer, tmp_path, recursive=True)
        assert len(list(files.iterdir())) == before + 1
        peer.channel.reset(number, "done")
        peer.until(lambda: len(list(files.iterdir())) == before)

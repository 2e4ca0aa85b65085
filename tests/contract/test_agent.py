"""The agent as the first process of a real gVisor machine: what the ordinary-process tests cannot show."""

import base64
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from space.protocol.frames import FrameType, encode
from tests import gvisor
from tests.agent import Peer, Refusal
from tests.gvisor import Machine

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(gvisor.unfit() is not None, reason=f"no gVisor machine: {gvisor.unfit()}"),
]
COUNT = 150_000
COUNTER = f"i=0; while [ $i -lt {COUNT} ]; do echo $i; i=$((i+1)); done"
COUNTED = "".join(f"{i}\n" for i in range(COUNT)).encode()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    one = Machine(tmp_path_factory.mktemp("machine"))
    one.boot()
    yield one
    one.end()


@pytest.fixture
def own_machine(tmp_path: Path) -> Iterator[Machine]:
    one = Machine(tmp_path, number=500)
    one.boot()
    yield one
    one.end()


@pytest.fixture
def peer(machine: Machine) -> Iterator[Peer]:
    one = machine.peer()
    yield one
    one.close()


def processes(peer: Peer) -> dict[int, tuple[str, str]]:
    """pid → (state, command line) of everything in the machine, as the machine itself sees it."""
    script = "for d in /proc/[0-9]*; do s=$(cat $d/stat 2>/dev/null) && echo \"${d#/proc/} $(echo \"${s##*)}\" | cut -d' ' -f2) $(tr '\\0' ' ' <$d/cmdline)\"; done"
    found = {}
    for line in peer.sh(script).stdout.decode().splitlines():
        pid, state, *words = line.split()
        found[int(pid)] = (state, " ".join(words))
    return found


def running(peer: Peer, words: str) -> int:
    return sum(words in line for _, line in processes(peer).values())


def test_it_is_the_first_process_and_alone(peer: Peer):
    assert peer.welcome is not None
    assert peer.welcome["pid"] == 1
    assert processes(peer)[1][1].endswith("agent.pyz")


def test_output_and_status(peer: Peer):
    """E1 E15"""
    assert peer.run("printf", "hello").stdout == b"hello"
    assert peer.sh("exit 255").exit["code"] == 255
    assert peer.sh("kill -9 $$").exit["signal"] == 9
    assert peer.sh("kill -SEGV $$").exit["signal"] == 11


def test_every_run_is_complete(peer: Peer):
    """E2"""
    expected = "".join(f"{i}\n" for i in range(1, 100_001)).encode()
    for _ in range(10):
        assert peer.run("seq", "1", "100000").stdout == expected
        assert len(peer.sh("head -c 66890 /dev/zero").stdout) == 66890


def test_a_slow_reader_loses_nothing(machine: Machine):
    """E3"""
    peer = machine.peer(acks=False)
    command = peer.start("dd", "if=/dev/zero", "bs=4M", "count=1")
    number = command.streams["stdout"]
    peer.until(lambda: len(peer.data.get(number, b"")) == 1 << 20)
    for _ in range(10):
        peer.step(0.01)
    assert len(peer.data[number]) == 1 << 20
    peer.acks = True
    peer.channel.ack(number, 1 << 20)
    assert peer.finish(command).stdout == bytes(4 << 20)
    peer.close()


def test_background_children_keep_neither_the_command_nor_its_tail(peer: Peer):
    """E7 E9"""
    result = peer.sh("nohup sleep 71 & head -c 3000000 /dev/zero")
    assert (len(result.stdout), result.exit["code"]) == (3_000_000, 0)
    assert running(peer, "sleep 71") == 1
    peer.sh("pkill -f 'sleep 71' || kill $(pgrep -f 'sleep 71')")


@pytest.mark.parametrize(
    "script",
    [
        "sleep 81 & wait",
        "setsid sleep 81 & wait",
        "sh -c 'trap \"\" TERM; sleep 81; sleep 81' & wait",
        "(setsid sh -c 'setsid sleep 81 &' &); sleep 81",
        "env -i setsid sh -c 'sleep 81 & sleep 81 & sleep 81' & wait",
    ],
    ids=["child", "setsid", "ignores-term", "double-fork", "other-environment"],
)
@pytest.mark.parametrize("user", ["root", "user"])
def test_a_timeout_kills_all_that_was_started(peer: Peer, script: str, user: str):
    """E13"""
    result = peer.sh(script, timeout_s=0.5, user=user)
    assert result.exit["kind"] == "timed-out"
    assert running(peer, "sleep 81") == 0


def test_what_multiplies_without_end_is_ended_by_its_timeout(peer: Peer):
    """E13"""
    script = "breed() { while :; do (setsid sleep 0.05 &); done; }; (breed &); (setsid sh -c 'while :; do (sleep 0.05 &); done' &); breed"
    result = peer.run("bash", "-c", script, timeout_s=1.0, user="user")
    assert result.exit["kind"] == "timed-out"
    assert running(peer, "breed") == running(peer, "while") == 0


def test_orphans_leave_no_zombies(peer: Peer):
    """E17"""
    before = len(processes(peer))
    peer.finish(peer.start("sh", "-c", "i=0; while [ $i -lt 400 ]; do ( : & ); i=$((i+1)); done"), patience_s=60)
    peer.until(lambda: len(processes(peer)) == before)
    assert not [line for state, line in processes(peer).values() if state == "Z"]


def test_a_terminal_has_job_control(peer: Peer):
    """E20"""
    command = peer.start(
        "bash", "--norc", "--noprofile", "-i", env={"PS1": "$ "}, tty={"rows": 33, "cols": 101}, user="user"
    )
    number = command.streams["tty"]
    peer.feed(number, b"stty size; sleep 91\n")
    peer.until(lambda: b"33 101" in peer.data.get(number, b""))
    peer.until(lambda: running(peer, "sleep 91") == 1)
    peer.feed(number, b"\x1a")
    peer.until(lambda: b"Stopped" in peer.data[number])
    peer.call("resize", id=command.id, rows=50, cols=90)
    peer.feed(number, b"kill %1; stty size; exit 4\n")
    peer.until(lambda: b"50 90" in peer.data[number])
    assert peer.finish(command).exit["code"] == 4


def test_a_user_has_no_more_rights_than_its_own(peer: Peer):
    status = peer.run("cat", "/proc/self/status", user="user").stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["1000"] * 4
    assert fields["Gid"].split() == ["1000"] * 4
    assert fields["Groups"].split() == ["2000"]
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff")} == {"0" * 16}
    assert peer.sh("kill -9 1", user="user").exit["code"] != 0
    with pytest.raises(Refusal, match="permission-denied"):
        peer.put("file-write", b"x", path="/etc/x", user="user")
    peer.put("file-write", b"x", path="/home/user/a/b", user="user", mode=0o640)
    info = peer.call("stat", path="/home/user/a/b", user="user")
    assert (info["uid"], info["gid"], info["mode"]) == (1000, 1000, 0o640)


def test_the_agent_is_spared_by_the_memory_killer_and_its_commands_are_not(peer: Peer):
    for user in ("root", "user"):
        assert peer.run("cat", "/proc/self/oom_score_adj", user=user).stdout.strip() == b"0"
        assert peer.run("cat", "/proc/1/oom_score_adj").stdout.strip() == b"-1000"


def test_files_are_the_guests_own(peer: Peer, machine: Machine):
    """F4"""
    (machine.root / "etc/shadow").write_text("the guest's own\n")
    peer.sh("ln -s /etc/shadow /tmp/link")
    assert peer.fetch("file-read", path="/tmp/link")[1] == b"the guest's own\n"
    assert peer.fetch("file-read", path="/proc/self/root/etc/shadow")[1] == b"the guest's own\n"


def test_a_watch_sees_what_is_made_in_new_directories(peer: Peer):
    """F8"""
    peer.sh("mkdir /tmp/watched")
    number = peer.channel.new_number()
    peer.channel.open_receive(number)
    peer.call("watch", path="/tmp/watched", recursive=True, stream=number)
    peer.sh("cd /tmp/watched; mkdir -p a/b/c/d && touch a/b/c/d/x")
    peer.until(lambda: b'"a/b/c/d/x"' in peer.data.get(number, b""))
    peer.channel.reset(number, "done")


def test_the_hostname_is_set(peer: Peer):
    peer.call("configure", hostname="other")
    assert peer.run("uname", "-n").stdout == b"other\n"


def test_the_host_may_be_killed_in_the_middle_of_frames_both_ways(machine: Machine):
    peer = machine.peer()
    command = peer.start("sh", "-c", COUNTER)
    stored = {"stdout": b"", "stderr": b""}
    for round_number in range(6):
        number, before = command.streams["stdout"], len(stored["stdout"])
        # A host that is slow to come back may find that all of it has been written meanwhile.
        enough = min(before + 5000, len(COUNTED) - 1)
        peer.until(lambda n=number, e=enough, p=peer: len(p.data.get(n, b"")) > e)
        stored = {name: bytes(peer.data.get(number, b"")) for name, number in command.streams.items()}
        cut = b"".join(encode(FrameType.DATA, 9999, bytes(100_000)))[: 11 + round_number * 17_000]
        view = memoryview(cut)
        while view:
            view = view[os.write(peer.to_guest, view[:4096]) :]
        # Half a frame of the guest's is read and lost, too.
        peer.until(lambda p=peer: bool(p._write()) or True)
        with contextlib.suppress(BlockingIOError):
            os.read(peer.from_guest, 777)
        peer.close()
        peer = Peer(machine.channel)
        peer.adopts[command.id] = stored
        welcome = peer.greet()
        record = next(one for one in welcome["commands"] if one["id"] == command.id)
        command.streams = {name: place["number"] for name, place in record["streams"].items()}
    assert peer.finish(command).stdout == COUNTED
    peer.close()


def test_a_checkpoint_in_the_middle_of_output_loses_nothing(own_machine: Machine, tmp_path: Path):
    peer = own_machine.peer()
    plain = {"PS1": "$ ", "TERM": "dumb"}
    shell = peer.start("bash", "--norc", "--noprofile", "-i", env=plain, tty={"rows": 24, "cols": 80})
    peer.until(lambda: peer.data.get(shell.streams["tty"], b"").endswith(b"$ "), "the prompt")
    peer.feed(shell.streams["tty"], b"sleep 77\n")
    # The echo of the line is the last thing that the shell has to say until the program ends.
    peer.until(lambda: peer.data[shell.streams["tty"]].endswith(b"sleep 77\r\n"), "the echo")
    command = peer.start("sh", "-c", COUNTER, user="user")
    for round_number in range(2):
        number, before = command.streams["stdout"], len(peer.data.get(command.streams["stdout"], b""))
        peer.until(lambda n=number, b=before, p=peer: len(p.data.get(n, b"")) > b + 3000)
        peer.call("quiesce")
        stored = {name: bytes(peer.data.get(number, b"")) for name, number in command.streams.items()}
        said = {"tty": bytes(peer.data[shell.streams["tty"]])}
        peer.close()
        image = tmp_path / f"image{round_number}"
        image.mkdir()
        own_machine.suspend(image)
        own_machine.wake(image)
        peer = Peer(own_machine.channel)
        peer.adopts = {command.id: stored, shell.id: said}
        welcome = peer.greet()
        records = {one["id"]: one for one in welcome["commands"]}
        command.streams = {name: place["number"] for name, place in records[command.id]["streams"].items()}
        assert records[command.id]["state"] == "running"
        with pytest.raises(Refusal, match="quiesced"):
            peer.start("true")
        off = peer.call(
            "awaken",
            now_ns=time.time_ns(),
            entropy=base64.b64encode(os.urandom(64)).decode(),
            hostname=f"woken{round_number}",
        )
        assert abs(off["clock_off_ns"]) < 5_000_000_000
        assert peer.run("uname", "-n").stdout.decode() == f"woken{round_number}\n"
        assert abs(float(peer.run("date", "+%s.%N").stdout) - time.time()) < 5
        assert bytes(peer.data[shell.streams["tty"]]) == said["tty"], "the shell prints nothing for having been stopped"
    assert peer.finish(command, 60).stdout == COUNTED
    assert running(peer, "sleep 77") == 1
    result = peer.sh("(setsid sleep 78 &); sleep 78", timeout_s=0.3)
    assert result.exit["kind"] == "timed-out"
    assert running(peer, "sleep 78") == 0
    peer.close()


def test_a_memory_image_made_without_quiescing_resynchronises_too(own_machine: Machine, tmp_path: Path):
    peer = own_machine.peer()
    command = peer.start("sh", "-c", COUNTER)
    peer.until(lambda: len(peer.data.get(command.streams["stdout"], b"")) > 3000)
    stored = {name: bytes(peer.data.get(number, b"")) for name, number in command.streams.items()}
    peer.close()
    own_machine.suspend(tmp_path / "image")
    own_machine.wake(tmp_path / "image")
    peer = Peer(own_machine.channel)
    peer.adopts[command.id] = stored
    peer.greet()
    assert peer.finish(command, 60).stdout == COUNTED
    peer.close()


def test_an_agent_without_a_host_keeps_everything(own_machine: Machine):
    peer = own_machine.peer()
    command = peer.start("sh", "-c", "sleep 0.3; echo done; exit 3")
    peer.close()
    second = Peer(own_machine.channel)
    second.adopts[command.id] = {"stdout": b"", "stderr": b""}
    second.greet()
    result = second.finish(command)
    assert (result.stdout, result.exit["code"]) == (b"done\n", 3)
    assert json.dumps(second.call("list")) == '{"commands": []}'
    second.close()


def test_user_code_goes_on_only_with_the_right_time_and_a_name_of_its_own(own_machine: Machine, tmp_path: Path):
    """L13 L15: the kernel takes the host's time with the restore; what it would not take keeps everything stopped."""
    peer = own_machine.peer()
    script = "while :; do date +%s.%N > /var/beat.new; mv /var/beat.new /var/beat; done"
    command = peer.start("sh", "-c", script)
    peer.until(lambda: peer.run("test", "-s", "/var/beat").exit["code"] == 0)
    peer.call("quiesce", event="suspend")
    peer.close()
    (tmp_path / "image").mkdir()
    own_machine.suspend(tmp_path / "image")
    own_machine.wake(tmp_path / "image")
    peer = own_machine.peer()
    assert peer.welcome is not None
    assert peer.welcome["standing"] is True
    with pytest.raises(Refusal, match="clock-not-set"):
        peer.call("awaken", now_ns=time.time_ns() + 3600 * 10**9)
    with pytest.raises(Refusal, match="quiesced"):
        peer.start("true")
    woken_at, machine_id = time.time(), os.urandom(16).hex()
    entropy = base64.b64encode(os.urandom(64)).decode()
    answer = peer.call(
        "awaken",
        now_ns=time.time_ns(),
        entropy=entropy,
        hostname="other",
        machine_id=machine_id,
        limits={"cpus": 1.0},
        rename={command.id: "copied"},
    )
    assert abs(answer["clock_off_ns"]) < 500_000_000
    assert [one["id"] for one in peer.call("list")["commands"]] == ["copied"]
    assert peer.run("uname", "-n").stdout == b"other\n"
    assert peer.run("cat", "/etc/machine-id").stdout.decode() == f"{machine_id}\n"
    assert peer.run("nproc").stdout == b"1\n"
    peer.until(lambda: float(peer.run("cat", "/var/beat").stdout or 0) > woken_at - 0.5, "a beat with the new time")
    peer.call("signal", id="copied", signal=9)
    peer.close()


def test_a_process_reseeds_itself_before_it_draws_again(own_machine: Machine, tmp_path: Path):
    """A hook signals it while it stands still; the signal is the first thing it sees when it goes on."""
    hooks = own_machine.root / "etc/space/hooks/post-wake.d"
    hooks.mkdir(parents=True)
    (hooks / "50-reseed").write_text("#!/bin/sh\nkill -USR1 $(cat /var/pid)\n")
    (hooks / "50-reseed").chmod(0o755)
    program = (
        "import os, random, signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (random.seed(os.urandom(32)), print('reseeded', flush=True)))\n"
        "random.seed(1)\n"
        "open('/var/pid', 'w').write(str(os.getpid()))\n"
        "for line in sys.stdin: print(random.random(), flush=True)\n"
    )
    peer = own_machine.peer()
    command = peer.start(gvisor.PYTHON, "-c", program, stdin=True)
    number = command.streams["stdout"]
    peer.feed(command.streams["stdin"], b"\n")
    peer.until(lambda: peer.data.get(number, b"").endswith(b"\n"))
    peer.call("quiesce", event="suspend")
    drawn = bytes(peer.data[number])
    peer.close()
    draws = set()
    for round_number in range(2):
        if not round_number:
            (tmp_path / "image").mkdir()
            own_machine.suspend(tmp_path / "image")
        else:
            own_machine.end()
        own_machine.wake(tmp_path / "image")
        peer = Peer(own_machine.channel)
        peer.adopts = {command.id: {"stdout": drawn, "stderr": b""}}
        peer.greet()
        answer = peer.call("awaken", now_ns=time.time_ns())
        assert answer["hooks"] == [{"name": "50-reseed", "outcome": "exited", "exit": 0}]
        peer.feed(command.streams["stdin"], b"\n")
        peer.until(lambda p=peer: p.data[number].count(b"\n") == drawn.count(b"\n") + 2, "the handler and a number")
        word, draw = bytes(peer.data[number])[len(drawn) :].split()
        assert word == b"reseeded"
        draws.add(draw)
        peer.close()
    assert len(draws) == 2, "two lives of one image draw different numbers"

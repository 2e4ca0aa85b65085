"""Commands of the agent, run as an ordinary process of this machine on two FIFOs."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent import Agent, Peer, Refusal, alive, descendants

WINDOW = 1024 * 1024


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    one = Agent(tmp_path_factory.mktemp("agent") / "channel")
    yield one
    one.stop()


@pytest.fixture
def peer(agent: Agent) -> Iterator[Peer]:
    one = agent.peer()
    yield one
    one.close()


def pids_in(output: bytes) -> list[int]:
    return [int(word) for word in output.split()]


def test_output_is_exact_without_a_newline(peer: Peer):
    """E1"""
    result = peer.run("printf", "hello")
    assert (result.stdout, result.stderr, result.exit["kind"], result.exit["code"]) == (b"hello", b"", "exited", 0)


def test_every_run_is_complete_however_fast_the_program_ends(peer: Peer):
    """E2"""
    expected = "".join(f"{i}\n" for i in range(1, 100_001)).encode()
    for _ in range(40):
        assert peer.run("seq", "1", "100000").stdout == expected
        assert len(peer.run("sh", "-c", "head -c 66890 /dev/zero >&2").stderr) == 66890


def test_a_slow_reader_makes_the_writer_wait_and_loses_nothing(agent: Agent):
    """E3"""
    peer = agent.peer(acks=False)
    command = peer.start(
        "python3", "-c", "import os; d = bytes(4 << 20)\nwhile d: d = d[os.write(1, d):]\nos.write(2, b'done')"
    )
    stdout, stderr = command.streams["stdout"], command.streams["stderr"]
    peer.until(lambda: len(peer.data.get(stdout, b"")) == WINDOW)
    for _ in range(20):
        peer.step(0.01)
    assert len(peer.data[stdout]) == WINDOW
    assert stderr not in peer.data, "the writer must still be waiting"
    peer.acks = True
    peer.channel.ack(stdout, WINDOW)
    result = peer.finish(command)
    assert result.stdout == bytes(4 << 20)
    peer.close()


def test_characters_cut_between_writes_are_passed_on_as_bytes(peer: Peer):
    """E5"""
    assert peer.run("python3", "-c", "print('あ' * 100000, end='')").stdout.decode() == "あ" * 100_000
    script = r"printf 'caf\303'; read x; printf '\251'"
    command = peer.start("sh", "-c", script, stdin=True)
    peer.until(lambda: peer.data.get(command.streams["stdout"]) == b"caf\xc3")
    peer.feed(command.streams["stdin"], b"\n", end=True)
    assert peer.finish(command).stdout.decode() == "café"


def test_a_child_that_keeps_the_pipes_does_not_keep_the_command(peer: Peer):
    """E7"""
    begun = time.monotonic()
    result = peer.sh("nohup sh -c 'sleep 60 & echo $!' 2>/dev/null; sleep 60 & echo $!")
    assert result.exit["code"] == 0
    assert time.monotonic() - begun < 10
    children = pids_in(result.stdout)
    assert len(children) == 2
    assert all(alive(pid) for pid in children), "background children go on"
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def test_the_tail_is_whole_though_a_child_keeps_the_pipe(peer: Peer):
    """E9"""
    size = 3 * WINDOW + 1234
    result = peer.sh(f"sleep 60 & echo $! >&2; head -c {size} /dev/zero")
    assert len(result.stdout) == size
    os.kill(pids_in(result.stderr)[0], signal.SIGKILL)


def test_the_tail_is_whole_for_a_slow_reader_too(agent: Agent):
    """E9: more than the window and the pipe together, with the reader starting only after the program has ended."""
    peer = agent.peer(acks=False)
    command = peer.start(
        "sh", "-c", f"sleep 60 & echo $! >&2; head -c {WINDOW} /dev/zero; head -c {WINDOW - 65536} /dev/zero"
    )
    stdout = command.streams["stdout"]
    peer.until(lambda: len(peer.data.get(stdout, b"")) == WINDOW and not alive(command.pid), "the main process ends")
    assert command.id not in peer.exits
    peer.acks = True
    peer.channel.ack(stdout, WINDOW)
    result = peer.finish(command)
    assert len(result.stdout) == 2 * WINDOW - 65536
    os.kill(pids_in(result.stderr)[0], signal.SIGKILL)
    peer.close()


def test_a_background_writer_is_neither_killed_nor_blocked_after_the_end(peer: Peer, tmp_path: Path):
    mark = tmp_path / "mark"
    script = f"(while [ ! -e {mark} ]; do sleep 0.02; done; head -c 4000000 /dev/zero && echo alive > {mark}) & exit 3"
    assert peer.sh(script).exit["code"] == 3
    mark.touch()
    peer.until(lambda: mark.read_text() == "alive\n", "4 MB are written to a pipe nobody listens to")


def test_standard_input_is_at_its_end_unless_asked_for(peer: Peer):
    """E12"""
    result = peer.run("cat")
    assert (result.stdout, result.exit["code"]) == (b"", 0)


def test_standard_input_is_passed_on_and_closed(peer: Peer):
    """E12"""
    data = bytes(range(256)) * 20_000
    command = peer.start("cat", stdin=True)
    peer.feed(command.streams["stdin"], data, end=True)
    result = peer.finish(command)
    assert result.stdout == data
    assert result.exit["code"] == 0


def test_writing_to_a_program_that_reads_no_more_is_a_typed_error(peer: Peer):
    """E12"""
    command = peer.start("sh", "-c", "exec <&-; sleep 60", stdin=True)
    number = command.streams["stdin"]
    peer.feed(number, bytes(2 * WINDOW))
    peer.until(lambda: number in peer.resets)
    assert peer.resets[number] == "stdin-closed"
    peer.call("signal", id=command.id, signal=9)
    peer.finish(command)


def test_standard_input_ends_with_the_command(peer: Peer):
    command = peer.start("true", stdin=True)
    peer.until(lambda: command.streams["stdin"] in peer.resets)
    assert peer.resets[command.streams["stdin"]] == "ended"
    peer.finish(command)


@pytest.mark.parametrize(
    "script",
    [
        "sleep 300 & echo $!; wait",
        "setsid sleep 300 & echo $!; wait",
        "sh -c 'trap \"\" TERM; sleep 300 & echo $!; wait' & wait",
        "(setsid sh -c 'sleep 300 & echo $!' &); sleep 300",
    ],
    ids=["child", "setsid", "ignores-term", "double-fork"],
)
def test_a_timeout_kills_all_that_was_started(peer: Peer, script: str):
    """E13"""
    command = peer.start("sh", "-c", script, timeout_s=0.3)
    result = peer.finish(command)
    assert result.exit["kind"] == "timed-out"
    assert result.exit["code"] is None
    children = pids_in(result.stdout)
    assert children
    assert not any(alive(pid) for pid in [command.pid, *children])


def test_a_timeout_is_not_confused_with_the_programs_own_end(peer: Peer):
    """E13"""
    assert peer.sh("exit 9", timeout_s=10).exit["kind"] == "exited"
    assert peer.sh("kill -9 $$", timeout_s=10).exit["kind"] == "signaled"


def test_a_signal_to_the_tree_reaches_descendants_of_other_sessions(peer: Peer):
    command = peer.start(
        "sh",
        "-c",
        "trap 'exit 4' USR1; setsid sh -c 'trap \"echo got; exit\" USR1; echo ready; while :; do sleep 0.05; done' & while :; do sleep 0.05; done",
    )
    peer.until(lambda: b"ready" in peer.data.get(command.streams["stdout"], b""))
    peer.call("signal", id=command.id, signal=int(signal.SIGUSR1))
    result = peer.finish(command)
    assert result.exit["code"] == 4
    assert b"ready\n" in result.stdout


def test_a_signal_to_the_main_process_alone_spares_its_children(peer: Peer):
    command = peer.start("sh", "-c", "sleep 60 & echo $!; wait")
    peer.until(lambda: b"\n" in peer.data.get(command.streams["stdout"], b""))
    peer.call("signal", id=command.id, signal=int(signal.SIGTERM), tree=False)
    result = peer.finish(command)
    assert (result.exit["kind"], result.exit["signal"]) == ("signaled", signal.SIGTERM)
    child = pids_in(result.stdout)[0]
    assert alive(child)
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("script", "kind", "code", "number"),
    [
        ("kill -9 $$", "signaled", None, 9),
        ("kill -SEGV $$", "signaled", None, 11),
        ("exit 255", "exited", 255, None),
        ("exit 137", "exited", 137, None),
        ("exit 0", "exited", 0, None),
    ],
)
def test_exit_statuses_are_never_ambiguous(peer: Peer, script: str, kind: str, code: int | None, number: int | None):
    """E15"""
    record = peer.sh(script).exit
    assert (record["kind"], record["code"], record["signal"]) == (kind, code, number)


def test_orphans_are_reaped(agent: Agent, peer: Peer):
    """E17"""
    assert peer.sh("i=0; while [ $i -lt 200 ]; do (sh -c 'sleep 0.01 &' &); i=$((i+1)); done").exit["code"] == 0
    peer.until(lambda: not descendants(agent.process.pid), "no orphan and no zombie is left")


def test_a_terminal_is_one(peer: Peer):
    """E20"""
    script = "tty; stty size; read line; echo got:$line; ps -o tty= -p $$; trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.02; done"
    command = peer.start("bash", "-c", script, tty={"rows": 33, "cols": 101})
    number = command.streams["tty"]
    peer.feed(number, b"typed\n")
    peer.until(lambda: b"ready" in peer.data.get(number, b""))
    peer.call("resize", id=command.id, rows=40, cols=120)
    result = peer.finish(command)
    assert result.exit["code"] == 5
    lines = result.stdout.replace(b"\r\n", b"\n").split(b"\n")
    assert b"33 101" in lines
    assert b"40 120" in lines
    assert b"got:typed" in lines
    assert any(line.startswith(b"pts/") for line in lines), "it is the controlling terminal"


def test_the_interrupt_key_interrupts(peer: Peer):
    command = peer.start("cat", tty={"rows": 24, "cols": 80})
    number = command.streams["tty"]
    peer.feed(number, b"echo\n")
    peer.until(lambda: peer.data.get(number, b"").count(b"echo") == 2)
    peer.feed(number, b"\x03")
    assert peer.finish(command).exit["signal"] == signal.SIGINT


def test_everything_a_terminal_was_given_arrives(peer: Peer):
    result = peer.run("seq", "1", "50000", tty={"rows": 24, "cols": 80})
    assert result.stdout.replace(b"\r\n", b"\n") == "".join(f"{i}\n" for i in range(1, 50_001)).encode()


def test_the_environment_is_exact(peer: Peer):
    env = {"A": "one\ntwo", "B": "$HOME `id` \\", "C": "", "D": "é\udcff", "TERM": "mine"}
    output = peer.run("env", "-0", env=env).stdout
    got = dict(entry.split(b"=", 1) for entry in output.rstrip(b"\0").split(b"\0"))
    for name, value in env.items():
        assert got[name.encode()] == value.encode("utf-8", "surrogateescape")
    assert set(got) <= {name.encode() for name in [*env, "PATH", "HOME", "USER", "LOGNAME", "SHELL", "SPACE_COMMAND"]}


def test_arguments_are_exact(peer: Peer):
    argv = ["", " ", "a b", "\n", "*", "$HOME", "é", "\udcff", "-n"]
    output = peer.run(
        "python3",
        "-c",
        "import os, sys; print('\\0'.join(sys.argv[1:]).encode('utf-8', 'surrogateescape').hex())",
        *argv,
    ).stdout
    assert bytes.fromhex(output.decode()).split(b"\0") == [word.encode("utf-8", "surrogateescape") for word in argv]


def test_configured_defaults_give_way_to_the_request(peer: Peer, tmp_path: Path):
    peer.call("configure", env={"A": "1", "B": "1"}, workdir=str(tmp_path))
    try:
        assert peer.sh("echo $A$B; pwd", env={"B": "2"}).stdout.decode().split() == ["12", str(tmp_path)]
        assert peer.sh("pwd", cwd="/").stdout == b"/\n"
    finally:
        peer.call("configure", env={}, workdir="/")


@pytest.mark.parametrize(
    ("argv", "fields", "code", "named"),
    [
        (["nonesuch-program"], {}, "not-found", "'nonesuch-program'"),
        (["/nonesuch/program"], {}, "not-found", "/nonesuch/program"),
        (["/etc/passwd"], {}, "permission-denied", "/etc/passwd"),
        (["true"], {"cwd": "/nonesuch"}, "no-such-directory", "/nonesuch"),
        (["true"], {"cwd": "/etc/passwd"}, "no-such-directory", "/etc/passwd"),
        (["true"], {"user": "nonesuch"}, "no-such-user", "'nonesuch'"),
        (["true"], {"user": "root:nonesuch"}, "no-such-group", "'nonesuch'"),
    ],
)
def test_what_cannot_be_started_is_refused_by_name_with_a_code(
    peer: Peer, argv: list[str], fields: dict[str, str], code: str, named: str
):
    with pytest.raises(Refusal) as refusal:
        peer.run(*argv, **fields)
    assert refusal.value.code == code
    assert named in str(refusal.value)


def test_a_failed_start_leaves_no_descriptor_behind(agent: Agent, peer: Peer):
    def count() -> int:
        return len(list(Path(f"/proc/{agent.process.pid}/fd").iterdir()))

    peer.run("true")
    before = count()
    for fields in ({"tty": {"rows": 24, "cols": 80}}, {"stdin": True}, {}):
        with pytest.raises(Refusal):
            peer.start("nonesuch-program", **fields)
    assert count() == before


def test_a_command_inherits_no_descriptor_of_the_agent(peer: Peer):
    assert peer.sh("ls /proc/self/fd | wc -l").stdout.strip() == b"4"


def test_one_id_names_one_command(peer: Peer):
    command = peer.start("sleep", "60", id="twice")
    with pytest.raises(Refusal, match="already-exists"):
        peer.start("true", id="twice")
    with pytest.raises(Refusal, match="still-running"):
        peer.call("forget", id="twice")
    peer.call("signal", id="twice", signal=9)
    peer.finish(command)
    with pytest.raises(Refusal, match="no-such-command"):
        peer.call("signal", id="twice", signal=9)


def test_nothing_of_finished_commands_accumulates(agent: Agent, peer: Peer):
    for _ in range(50):
        peer.run("true")
    before, files = agent.memory_kib(), len(list(Path(f"/proc/{agent.process.pid}/fd").iterdir()))
    for _ in range(300):
        peer.run("true", stdin=True, timeout_s=3600)
    assert agent.memory_kib() - before < 2048
    assert len(list(Path(f"/proc/{agent.process.pid}/fd").iterdir())) == files
    assert peer.call("list") == {"commands": []}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
class TestAsAnotherUser:
    def test_a_command_runs_with_the_users_rights_alone(self, peer: Peer):
        result = peer.sh(
            "id -u; id -g; echo $HOME; grep -E '^(Uid|Gid|CapEff|CapPrm|CapInh):' /proc/self/status; cat /etc/shadow",
            user="nobody",
        )
        assert b"65534\n65534\n/nonexistent\n" in result.stdout
        assert b"Uid:\t65534\t65534\t65534\t65534" in result.stdout
        assert result.stdout.count(b"0000000000000000") == 3
        assert b"Permission denied" in result.stderr

    def test_a_number_needs_no_entry(self, peer: Peer):
        assert peer.sh("id -u; id -g; id -G", user="12345:54321").stdout.split() == [b"12345", b"54321", b"54321"]

    def test_the_agent_is_root_again_afterwards(self, agent: Agent, peer: Peer):
        with pytest.raises(Refusal):
            peer.run("nonesuch-program", user="nobody")
        status = Path(f"/proc/{agent.process.pid}/status").read_text()
        assert "Uid:\t0\t0\t0\t0" in status
        assert "Gid:\t0\t0\t0\t0" in status
        assert peer.sh("id -u").stdout == b"0\n"

    def test_it_cannot_signal_the_agent(self, agent: Agent, peer: Peer):
        """Once it has started: while a program is being started the agent has its user's identity for a moment."""
        assert peer.sh(f"sleep 0.5; kill -9 {agent.process.pid}", user="nobody").exit["code"] != 0
        assert peer.sh("true").exit["code"] == 0

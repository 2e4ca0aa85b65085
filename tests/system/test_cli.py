"""The command line against a real installation."""

import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

import pytest

from space import Client, Sandbox
from tests.client import wait_until
from tests.installation import Installation, patient

SPACE = [sys.executable, "-c", "from space.cli import main; main()"]


class Cli:
    """`space` with the installation's address and key."""

    def __init__(self, installation: Installation) -> None:
        self.environment = {
            **os.environ,
            "SPACE_URL": installation.url,
            "SPACE_API_KEY": installation.key,
            "TERM": "xterm",
        }

    def __call__(self, *words: str, stdin: bytes = b"", status: int = 0) -> str:
        done = subprocess.run(
            [*SPACE, *words], input=stdin, env=self.environment, capture_output=True, timeout=patient(100), check=False
        )
        assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout.decode()


@pytest.fixture(scope="module")
def cli(installation: Installation) -> Cli:
    return Cli(installation)


@pytest.fixture(scope="module")
def name(installation: Installation) -> Iterator[str]:
    """The name of a sandbox for the tests of this module."""
    with (
        Client(installation.url, installation.key) as client,
        Sandbox.create(client=client, name="cli-demo") as sandbox,
    ):
        yield str(sandbox.name)


def test_run_streams_passes_the_status_on_and_leaves_nothing(cli: Cli) -> None:
    before = cli("ls", "-q").split()
    assert cli("run", "base", "--", "python3", "-c", "print(1)") == "1\n"
    cli("run", "base", "--", "sh", "-c", "exit 42", status=42)
    cli("run", "base", "--", "sh", "-c", "kill -9 $$", status=137)
    cli("run", "base", "--", "/no/such/program", status=127)
    cli("run", "no-such-template", "true", status=125)
    assert cli("ls", "-q").split() == before


def test_run_passes_piped_input_on(cli: Cli) -> None:
    assert cli("run", "base", "--", "tr", "a-z", "A-Z", stdin=b"piped\n") == "PIPED\n"


def test_a_timeout_has_its_own_status(cli: Cli, name: str) -> None:
    cli("exec", "--timeout", "0.3", name, "--", "sleep", "60", status=124)


def test_exec_keeps_the_streams_apart_and_sets_what_is_asked(cli: Cli, name: str) -> None:
    script = "echo out; echo err >&2; id -un; pwd; echo $A"
    done = subprocess.run(
        [*SPACE, "exec", "-u", "root", "-w", "/tmp", "-e", "A=b c", name, "--", "sh", "-c", script],
        env=cli.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
    )
    assert done.stdout.splitlines() == ["out", "root", "/tmp", "b c"]
    assert done.stderr == "err\n"


def test_output_comes_while_the_program_runs_and_ctrl_c_reaches_it(cli: Cli, name: str) -> None:
    script = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.1; done"
    process = subprocess.Popen(
        [*SPACE, "exec", name, "--", "sh", "-c", script],
        env=cli.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.read() == b"caught\n"
    assert process.wait(timeout=patient(30)) == 9


def test_the_life_of_a_sandbox(cli: Cli) -> None:
    made = cli("create", "base", "--name", "cli-life", "-m", "for=cli").strip()
    cli("exec", "cli-life", "--", "sh", "-c", "echo kept > note.txt")
    for verb, state in (
        ("pause", "paused"),
        ("resume", "running"),
        ("suspend", "suspended"),
        ("wake", "running"),
        ("stop", "stopped"),
        ("start", "running"),
    ):
        cli(verb, "cli-life")
        assert json.loads(cli("inspect", "cli-life", "--json"))["state"] == state
    assert cli("exec", "cli-life", "--", "cat", "note.txt") == "kept\n"
    assert [s["id"] for s in json.loads(cli("ls", "--json", "-m", "for=cli"))] == [made]
    cli("rm", "cli-life")
    cli("inspect", made, status=1)


def test_a_sandbox_is_forked_and_kept_and_started_from_what_was_kept(cli: Cli, name: str) -> None:
    cli("exec", name, "--", "sh", "-c", "echo kept > branch.txt; echo kept > /dev/shm/branch")
    forks = cli("fork", name, "--count", "2", "-m", "for=cli-fork").split()
    assert sorted(s["id"] for s in json.loads(cli("ls", "--json", "-m", "for=cli-fork"))) == sorted(forks)
    for fork in forks:
        assert cli("exec", fork, "--", "cat", "branch.txt", "/dev/shm/branch") == "kept\nkept\n"
    cli("rm", *forks)
    snapshot = cli("snapshot", "create", name, "cli-kept").strip()
    assert json.loads(cli("snapshot", "inspect", "cli-kept", "--json"))["id"] == snapshot
    assert snapshot in cli("snapshot", "ls")
    assert cli("run", f"snapshot:{snapshot}", "--", "cat", "/dev/shm/branch") == "kept\n"
    cli("snapshot", "rm", "cli-kept")
    cli("run", f"snapshot:{snapshot}", "--", "true", status=125)
    assert snapshot not in cli("snapshot", "ls")


def test_the_keepers_subcommands_answer(cli: Cli, installation: Installation) -> None:
    project = json.loads(cli("project", "--json"))
    assert project["used"]["sandboxes"] >= 0
    assert "memory" in cli("pool").splitlines()[-1]
    assert set(json.loads(cli("pool", "--json"))) == {"memory_mib", "memory_max_mib", "shapes"}
    assert isinstance(json.loads(cli("gc", "--dry-run", "--json")), list)
    member = dict(cli.environment, SPACE_API_KEY=installation.other_key)
    for words in (["pool"], ["gc"], ["project", "--set", "cpus=1"]):
        done = subprocess.run([*SPACE, *words], env=member, capture_output=True, timeout=patient(60), check=False)
        assert done.returncode == 1, words
        assert b"admin" in done.stderr


def test_copies_go_both_ways(cli: Cli, name: str, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/f").write_bytes(b"content")
    cli("cp", str(tmp_path / "tree"), f"{name}:/home/user")
    assert cli("exec", name, "cat", "/home/user/tree/f") == "content"
    cli("cp", f"{name}:/home/user/tree", str(tmp_path / "back"))
    assert (tmp_path / "back/f").read_bytes() == b"content"
    cli("cp", "-", f"{name}:/home/user/piped", stdin=b"piped")
    assert cli("cp", f"{name}:/home/user/piped", "-") == "piped"


def test_commands_are_listed_and_their_output_replayed(cli: Cli, name: str) -> None:
    cli("exec", name, "--", "echo", "for the log")
    newest = json.loads(cli("ps", name, "--json"))[0]
    assert newest["argv"] == ["echo", "for the log"]
    assert cli("logs", newest["id"]) == "for the log\n"
    assert cli("logs", "-f", newest["id"]) == "for the log\n"


def test_operations_are_shown_with_their_timings(cli: Cli, name: str) -> None:
    newest = json.loads(cli("ops", "--json"))[0]
    assert json.loads(cli("ops", newest["id"], "--wait", "--json"))["timings"]


def test_keys_are_made_and_revoked(cli: Cli, installation: Installation) -> None:
    key = cli("keys", "create", "cli-test").strip()
    other = dict(cli.environment, SPACE_API_KEY=key)
    listing = [*SPACE, "ls"]
    assert subprocess.run(listing, env=other, capture_output=True, timeout=patient(60), check=False).returncode == 0
    made = next(k for k in json.loads(cli("keys", "ls", "--json")) if k["name"] == "cli-test")
    cli("keys", "revoke", made["id"])
    assert subprocess.run(listing, env=other, capture_output=True, timeout=patient(60), check=False).returncode == 1


class Terminal:
    def __init__(self, cli: Cli, *words: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [*SPACE, *words], cli.environment)
        self.seen = b""

    def resize(self, rows: int, cols: int) -> None:
        ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, data: bytes) -> None:
        os.write(self.fd, data)

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.fd], [], [], 1)[0]:
                self.seen += os.read(self.fd, 65536)

    def status(self) -> int:
        with suppress(OSError):
            while data := os.read(self.fd, 65536):
                self.seen += data
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_shell_is_a_real_terminal(cli: Cli, name: str) -> None:
    """E20"""
    screen = Terminal(cli, "shell", name)
    screen.type(b"tty; echo si''ze-$(stty size)\n")
    screen.wait_for(b"/dev/pts/")
    screen.resize(44, 133)
    screen.type(b"until [ \"$(stty size)\" = '44 133' ]; do sleep 0.05; done; echo si''ze-$(stty size)\n")
    screen.wait_for(b"size-44 133")
    screen.type(b"sleep 600; echo not''-reached\n")
    screen.wait_for(b"sleep 600")
    look = ("exec", name, "--", "sh", "-c", "pgrep -fa 'sleep 600$' || true")
    wait_until(lambda: "sleep 600" in cli(*look), what="sleeping")
    screen.type(b"\x03")
    wait_until(lambda: "sleep 600" not in cli(*look), what="the interrupt")
    screen.type(b"exit 6\n")
    assert screen.status() == 6
    assert b"not-reached" not in screen.seen


def test_a_shell_is_left_and_found_again(cli: Cli, name: str) -> None:
    """E20"""
    screen = Terminal(cli, "shell", name)
    screen.type(b"MARK=still-here; echo mar''ked\n")
    screen.wait_for(b"marked")
    screen.type(b"\x1d")
    assert screen.status() == 0
    command = screen.seen.decode().rpartition("--attach ")[2].split()[0]
    screen = Terminal(cli, "shell", name, "--attach", command)
    screen.type(b"echo $MARK-after\n")
    screen.wait_for(b"still-here-after")
    screen.type(b"exit\n")
    assert screen.status() == 0

"""``sudo`` of the guest: its command line, what becomes of the environment, and agent and client as real processes."""

import contextlib
import grp
import os
import pty
import pwd
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from space.guest.groups import MARK
from space.guest.spawning import PATH_DEFAULT
from space.guest.sudo import is_ours_alone
from space.guest.sudo_client import REFUSED, REQUEST_BYTES_MAX, Call, UsageError, encode, receive
from space.guest.sudo_request import Request, program_of
from space.guest.system import Identity
from tests.agent import SOURCE, Agent, alive
from tests.brokers import wait

NOBODY = 65534
CALLER = Identity(1000, 1000, (), "ann", "/home/ann", "/bin/sh")


def call(*words: str) -> Call:
    return Call().parse(words)


def program(*words: str, **env: str):
    body = encode(call(*words), [f"{name}={value}".encode() for name, value in env.items()], None, "")
    return program_of(Request.parse(body), CALLER)


# --- the command line


def test_options_end_where_the_command_begins() -> None:
    one = call("-nHu", "www-data", "A=1", "B=", "ls", "-l", "-u", "C=3")
    assert (one.user, one.flags, one.assignments) == ("www-data", {"n", "H"}, ["A=1", "B="])
    assert one.argv == ["ls", "-l", "-u", "C=3"]
    assert call("-uann", "--", "-x").argv == ["-x"]
    assert call("--user=ann", "--preserve-env", "id").flags == {"E"}


@pytest.mark.parametrize("words", [["-Z", "id"], ["--frob", "id"], ["-u"], [], ["A=1"], ["--login=x"]])
def test_what_is_not_sudos_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(UsageError):
        call(*words)


def test_a_request_arrives_as_it_was_sent() -> None:
    words = ["-u", "root", "X=a=b", "printf", "", "é\udcff"]
    request = Request.parse(encode(call(*words), [b"E=\xff", b"F="], (24, 80), "012"))
    assert (request.user, request.assignments, request.argv) == ("root", {"X": "a=b"}, ["printf", "", "é\udcff"])
    assert request.env == {"E": "\udcff", "F": ""}
    assert (request.rows, request.cols, request.replaced) == (24, 80, {"0", "1", "2"})


@pytest.mark.parametrize(
    "body", [b"", b"root", b"\0\0a\0b\0c\0d", b"\0\0000\0000\0009\0009", b"\0\0000\0000\0-1\0001\0x"]
)
def test_a_body_that_no_client_sends_is_told_from_a_request(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Request.parse(body)


def test_only_a_template_without_a_real_sudo_has_ours_alone(tmp_path: Path) -> None:
    assert not is_ours_alone(str(tmp_path))
    (tmp_path / "sudo").write_text("the real one")
    assert not is_ours_alone(str(tmp_path))
    (tmp_path / "sudo").unlink()
    (tmp_path / "sudo").symlink_to("/.space/bin/sudo")
    assert is_ours_alone(str(tmp_path))
    (tmp_path / "sudo.real").write_text("the real one")
    assert not is_ours_alone(str(tmp_path))


# --- what is started


def test_the_environment_is_the_target_users_and_little_of_the_callers() -> None:
    env = program(
        "id", PATH="/home/ann/bin", HOME="/home/ann", LD_PRELOAD="x", SECRET="s", TERM="xterm", LC_ALL="C"
    ).env
    assert env["PATH"] == PATH_DEFAULT
    assert (env["HOME"], env["USER"], env["LOGNAME"]) == ("/root", "root", "root")
    assert (env["SUDO_USER"], env["SUDO_UID"], env["SUDO_GID"], env["SUDO_COMMAND"]) == ("ann", "1000", "1000", "id")
    assert (env["TERM"], env["LC_ALL"]) == ("xterm", "C")
    assert not {"LD_PRELOAD", "SECRET"} & env.keys()


def test_a_locale_that_names_a_file_is_dropped() -> None:
    assert not {"LANG", "TERM"} & program("id", LANG="/tmp/evil", TERM="%n").env.keys()


def test_preserving_keeps_the_environment_but_never_the_path() -> None:
    env = program("-E", "id", PATH="/evil", HOME="/home/ann", SECRET="s", USER="ann").env
    assert (env["PATH"], env["HOME"], env["SECRET"], env["USER"]) == (PATH_DEFAULT, "/home/ann", "s", "root")
    assert program("-EH", "id", HOME="/home/ann").env["HOME"] == "/root"


def test_assignments_win_and_the_commands_mark_stays() -> None:
    env = program("A=1", "LANG=x/y", "id", **{MARK: "cmd1"}).env
    assert (env["A"], env["LANG"], env[MARK]) == ("1", "x/y", "cmd1")


def test_a_login_shell_begins_at_home_and_gets_words_that_stay_words() -> None:
    one = program("-i", "printf", "%s", "a b;c", SHELL="/bin/false")
    assert one.cwd == "/root"
    assert one.argv[1:] == ["-l", "-c", r"printf \%s a\ b\;c"]
    assert one.argv[0] == pwd.getpwuid(0).pw_shell
    shell = program("-s", SHELL="/bin/dash")
    assert (shell.argv, shell.cwd, shell.env["SHELL"]) == (["/bin/dash"], "", "/bin/dash")


# --- agent and client


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that every user can enter."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def agent(place: Path) -> Iterator[Agent]:
    one = Agent(place / "channel", ("--sudo", str(place / "sudo")))
    one.peer().close()
    deadline = time.monotonic() + 10
    while not (place / "sudo").exists():
        assert time.monotonic() < deadline, one.log()
        time.sleep(0.01)
    yield one
    one.stop()


@pytest.fixture
def path(agent: Agent, place: Path) -> Path:
    assert agent.process.poll() is None
    return place / "sudo"


def client(path: Path, *words: str) -> list[str]:
    source = (SOURCE / "space/guest/sudo_client.py").read_text().partition("if __name__")[0]
    return [sys.executable, "-I", "-S", "-c", source + f"\nos._exit(main({str(path)!r}))", *words]


def sudo(path: Path, *words: str, **options) -> subprocess.CompletedProcess[str]:
    options = {"cwd": "/", "env": {"SECRET": "s", "PATH": os.defpath}, **options}
    return subprocess.run(client(path, *words), text=True, capture_output=True, timeout=20, check=False, **options)


def test_streams_status_directory_and_environment_go_through(path: Path) -> None:
    done = sudo(
        path, "sh", "-c", 'read x; echo "$x $(pwd) ${SECRET-unset}"; echo no >&2; exit 7', input="line\n", cwd="/usr"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("line /usr unset\n", "no\n", 7)


def test_another_user_works_in_the_callers_directory_though_it_may_not_enter_it(path: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    done = sudo(path, "-u", "nobody", "sh", "-c", "id -un; id -G", cwd=closed)
    assert done.stdout == f"nobody\n{NOBODY}\n"
    assert done.returncode == 0


def test_death_by_a_signal_is_passed_on(path: Path) -> None:
    assert sudo(path, "sh", "-c", "kill -USR1 $$").returncode == -signal.SIGUSR1
    assert sudo(path, "sh", "-c", "kill -9 $$").returncode == -signal.SIGKILL


@pytest.mark.parametrize("words", [["no-such-program"], ["-u", "no-such-user", "id"], ["-Z"], ["/etc/passwd"]])
def test_what_cannot_be_started_is_told_with_status_1(path: Path, words: list[str]) -> None:
    done = sudo(path, *words)
    assert done.returncode == 1
    assert done.stderr.startswith("sudo: ")


def test_questions_about_sudo_itself_succeed(path: Path) -> None:
    assert [sudo(path, word).returncode for word in ("-v", "-k", "-K", "-l", "-V", "-h")] == [0] * 6


def test_the_kernel_keeps_out_who_is_not_in_the_group(path: Path) -> None:
    done = sudo(path, "id", user=NOBODY, group=NOBODY, extra_groups=[])
    assert (done.returncode, done.stdout) == (1, "")
    assert "not in the group sudo" in done.stderr
    assert sudo(path, "-l", user=NOBODY, group=NOBODY, extra_groups=[]).returncode == 1


def test_having_the_group_without_being_its_member_is_not_enough(path: Path) -> None:
    group = grp.getgrnam("sudo").gr_gid
    done = sudo(path, "id", user=NOBODY, group=NOBODY, extra_groups=[group])
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "sudo: nobody is not in the group sudo\n")


def test_signals_are_forwarded(path: Path) -> None:
    script = "trap 'echo got; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(client(path, "sh", "-c", script), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.terminate()
        assert running.stdout.read() == "got\n"
        assert running.wait(10) == 5


def test_what_the_caller_ignores_is_not_forwarded(path: Path) -> None:
    """``nohup sudo …`` outlives the terminal."""
    words = client(path, "sh", "-c", "echo ready; read x; echo $x")
    ignoring = "import os, signal, sys; signal.signal(1, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", ignoring, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGHUP)
        assert running.communicate("on\n", timeout=10)[0] == "on\n"
        assert running.returncode == 0


def test_a_program_whose_caller_is_killed_ends(path: Path) -> None:
    script = "trap '' TERM HUP; echo $$; while :; do sleep 0.05; done"
    with subprocess.Popen(client(path, "sh", "-c", script), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        pid = int(running.stdout.readline())
        assert alive(pid)
        running.kill()
        deadline = time.monotonic() + 10
        while alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_on_a_terminal_the_program_has_one_of_its_own_and_job_control(path: Path) -> None:
    words = client(path, "bash", "-c", "tty; stty size; read -r x; echo got:$x; sleep 30; echo slept")
    pid, master = pty.fork()
    if pid == 0:
        os.execv(words[0], words)
    seen = b""

    def until(what: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 10
        while what not in seen:
            assert select.select([master], [], [], deadline - time.monotonic())[0], seen
            with contextlib.suppress(OSError):
                seen += os.read(master, 4096)

    until(b"/dev/pts/")
    os.write(master, b"typed\n")
    until(b"got:typed")
    os.write(master, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGINT
    os.close(master)


def test_a_hundred_calls_leave_neither_process_nor_descriptor(agent: Agent, path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{agent.process.pid}/fd").iterdir()))

    def children() -> str:
        return Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text()

    wait(lambda: children() == "", "all calls of before are forgotten")
    before = descriptors()
    assert sudo(path, "true").returncode == 0
    wait(lambda: descriptors() <= before and children() == "", "the first call is forgotten")
    assert {sudo(path, "true").returncode for _ in range(100)} == {0}
    wait(lambda: descriptors() <= before and children() == "", "all calls are forgotten")


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(10)
        one.connect(str(path))
        assert receive(one)[0] == b"H"
        yield one


@pytest.mark.parametrize(
    ("data", "files"),
    [
        (b"\0\0\0\1x", 3),
        (b"\0\0\0\1x", 5),
        (b"\0\0\0\1x", 0),
        ((REQUEST_BYTES_MAX + 1).to_bytes(4, "big"), 4),
        (b"\xff\xff\xff\xff", 4),
        (b"\0\0\0\5a\0b\0c", 4),
        (b"\0\0\0\1xy", 4),
    ],
)
def test_senseless_requests_are_refused_and_the_next_is_served(path: Path, data: bytes, files: int) -> None:
    with connected(path) as one:
        socket.send_fds(one, [data], [2] * files)
        assert receive(one)[0] == REFUSED
    assert sudo(path, "echo", "x").stdout == "x\n"


def test_callers_beyond_the_bound_are_refused_until_others_go(path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(connected(path))
        done = sudo(path, "id")
        assert (done.returncode, done.stdout) == (1, "")
        assert "64 programs" in done.stderr
    deadline = time.monotonic() + 10
    while sudo(path, "id", "-u").stdout != "0\n":
        assert time.monotonic() < deadline


def test_who_says_nothing_is_hung_up_on(path: Path) -> None:
    with connected(path) as one:
        one.settimeout(15)
        assert receive(one)[:2] == (REFUSED, b"the request took too long")

"""The supervisor with real child processes, small Python programs in the place of SPACE's own."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from space import installation
from space.cli import down, supervision, up
from space.installation import Lock
from space.settings import Settings
from space.supervise import BACKOFF_S, Process, Supervisor, process_argv, process_env, trim_log


async def wait_for(condition: Callable[[], bool], timeout_s: float = 10) -> float:
    """Seconds until ``condition`` held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "the condition did not hold in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


class Pids:
    """Where the children of a test leave their process ids, one line for each start."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, name: str) -> list[int]:
        path = self._directory / f"{name}.pids"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def process(self, name: str, then: str = "signal.pause()") -> Process:
        path = self._directory / f"{name}.pids"
        record = f"import os, signal, time; f = open({str(path)!r}, 'a'); print(os.getpid(), file=f, flush=True)"
        argv = [sys.executable, "-I", "-S", "-c", f"{record}\n{then}"]
        return Process(name, argv, {"PATH": "/usr/bin:/bin"}, lambda: bool(self.of(name)))


@contextlib.asynccontextmanager
async def supervised(directory: Path, *processes: Process) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(processes, directory)
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        supervisor.stop()
        await asyncio.wait_for(task, 30)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_processes_start_in_order_each_after_the_one_before_answers(tmp_path: Path) -> None:
    pids = Pids(tmp_path)
    seen: list[tuple[str, list[int]]] = []

    def watched(name: str, before: str | None) -> Process:
        process = pids.process(name)

        def answers() -> bool:
            seen.append((name, pids.of(before) if before else [1]))
            return process.answers()

        return Process(process.name, process.argv, process.env, answers)

    async with supervised(tmp_path, watched("a", None), watched("b", "a"), watched("c", "b")):
        await wait_for(lambda: bool(pids.of("c")))
    assert [name for name, _ in seen] == sorted(name for name, _ in seen)
    assert all(before for _, before in seen)


async def test_a_killed_process_is_started_again_at_once_and_the_others_stay(tmp_path: Path) -> None:
    pids = Pids(tmp_path)
    async with supervised(tmp_path, pids.process("a"), pids.process("b")):
        await wait_for(lambda: bool(pids.of("b")))
        os.kill(pids.of("a")[0], signal.SIGKILL)
        await wait_for(lambda: len(pids.of("a")) == 2)
        assert BACKOFF_S[0] == 0
        assert alive(pids.of("a")[1])
        assert len(pids.of("b")) == 1


async def test_a_process_that_keeps_failing_is_started_ever_more_slowly(tmp_path: Path) -> None:
    pids = Pids(tmp_path)
    async with supervised(tmp_path, pids.process("a", "raise SystemExit(3)")):
        await wait_for(lambda: len(pids.of("a")) == 3)
        third = time.monotonic()
        await wait_for(lambda: len(pids.of("a")) == 4)
        assert time.monotonic() - third > 0.4


async def test_stop_ends_every_process_even_one_that_ignores_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("space.supervise.STOP_S", 0.3)
    pids = Pids(tmp_path)
    deaf = pids.process(
        "deaf", "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    )
    async with supervised(tmp_path, deaf, pids.process("b")):
        await wait_for(lambda: bool(pids.of("b")) and "deaf" in (tmp_path / "deaf.log").read_text())
    assert not any(alive(pid) for name in ("deaf", "b") for pid in pids.of(name))


async def test_stop_while_a_process_waits_for_its_next_start_returns_at_once(tmp_path: Path) -> None:
    pids = Pids(tmp_path)
    async with supervised(tmp_path, pids.process("a", "raise SystemExit(1)")):
        await wait_for(lambda: len(pids.of("a")) >= 5)
        began = time.monotonic()
    assert time.monotonic() - began < 1.5, "less than the pause that it is in"


async def test_output_of_a_process_is_in_its_log(tmp_path: Path) -> None:
    pids = Pids(tmp_path)
    async with supervised(tmp_path, pids.process("a", "print('a line', flush=True); signal.pause()")):
        await wait_for(lambda: "a line\n" in (tmp_path / "a.log").read_text() if pids.of("a") else False)


def test_a_long_log_moves_aside_and_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 50 + b"y" * 50)
        trim_log(path, bytes_max=60)
        writer.write(b"later")
    assert path.read_bytes() == b"later"
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 10 + b"y" * 50


def test_a_log_within_its_limit_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 60)
    trim_log(path, bytes_max=60)
    assert path.read_bytes() == b"x" * 60


HOLD = """
import sys, time
from pathlib import Path
from space.installation import Lock
lock = Lock(Path(sys.argv[1]))
print(lock.acquire(wait_s=0), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holding(path: Path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    assert child.stdout.readline() == "True\n"
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_lock_is_held_by_one_process_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    assert Lock(path).holder() is None
    with holding(path) as child:
        assert Lock(path).holder() == child.pid
        assert not Lock(path).acquire(wait_s=0)
    assert Lock(path).holder() is None
    assert Lock(path).acquire(wait_s=0)


def test_a_missing_lock_file_has_no_holder(tmp_path: Path) -> None:
    assert Lock(tmp_path / "none").holder() is None


def test_end_holder_kills_and_returns_when_the_lock_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with holding(path) as child:
        installation.end_holder(path, signal.SIGTERM, 5)
        assert child.wait() == -signal.SIGTERM
    installation.end_holder(path, signal.SIGTERM, 5)


def test_the_environment_of_a_process_holds_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_INSTANCE", "tenv")
    monkeypatch.setenv("SPACE_STORE_URL", "postgresql://user:password@localhost/space")
    monkeypatch.setenv("SPACE_API_KEY", "sk_of_the_person_who_ran_it")
    monkeypatch.setenv("LD_PRELOAD", "evil.so")
    for name in ("broker", "gateway", "node", "api"):
        env = process_env(name)
        assert env["SPACE_INSTANCE"] == "tenv"
        assert {"SPACE_API_KEY", "LD_PRELOAD"}.isdisjoint(env)
        assert ("SPACE_STORE_URL" in env) == (name == "api")


def test_the_command_line_asks_for_nothing_that_the_supervisor_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def as_root(module: str, *words: str, root: bool = True) -> int:
        asked.append(words[0])
        return subprocess.run([sys.executable, "-I", "-m", module, *words, "--help"], check=False).returncode

    monkeypatch.setattr(supervision, "INSTALLED", Path(sys.executable))
    monkeypatch.setattr(supervision, "as_root", as_root)
    up.up()
    down.down()
    assert asked == ["start", "stop-sandboxes", "stop"]


# What a process started for a user may do: written out by the process itself.
STATUS = "import os; print(open('/proc/self/status').read(), os.getgroups(), flush=True); import signal; signal.pause()"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_an_unprivileged_process_has_no_capability_and_no_way_to_get_one() -> None:
    argv = process_argv("node", "nobody")
    command = argv[: argv.index(sys.executable)]
    child = subprocess.Popen([*command, "/usr/bin/python3", "-I", "-c", STATUS], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    try:
        lines = []
        while not (lines and lines[-1].endswith("]\n")):
            lines.append(child.stdout.readline())
    finally:
        child.kill()
        child.communicate()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert "0" not in status["Uid"].split()
    assert "0" not in status["Gid"].split()
    assert {int(status[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert status["NoNewPrivs"].strip() == "1"
    assert lines[-1].strip() == "[]"


ORPHANS = """
import os, subprocess, sys
from space.supervise import process_argv
argv = process_argv("node", sys.argv[1])
command = argv[:argv.index(sys.executable)]
child = subprocess.Popen([*command, "/usr/bin/sleep", "60"])
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("user", ["root", "nobody"])
async def test_processes_die_with_a_supervisor_that_was_killed(user: str) -> None:
    """Invariant 3 for the processes themselves: no second set beside orphans of the first."""
    parent = subprocess.Popen(  # noqa: ASYNC220 - returns at once
        [sys.executable, "-c", ORPHANS, user], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout
    pid = int(parent.stdout.readline())
    # setpriv has done its part once it has become the program
    await wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
    parent.kill()
    parent.communicate()
    await wait_for(lambda: not alive(pid), 5)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give directories to other users")
def test_prepare_gives_each_process_its_own_directories(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", run_dir=tmp_path / "run", api_user="daemon", node_user="nobody")
    installation.prepare(settings)
    installation.prepare(settings)
    daemon, nobody = 1, 65534

    def told(path: Path) -> tuple[int, int]:
        status = path.stat()
        return status.st_uid, status.st_mode & 0o7777

    assert told(settings.api_dir) == (daemon, 0o700)
    assert told(settings.node_dir) == (nobody, 0o700)
    assert told(settings.broker_dir) == (0, 0o700)
    assert told(settings.channels_dir) == (0, 0o710)
    assert told(settings.run_dir / "node") == (nobody, 0o2750)
    assert (settings.run_dir / "node").stat().st_gid == daemon
    assert told(settings.run_dir / "locks" / "supervisor") == (0, 0o600)
    assert told(settings.run_dir / "locks" / "node") == (nobody, 0o600)


def test_prepare_names_a_missing_user(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", run_dir=tmp_path / "run", node_user="no-such-user")
    with pytest.raises(installation.HostError, match="no-such-user"):
        installation.prepare(settings)
    assert not settings.data_dir.exists()

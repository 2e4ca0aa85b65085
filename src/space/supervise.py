"""Keeps the four processes of one installation running, each as its own user, where systemd does not.

    python -m space.supervise run       in the foreground, until SIGTERM
    python -m space.supervise start     in the background; returns when all is ready, or says what is not
    python -m space.supervise stop      stops the supervisor and the processes; machines stay
    python -m space.supervise stop-sandboxes   stops every sandbox that has a machine, as its owner could; disks stay
    python -m space.supervise prepare   makes the directories (systemd units call it)
    python -m space.supervise serve X   becomes the process X (api, node, gateway, broker): what the supervisor starts

Knows nothing of what the processes do. Two sets of them never run at once: each holds a lock of its own while it lives,
dies with the supervisor (PR_SET_PDEATHSIG), and is started only by the one supervisor that holds the supervisor's lock.
"""

import argparse
import asyncio
import contextlib
import os
import pwd
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from space import installation
from space.errors import HostError, Unavailable
from space.installation import Lock
from space.settings import Settings, load

BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Waits before the 1st, 2nd, … restart in a row; the last one stays."""
HEALTHY_S = 10.0
"""A process that lived this long starts the row anew."""
TURN_S = 10.0
"""How long the next process waits for the one before it to answer; it must cope with its absence anyway."""
STOP_S = 10.0
LOCK_S = 15.0
LOG_BYTES_MAX = 8 * 1024 * 1024
LOG_CHECK_S = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """One supervised process. ``answers`` says whether it serves already."""

    name: str
    argv: Sequence[str]
    env: dict[str, str]
    answers: Callable[[], bool]


class Supervisor:
    """Runs ``processes`` until told to stop, and starts each again that ends."""

    def __init__(self, processes: Sequence[Process], log_dir: Path) -> None:
        self._processes = processes
        self._log_dir = log_dir
        self._stopping = asyncio.Event()
        self._running: dict[str, asyncio.subprocess.Process] = {}

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Start all in order, keep them running, and stop them in reverse order once told to."""
        async with asyncio.TaskGroup() as tasks:
            keepers = []
            for process in self._processes:
                keepers.append(tasks.create_task(self._keep(process)))
                await self._wait_answers(process)
                if self._stopping.is_set():
                    break
            trimmer = tasks.create_task(self._keep_logs_small())
            await self._stopping.wait()
            trimmer.cancel()
            for process in reversed(self._processes):
                await self._end(process.name)
            for keeper in keepers:
                keeper.cancel()

    async def _keep(self, process: Process) -> None:
        failures = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            child = await self._start(process)
            self._running[process.name] = child
            say(f"{process.name} started, pid {child.pid}")
            status = await child.wait()
            del self._running[process.name]
            if self._stopping.is_set():
                return
            failures = 0 if time.monotonic() - started >= HEALTHY_S else failures
            pause_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            failures += 1
            say(f"{process.name} ended ({ending(status)}); next start in {pause_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _start(self, process: Process) -> asyncio.subprocess.Process:
        log = os.open(self._log_dir / f"{process.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        try:
            # SAFETY: argv and environment are made of settings and constants (`installation_processes`); the process
            # is given no descriptor but its log, and drops to its own user before it runs any code of ours.
            return await asyncio.create_subprocess_exec(
                *process.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=process.env,
                start_new_session=True,
            )
        finally:
            os.close(log)

    async def _wait_answers(self, process: Process) -> None:
        deadline = time.monotonic() + TURN_S
        while not self._stopping.is_set() and time.monotonic() < deadline:
            if process.answers():
                return
            await asyncio.sleep(0.02)

    async def _end(self, name: str) -> None:
        child = self._running.get(name)
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            await asyncio.wait_for(child.wait(), STOP_S)
        except TimeoutError:
            say(f"{name} did not stop within {STOP_S:g} s: killing it")
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _keep_logs_small(self) -> None:
        while True:
            for path in self._log_dir.glob("*.log"):
                trim_log(path)
            await asyncio.sleep(LOG_CHECK_S)


def trim_log(path: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
    """Move a log that is too long to ``<name>.1`` and go on with an empty one; its writers append to the same file."""
    if path.stat().st_size <= bytes_max:
        return
    old = path.with_name(path.name + ".1")
    old.write_bytes(path.read_bytes()[-bytes_max:])
    old.chmod(0o640)
    os.truncate(path, 0)


def installation_processes(settings: Settings) -> list[Process]:
    """The four processes of ``settings``, in the order of starting."""
    api_host = "127.0.0.1" if settings.api_host in {"0.0.0.0", "::"} else settings.api_host  # noqa: S104
    answers: dict[str, Callable[[], bool]] = {
        "broker": lambda: installation.accepts(settings.broker_socket),
        "gateway": lambda: installation.accepts(settings.gateway_socket),
        "node": lambda: installation.accepts(settings.node_socket),
        "api": lambda: installation.accepts((api_host, settings.api_port)),
    }
    users = installation.users(settings)
    return [Process(name, process_argv(name, users[name]), process_env(name), answers[name]) for name in answers]


def process_argv(name: str, user: str) -> list[str]:
    """What starts process ``name`` as ``user``: dying with its parent, and without a way back to privileges."""
    serve = [sys.executable, "-I", "-m", "space.supervise", "serve", name, "--parent", str(os.getpid())]
    return [*_as_user(user), *serve]


def _as_user(user: str) -> list[str]:
    drop = []
    if user != "root":
        account = pwd.getpwnam(user)
        ids = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        drop = [*ids, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    return ["setpriv", "--pdeathsig=KILL", *drop]


def process_env(name: str) -> dict[str, str]:
    """Nothing of the starter's environment but settings; the store's URL, maybe with a password, for the api alone."""
    settings = {"SPACE_CONFIG", *(f"SPACE_{field.upper()}" for field in Settings.model_fields)}
    if name != "api":
        settings.remove("SPACE_STORE_URL")
    kept = {key: value for key, value in os.environ.items() if key in settings}
    return {**kept, "PATH": installation.PATH, "LANG": "C.UTF-8", "HOME": "/", "PYTHONUNBUFFERED": "1"}


def say(text: str) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    print(f"{stamp} supervisor: {text}", flush=True)  # noqa: T201 - its log is its output


def ending(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


def serve(settings: Settings, name: str, parent: int | None) -> None:
    """Become the process ``name``, holding its lock for as long as this process lives."""
    if parent is not None and os.getppid() != parent:
        raise SystemExit("the supervisor is gone")
    lock = Lock(installation.process_lock(settings, name))
    if not lock.acquire(wait_s=LOCK_S):
        raise SystemExit(f"another {name} process (pid {lock.holder()}) serves {settings.run_dir}")
    sys.argv = ["space.assemble", name]
    runpy.run_module("space.assemble", run_name="__main__", alter_sys=True)


async def run(settings: Settings) -> None:
    """Supervise ``settings``' installation until SIGTERM or SIGINT."""
    installation.prepare(settings)
    lock = Lock(installation.supervisor_lock(settings))
    if not lock.acquire(wait_s=0):
        raise HostError(f"A supervisor (pid {lock.holder()}) runs this installation already.", code="already-running")
    supervisor = Supervisor(installation_processes(settings), settings.run_dir / "log")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    say(f"started for instance {settings.instance!r}, pid {os.getpid()}")
    await supervisor.run()
    say("stopped")


def start(settings: Settings, ready_s: float) -> None:
    """Start the supervisor in the background unless it runs; return when the api says that it is ready."""
    installation.prepare(settings)
    log_path = settings.run_dir / "log" / "supervisor.log"
    child = _background(log_path) if Lock(installation.supervisor_lock(settings)).holder() is None else None
    deadline = time.monotonic() + ready_s
    while not installation.is_ready(settings):
        if child is not None and child.poll() is not None:
            raise Unavailable(f"The supervisor ended at once; see {log_path}.", code="not-started")
        if time.monotonic() > deadline:
            raise Unavailable(f"Not ready within {ready_s:g} s. {installation.unready(settings)}", code="not-ready")
        time.sleep(0.05)


def _background(log_path: Path) -> "subprocess.Popen[bytes]":
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    try:
        # SAFETY: our own module with a fixed argv, detached from the caller's terminal, session and environment.
        return subprocess.Popen(
            [sys.executable, "-I", "-m", "space.supervise", "run"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=process_env("api"),
            start_new_session=True,
        )
    finally:
        os.close(log)


def stop(settings: Settings, wait_s: float = 4 * STOP_S + 5) -> None:
    """Stop the supervisor and its processes, also where only some of them are left. Machines stay."""
    installation.end_holder(installation.supervisor_lock(settings), signal.SIGTERM, wait_s)
    for name in installation.users(settings):
        installation.end_holder(installation.process_lock(settings, name), signal.SIGKILL, STOP_S)


def stop_sandboxes(settings: Settings) -> int:
    """Have the api's user stop all sandboxes that have a machine; return 0 when none is left, or nothing runs here."""
    if not installation.accepts(settings.node_socket):
        return 0
    argv = [*_as_user(settings.api_user), sys.executable, "-I", "-m", "space.api", "stop-all"]
    # SAFETY: argv and environment are made of settings and constants; what runs has dropped to the api's user.
    return subprocess.run(argv, stdin=subprocess.DEVNULL, cwd="/", env=process_env("api"), check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m space.supervise")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("run")
    verbs.add_parser("start").add_argument("--ready-s", type=float, default=30)
    verbs.add_parser("stop")
    verbs.add_parser("stop-sandboxes")
    verbs.add_parser("prepare")
    serve_parser = verbs.add_parser("serve")
    serve_parser.add_argument("name", choices=["api", "node", "gateway", "broker"])
    serve_parser.add_argument("--parent", type=int)
    args = parser.parse_args()
    try:
        settings = load()
        match args.verb:
            case "run":
                asyncio.run(run(settings))
            case "start":
                start(settings, args.ready_s)
            case "stop":
                stop(settings)
            case "stop-sandboxes":
                raise SystemExit(stop_sandboxes(settings))
            case "prepare":
                installation.prepare(settings)
            case _:
                serve(settings, args.name, args.parent)
    except HostError as error:
        raise SystemExit(f"{error.code}: {error.message}") from error


if __name__ == "__main__":
    main()

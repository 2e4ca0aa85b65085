"""A whole installation for tests: its own name, directories and ports, beside whatever else runs on this machine.

It is started as `space up` starts one, by the supervisor, from the environment that runs the tests.
"""

import contextlib
import http
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from space import installation
from space.broker import doctor
from space.settings import Settings

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
DATA, RUN = Path("/var/lib"), Path("/run")
PREFIX = "space-test-"
READY_S = 60
UNMOUNTED_S = 10.0
STOP_S = 60
KILL_S = 3
EMULATED = 5
"""How many times longer than on gVisor the same may take on an emulated processor, with others at work beside it."""


def unfit() -> str | None:
    """Why this machine cannot run an installation; None when it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("ip", "nft", "mkfs.btrfs", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: run scripts/packages host"
    return None


def printed_path(script: str) -> Path:
    """What a set-up script prints last: the path of what it made, or found made."""
    done = subprocess.run([SCRIPTS / script], stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return Path(done.stdout.splitlines()[-1])


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, of the kind that no outgoing connection of the host has by chance."""
    with contextlib.ExitStack() as open_sockets:
        found: list[int] = []
        while len(found) < count:
            one, port = open_sockets.enter_context(socket.socket()), 10000 + secrets.randbelow(20000)
            with contextlib.suppress(OSError):
                one.bind(("0.0.0.0", port))
                found.append(port)
    return found


def gateway_ports() -> dict[str, int]:
    return dict(zip(("gateway_port", "gateway_dns_port"), free_ports(2), strict=True))


def usual_driver() -> str:
    """The driver of sandboxes that name none: SPACE_TEST_DRIVER says another."""
    return os.environ.get("SPACE_TEST_DRIVER", "gvisor")


def chosen_driver() -> dict[str, str]:
    """Settings that let sandboxes which name no driver have the one that SPACE_TEST_DRIVER names."""
    named = {"driver": os.environ.get("SPACE_TEST_DRIVER"), "firecracker": os.environ.get("SPACE_FIRECRACKER")}
    return {name: value for name, value in named.items() if value} if named["driver"] else {}


def patient(seconds: float) -> float:
    """As long as that may take where processors are the host's own; several times that where they are emulated."""
    return seconds * (EMULATED if usual_driver() == "qemu" else 1)


def gvisor_alone(reason: str) -> pytest.MarkDecorator:
    """For a test whose claim is not one of sandboxes but of gVisor's: skipped where another driver was chosen."""
    chosen = usual_driver()
    return pytest.mark.skipif(chosen != "gvisor", reason=f"driver {chosen}: {reason}")


class Installation:
    """`start` it, use ``url``, ``key`` and ``other_key`` (another project's), break it with `kill`, `end` it."""

    def __init__(self, **changes: object) -> None:
        self.instance = "t" + secrets.token_hex(3)
        api_port, node_port, e2b_port = free_ports(3)
        values = {
            "instance": self.instance,
            "data_dir": DATA / f"{PREFIX}{self.instance}",
            "run_dir": RUN / f"{PREFIX}{self.instance}",
            # A copy: what a test does to it must not reach an installation in use.
            "guest_dir": DATA / f"{PREFIX}{self.instance}" / "guest",
            "api_port": api_port,
            "node_port": node_port,
            "e2b_port": e2b_port,
            **gateway_ports(),
            "disk_store_mib": 8 * 1024,
            # Few spares: most tests make machines of one kind once, and every spare costs processor time.
            "pool_max": 2,
            **chosen_driver(),
            **changes,
        }
        own = {f"SPACE_{name.upper()}": str(value) for name, value in values.items()}
        self._environment = {**own, "PATH": installation.PATH, "SPACE_CONFIG": "/nonexistent", "LANG": "C.UTF-8"}
        self.settings = Settings.model_validate(values)
        self.url = f"http://127.0.0.1:{api_port}"
        self.data_plane_url = self.settings.data_plane_url
        self.key = ""
        self.other_key = ""
        self.has_interpreter = False
        self._bodies: dict[str, str] = {}

    def start(self) -> None:
        """Make everything and wait until it is ready."""
        self._record()
        self.settings.data_dir.mkdir()
        (self.settings.data_dir / "owner").write_text(str(os.getpid()))
        shutil.copytree(printed_path("guest-runtime"), self.settings.guest_dir)
        self._run("space.supervise", "prepare")
        defaults = ROOT / "templates/base/defaults.json"
        self._run(
            "space.broker", "import-template", "--name=base", f"--defaults={defaults}", printed_path("base-template")
        )
        self.run_supervisor()
        self._make_keys()

    def add_interpreter(self) -> None:
        """Have the template `code-interpreter-v1`; made on this machine at its first use, taken in at the first call."""
        if self.has_interpreter:
            return
        defaults = ROOT / "templates/code-interpreter-v1/defaults.json"
        name = "--name=code-interpreter-v1"
        tar = printed_path("interpreter-template")
        self._run("space.broker", "import-template", name, f"--defaults={defaults}", tar)
        self.has_interpreter = True

    def run_supervisor(self) -> None:
        """Start the supervisor and return when the api says that all is ready."""
        self._run("space.supervise", "start", f"--ready-s={READY_S}")

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not (all(map(self.pid, ("broker", "gateway", "node", "api"))) and installation.is_ready(self.settings)):
            assert time.monotonic() < deadline, installation.unready(self.settings)
            time.sleep(0.02)

    def pid(self, name: str) -> int | None:
        """The process id of broker, gateway, node, api or supervisor while it lives."""
        lock = self.settings.run_dir / "locks" / name
        return installation.Lock(lock).holder()

    def kill(self, name: str) -> None:
        """SIGKILL one process; returns when it is gone (and, unless it is the supervisor, about to come back).

        One that is about to come back from an earlier one is waited for.
        """
        deadline = time.monotonic() + READY_S
        while (pid := self.pid(name)) is None:
            assert time.monotonic() < deadline, f"the {name} is not running"
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while self.pid(name) == pid:
            assert time.monotonic() < deadline, f"the {name} outlived SIGKILL"
            time.sleep(0.001)

    def names_of(self, sandbox: str) -> list[str]:
        """The names under which this host knows a sandbox: its own, and that of its body where it was a spare once.

        A body that was seen once is remembered, so that one can look for it when it should be gone.
        """
        for journal in (self.settings.broker_dir / "machines").glob("*/journal.json"):
            with contextlib.suppress(OSError, ValueError):
                entry = json.loads(journal.read_text())
                self._bodies[entry["machine"]] = entry["body"]
        return sorted({sandbox, self._bodies.get(sandbox, sandbox)}, key=lambda name: name != sandbox)

    @contextlib.contextmanager
    def standing_still(self, name: str) -> Iterator[None]:
        """Have one process do nothing: the api, say, which collects machines that no sandbox of its store has."""
        pid = self.pid(name)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def kill_agent(self, body: str) -> bool:
        """SIGKILL the guest's first process; False when there is none, or the machine stands still."""
        root = self.settings.run_dir / "broker" / "runsc"
        words = [str(doctor.find_runsc(self.settings)), f"--root={root}", "kill", body, "KILL"]
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=KILL_S)
        except subprocess.TimeoutExpired:
            return False  # a machine that stands still does not answer
        return done.returncode == 0

    def processes_of(self, sandbox: str) -> list[int]:
        """Host processes of a sandbox's machine: those in its cgroups, and those that name it in their arguments."""
        found: set[int] = set()
        names = self.names_of(sandbox)
        # Not by a pattern: that stumbles over other installations' groups, which come and go meanwhile.
        for directory, _, files in os.walk("/sys/fs/cgroup"):
            ours = directory.endswith(tuple(f"/{self.instance}/{name}" for name in names))
            if ours and "cgroup.procs" in files:
                with contextlib.suppress(OSError):
                    found.update(map(int, (Path(directory) / "cgroup.procs").read_text().split()))
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes()
                if any(name.encode() in words for name in names):
                    found.add(int(process.name))
        return sorted(found - {os.getpid()})

    def leftovers_of(self, sandbox: str) -> list[str]:
        """Everything on this host that bears a sandbox's names: processes, cgroups, namespaces, mounts, sockets, files."""
        names = self.names_of(sandbox)

        def named(text: str) -> bool:
            return any(name in text for name in names)

        found = [f"process {pid}" for pid in self.processes_of(sandbox)]
        found += [f"namespace {path.name}" for path in Path("/run/netns").iterdir() if named(path.name)]
        found += [f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if named(line)]
        for top in ("/sys/fs/cgroup", self.settings.data_dir, self.settings.run_dir):
            for directory, inside, files in os.walk(top):
                found += [f"file {directory}/{name}" for name in (*inside, *files) if named(name)]
                if directory.endswith("/disks"):
                    inside.remove("templates")
                elif directory.endswith(("/disks/machines", "/disks/snapshots")):
                    inside.clear()
        return found

    def memory_mib(self, name: str, field: str = "VmRSS") -> float:
        """Resident memory of broker, gateway, node or api."""
        status = Path(f"/proc/{self.pid(name)}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{field}:")) / 1024

    @contextlib.contextmanager
    def flat(self, *names: str, mib: int) -> Iterator[None]:
        """Say that none of these processes is larger by so much at any moment while the block lasts."""
        for name in names:
            Path(f"/proc/{self.pid(name)}/clear_refs").write_text("5")  # its peak begins anew, see proc(5)
        before = {name: self.memory_mib(name) for name in names}
        yield
        for name, mib_before in before.items():
            grown = self.memory_mib(name, "VmHWM") - mib_before
            assert grown < mib, f"{name} was larger by {grown:.0f} MiB"

    def strays(self, what: str = "machines") -> list[str]:
        """What sandboxes (`machines`) or the whole installation (`all`) have on this host, a line each."""
        done = subprocess.run(
            [SCRIPTS / "strays", what, self.instance, self.settings.data_dir, self.settings.run_dir],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.splitlines()

    def logs(self) -> str:
        """The last lines of each process's log."""
        parts = []
        for path in sorted((self.settings.run_dir / "log").glob("*.log")):
            last = path.read_text(errors="replace").splitlines()[-40:]
            parts.append(f"--- {path.name}\n" + "\n".join(last))
        return "\n".join(parts)

    def delete_all(self) -> None:
        """Delete every sandbox of both projects, and wait until they are gone."""
        for key in (self.key, self.other_key):
            with httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=90) as client:
                for sandbox in client.get("/v1/sandboxes", params={"limit": 100}).json()["items"]:
                    if sandbox["state"] != "deleted":
                        client.delete(f"/v1/sandboxes/{sandbox['id']}", headers={"Prefer": "wait=60"})

    def stop(self) -> None:
        """Stop supervisor and processes; machines stay."""
        self._run("space.supervise", "stop")

    def end(self) -> None:
        """Take everything away, by the product's own means; then fail if anything is left, and take that away, too."""
        problems = []
        try:
            self.delete_all()
            problems += [f"after deleting every sandbox: {stray}" for stray in self.strays("machines")]
            self.stop()
            self._run("space.broker", "unmount")
            shutil.rmtree(self.settings.run_dir)
            # A machine that starts elsewhere holds a copy of every mount until it has left the host's root.
            deadline = time.monotonic() + UNMOUNTED_S
            while (strays := self.strays("all")) and time.monotonic() < deadline:
                time.sleep(0.1)
            problems += [f"after stopping: {stray}" for stray in strays]
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not keep the rest from being removed
            problems.append(f"while taking it down: {error!r}\n{self.logs()}")
        remove(self.instance)
        assert not problems, "\n".join(problems)

    def stop_all_sandboxes(self) -> None:
        """What `down` asks first."""
        self._run("space.supervise", "stop-sandboxes")

    def _make_keys(self) -> None:
        path = self.settings.api_dir / "test.key"
        self._run("space.api", "bootstrap", "--key-file", path, user=self.settings.api_user)
        self.key = path.read_text().strip()
        path.unlink()
        answer = httpx.post(
            f"{self.url}/v1/projects",
            json={"name": "other"},
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=30,
        )
        assert answer.status_code == http.HTTPStatus.CREATED, answer.text
        self.other_key = json.loads(answer.text)["key"]

    def _run(self, module: str, *words: str | Path, user: str | None = None) -> None:
        done = subprocess.run(
            [sys.executable, "-I", "-m", module, *map(str, words)],
            env=self._environment,
            cwd="/",
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=READY_S + STOP_S,
            check=False,
        )
        if done.returncode != 0:
            raise subprocess.SubprocessError(f"{module} {words[0]} failed: {done.stdout}\n{self.logs()}")

    def _record(self) -> None:
        """Tell the script that runs the tests which names to look for at its end."""
        if path := os.environ.get("SPACE_TEST_RECORD"):
            with Path(path).open("a") as file:
                file.write(f"{self.instance} {self.settings.data_dir} {self.settings.run_dir}\n")


def remove(instance: str) -> None:
    """End and remove all of a test's installation by force."""
    data_dir, run_dir = DATA / f"{PREFIX}{instance}", RUN / f"{PREFIX}{instance}"
    subprocess.run([SCRIPTS / "strays", "all", instance, data_dir, run_dir, "--remove"], check=True, timeout=60)
    shutil.rmtree(data_dir, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove installations of test runs that were killed: those whose owner is gone. What resists is warned of."""
    for owner in DATA.glob(f"{PREFIX}*/owner"):
        try:
            if not Path(f"/proc/{int(owner.read_text())}").exists():
                remove(owner.parent.name.removeprefix(PREFIX))
        except (OSError, ValueError):
            continue
        except subprocess.SubprocessError as error:
            # Another process's mount namespace may hold its loop device; that is no fault of the run that begins.
            warnings.warn(f"{owner.parent} could not be removed: {error}", stacklevel=2)


@contextlib.contextmanager
def running(**changes: object) -> Iterator[Installation]:
    """A running installation that is taken away afterwards."""
    one = Installation(**changes)
    try:
        one.start()
        yield one
    except BaseException:
        print(one.logs())
        remove(one.instance)
        raise
    one.end()

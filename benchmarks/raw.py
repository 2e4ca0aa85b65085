"""The raw tool: the same guest (same root filesystem and agent) driven by the ``runsc`` command alone."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

AGENT = [
    "/.space/lib/ld-linux-x86-64.so.2",
    "--library-path",
    "/.space/lib",
    "/.space/bin/python3",
    "-I",
    "-S",
    "/.space/agent.pyz",
]
ENTER = 'mount -t tmpfs none /proc/sys/net/core && exec "$@"'


def run(*argv: str, check: bool = True) -> float:
    """Run a program to its end and return the seconds it took."""
    start = time.perf_counter()
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    took = time.perf_counter() - start
    if check and done.returncode:
        raise RuntimeError(f"{argv[0]} failed: {done.stderr.decode(errors='replace')[-400:]}")
    return took


class RawRunsc:
    """One container on a plain root directory, without SPACE."""

    def __init__(self, runsc: str, rootfs: Path, guest_dir: Path, work: Path) -> None:
        self.runsc, self.work = runsc, work
        self.id = "raw" + secrets.token_hex(6)
        self.netns = f"raw-{self.id[-8:]}"
        self.bundle = work / "bundle"
        self.image = work / "image"
        self.bundle.mkdir()
        for name in ("in", "out"):
            os.mkfifo(self.bundle / name)
        self.ends = [os.open(self.bundle / name, os.O_RDWR) for name in ("in", "out")]
        run("ip", "netns", "add", self.netns)
        run("ip", "-n", self.netns, "link", "set", "lo", "up")
        self.rootfs = rootfs
        (self.bundle / "config.json").write_text(json.dumps(self._config(rootfs, guest_dir)))

    def _config(self, rootfs: Path, guest_dir: Path) -> dict[str, object]:
        names = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SYS_ADMIN")
        caps = [f"CAP_{name}" for name in names]
        return {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": AGENT,
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/",
                "capabilities": {"bounding": caps, "effective": caps, "permitted": caps},
            },
            "root": {"path": str(rootfs), "readonly": False},
            "hostname": "raw",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
                {"destination": "/.space", "type": "bind", "source": str(guest_dir), "options": ["ro", "bind"]},
            ],
            "linux": {
                "namespaces": [
                    {"type": "pid"},
                    {"type": "ipc"},
                    {"type": "uts"},
                    {"type": "mount"},
                    {"type": "network", "path": f"/run/netns/{self.netns}"},
                ]
            },
        }

    def _command(self, verb: str, *more: str) -> list[str]:
        flags = ["--overlay2=none", "--network=sandbox", "--platform=systrap"]
        return [self.runsc, f"--root={self.work / 'state'}", *flags, verb, *more]

    def _start(self, verb: str, *more: str) -> float:
        inside = ["nsenter", f"--net=/run/netns/{self.netns}", "unshare", "-m", "--propagation", "private"]
        argv = [*inside, "sh", "-c", ENTER, "sh", *self._command(verb, "-detach", "-bundle", str(self.bundle), *more)]
        start = time.perf_counter()
        with (self.work / "err").open("wb") as err:
            subprocess.run(argv, stdin=self.ends[0], stdout=self.ends[1], stderr=err, check=True)
        return time.perf_counter() - start

    def boot(self) -> float:
        return self._start("run", self.id)

    def restore(self) -> float:
        return self._start("restore", "-image-path", str(self.image), self.id)

    def verb(self, verb: str, *more: str) -> float:
        return run(*self._command(verb, *more, self.id))

    def exec_true(self) -> float:
        return run(*self._command("exec", self.id, "/bin/true"))

    def stdout_mib_per_s(self, argv: list[str], size_mib: int) -> float:
        """Run a program that prints ``size_mib`` MiB, and return how fast they came out of ``runsc exec``."""
        start = time.perf_counter()
        command = self._command("exec", self.id, *argv)
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as program:
            assert program.stdout
            got = 0
            while chunk := program.stdout.read(1024 * 1024):
                got += len(chunk)
        if got != size_mib * 1024 * 1024:
            raise RuntimeError(f"runsc exec: {got} bytes arrived")
        return size_mib / (time.perf_counter() - start)

    def checkpoint(self) -> float:
        shutil.rmtree(self.image, ignore_errors=True)
        took = run(*self._command("checkpoint", "-compression=none", f"-image-path={self.image}", self.id))
        self.delete()
        return took

    def delete(self) -> None:
        run(*self._command("kill", self.id, "KILL"), check=False)
        run(*self._command("delete", "-force", self.id), check=False)

    def close(self) -> None:
        try:
            self.delete()
        finally:
            run("ip", "netns", "del", self.netns, check=False)
            for end in self.ends:
                os.close(end)


def checkpoint_in_place(runsc: str, sandbox: str, image: Path) -> float:
    """Write the memory of a running sandbox's own machine by the raw tool, and let it go on; return the seconds.

    The sandbox must not have come from the pool: then its machine bears its id.
    """
    shutil.rmtree(image, ignore_errors=True)
    words = ["checkpoint", "-leave-running", "-compression=none", f"-image-path={image}", sandbox]
    return run(runsc, _root_of(sandbox), *words)


def _root_of(sandbox: str) -> str:
    """Return the ``--root=`` that the machine's sentry was started with."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = process.read_text().split("\0")
            if sandbox in words and words[0] == "runsc-sandbox":
                return next(word for word in words if word.startswith("--root="))
    raise RuntimeError(f"{sandbox} has no machine of its name")


@contextlib.contextmanager
def raw_runsc(runsc: str, base_tar: Path, guest_dir: Path) -> Iterator[RawRunsc]:
    """A raw container on a copy of the base template; gone afterwards, whatever happens."""
    work = Path(tempfile.mkdtemp(prefix="space-bench-"))
    raw = None
    try:
        rootfs = work / "rootfs"
        rootfs.mkdir()
        run("tar", "-xf", str(base_tar), "-C", str(rootfs), "--numeric-owner", "--exclude=./dev/*")
        (rootfs / ".space").mkdir(exist_ok=True)
        (rootfs / "tmp/.X11-unix").mkdir(exist_ok=True)
        raw = RawRunsc(runsc, rootfs, guest_dir, work)
        yield raw
    finally:
        if raw:
            raw.close()
        shutil.rmtree(work, ignore_errors=True)

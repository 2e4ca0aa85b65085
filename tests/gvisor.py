"""A bare gVisor machine around the agent, for tests of the agent alone: no broker, no driver, no network."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agent import SOURCE, Peer, hold_fifos

RUNSC = next((path for path in ("/opt/space/bin/runsc", shutil.which("runsc")) if path and Path(path).exists()), None)
PYTHON = "/usr/bin/python3"
RUN_S = 60.0
CAPABILITIES = [
    f"CAP_{name}"
    for name in [
        "CHOWN",
        "DAC_OVERRIDE",
        "DAC_READ_SEARCH",
        "FOWNER",
        "FSETID",
        "KILL",
        "SETGID",
        "SETUID",
        "SETPCAP",
        "MKNOD",
        "SETFCAP",
        "SYS_CHROOT",
        "SYS_PTRACE",
        "SYS_ADMIN",
        "SYS_RESOURCE",
        "SYS_TIME",
        "NET_BIND_SERVICE",
        "NET_ADMIN",
        "NET_RAW",
        "AUDIT_WRITE",
    ]
]


def unfit() -> str | None:
    """Why no such machine can be had here."""
    if os.getuid() != 0:
        return "needs root"
    if RUNSC is None:
        return "needs runsc"
    return None if Path(PYTHON).exists() else f"needs {PYTHON}"


@dataclass
class Machine:
    """One machine; its root is ``directory/root``, on which this host's /usr is mounted read-only."""

    directory: Path
    number: int = 0

    @property
    def id(self) -> str:
        return f"agenttest{os.getpid():07d}n{self.number:03d}"

    @property
    def root(self) -> Path:
        return self.directory / "root"

    @property
    def channel(self) -> Path:
        return self.directory / "channel"

    def boot(self) -> None:
        self._lay_out()
        self._open_channel()
        self._runsc("run", "-detach", "-bundle", str(self.directory), self.id, channel=True)

    def peer(self, **settings: Any) -> Peer:
        one = Peer(self.channel, **settings)
        one.greet()
        return one

    def suspend(self, image: Path) -> None:
        """Write a memory image and end the machine, as the driver does."""
        self._runsc("pause", self.id)
        self._runsc("checkpoint", "-leave-running", f"-image-path={image}", self.id)
        self.end()

    def wake(self, image: Path) -> None:
        """Go on from a memory image, with a new id and new FIFOs."""
        self.number += 1
        shutil.rmtree(self.channel)
        self._open_channel()
        self._runsc("restore", "-detach", "-bundle", str(self.directory), f"-image-path={image}", self.id, channel=True)

    def end(self) -> None:
        self._runsc("delete", "-force", self.id, check=False)
        for fd in self.holds:
            os.close(fd)
        self.holds = []

    def memory_kib(self) -> int:
        """Proportional memory of all processes of the machine."""
        total = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.id not in (entry / "cmdline").read_text():
                        continue
                    total += sum(
                        int(line.split()[1])
                        for line in (entry / "smaps_rollup").read_text().splitlines()
                        if line.startswith("Pss:")
                    )
                except OSError:
                    continue
        return total

    def _lay_out(self) -> None:
        for name in ("usr", "etc", "proc", "dev", "sys", "tmp", "var", "root", "home/user", "agent"):
            (self.root / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64", "sbin"):
            (self.root / name).symlink_to(f"usr/{name}")
        (self.root / "tmp").chmod(0o1777)
        (self.root / "etc/passwd").write_text(
            "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n"
        )
        (self.root / "etc/group").write_text("root:x:0:\nuser:x:1000:\nextra:x:2000:user\n")
        os.chown(self.root / "home/user", 1000, 1000)
        agent = self.root / "agent/agent.pyz"
        subprocess.run(
            [PYTHON, "-I", str(SOURCE.parent / "scripts/build_guest.py"), "agent", str(SOURCE), str(agent)],
            check=True,
            timeout=RUN_S,
        )
        mounts = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs"},
            {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["ro", "bind"]},
        ]
        spec = {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": [PYTHON, "-I", "-S", "/agent/agent.pyz"],
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/",
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
                "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 65536, "soft": 65536}],
            },
            "root": {"path": str(self.root), "readonly": False},
            "hostname": "sandbox",
            "mounts": mounts,
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
        }
        (self.directory / "config.json").write_text(json.dumps(spec))

    def _open_channel(self) -> None:
        self.channel.mkdir()
        self.holds = hold_fifos(self.channel)

    def _runsc(self, *arguments: str, channel: bool = False, check: bool = True) -> None:
        assert RUNSC is not None
        options = [f"--root={self.directory}/state", "--overlay2=none", "--network=none", "--platform=systrap"]
        log = self.directory / "runsc.log"
        with log.open("ab") as sink:
            done = subprocess.run(
                [RUNSC, *options, *arguments],
                stdin=self.holds[0] if channel else subprocess.DEVNULL,
                stdout=self.holds[1] if channel else sink,
                stderr=sink,
                timeout=RUN_S,
                check=False,
            )
        assert done.returncode == 0 or not check, f"runsc {arguments[0]}: {log.read_text(errors='replace')[-2000:]}"


def measure() -> None:
    """Print how fast and how large an agent in a machine is: ``python -m tests.gvisor``."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        machine = Machine(Path(directory))
        begun = time.perf_counter()
        machine.boot()
        started = time.perf_counter()
        try:
            peer = machine.peer(keep=False)
            print(
                f"runsc run {started - begun:.3f} s, to welcome {time.perf_counter() - started:.3f} s, memory {machine.memory_kib() // 1024} MiB"
            )
            for what in (["/usr/bin/true"],):
                times = []
                for _ in range(30):
                    at = time.perf_counter()
                    command = peer.start(*what)
                    peer.finish(command, forget=False)
                    times.append(time.perf_counter() - at)
                print(f"{what[0]}: p50 {sorted(times)[15] * 1e3:.1f} ms, p99 {max(times) * 1e3:.1f} ms")
            print("agent:", peer.call("metrics")["cpu_s"])
            size = 1 << 30
            at = time.perf_counter()
            peer.finish(peer.start("head", "-c", str(size), "/dev/zero"), forget=False)
            print(f"stdout {size / 1e6 / (time.perf_counter() - at):.0f} MB/s")
            data = bytes(1 << 28)
            at = time.perf_counter()
            peer.put("file-write", data, path="/var/big")
            print(f"file write {len(data) / 1e6 / (time.perf_counter() - at):.0f} MB/s")
            at = time.perf_counter()
            peer.fetch("file-read", path="/var/big")
            print(
                f"file read {len(data) / 1e6 / (time.perf_counter() - at):.0f} MB/s, memory {machine.memory_kib() // 1024} MiB"
            )
        finally:
            machine.end()


if __name__ == "__main__":
    sys.exit(measure())

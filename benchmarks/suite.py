"""What is measured, each through HTTP or the SDK as a user would do it."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.raw import RawRunsc, checkpoint_in_place, run
from benchmarks.report import Report, Row
from space import Sandbox

MIB = 1024 * 1024
WAIT = {"Prefer": "wait=30"}


class Api:
    """The plain HTTP surface, as curl sees it. Sandboxes are of gvisor, whose raw tool they stand beside."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60)

    def create(self, **fields: object) -> str:
        answer = self.http.post("/v1/sandboxes", json={"template": "base", "driver": "gvisor", **fields}, headers=WAIT)
        answer.raise_for_status()
        return str(answer.json()["sandbox"]["id"])

    def fork(self, sandbox: str, count: int) -> list[str]:
        answer = self.http.post(f"/v1/sandboxes/{sandbox}/fork", json={"count": count}, headers=WAIT)
        answer.raise_for_status()
        return [str(one["id"]) for one in answer.json()["sandboxes"]]

    def exec(self, sandbox: str, command: str) -> dict[str, Any]:
        answer = self.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": command})
        return answer.raise_for_status().json()

    def output(self, sandbox: str, command: str) -> str:
        done = self.exec(sandbox, command)
        if done["exit"]["code"] != 0:
            raise RuntimeError(f"{command}: {done}")
        return str(done["stdout"])

    def write(self, sandbox: str, path: str, data: bytes) -> None:
        self.http.put(f"/v1/sandboxes/{sandbox}/files", params={"path": path}, content=data).raise_for_status()

    def exec_true(self, sandbox: str) -> None:
        answer = self.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["/bin/true"]})
        answer.raise_for_status()
        if answer.json()["exit"] != {"kind": "exited", "code": 0, "signal": None}:
            raise RuntimeError(f"exec of true: {answer.text}")

    def verb(self, sandbox: str, verb: str) -> None:
        answer = self.http.post(f"/v1/sandboxes/{sandbox}/{verb}", headers=WAIT)
        answer.raise_for_status()

    def pool_memory_mib(self) -> float:
        """What spares take, which come and go by themselves."""
        return float(self.http.get("/v1/pool").raise_for_status().json()["memory_mib"])

    def delete(self, sandbox: str) -> None:
        self.http.delete(f"/v1/sandboxes/{sandbox}", headers=WAIT).raise_for_status()

    @contextlib.contextmanager
    def sandbox(self, *, pooled: bool = True, driver: str = "gvisor") -> Iterator[str]:
        """A sandbox while the block runs; one that is not pooled has a size that nobody has asked for lately."""
        size = {} if pooled else {"resources": {"memory_mib": 700 + time.time_ns() % 300}}
        sandbox = self.create(driver=driver, **size)
        try:
            yield sandbox
        finally:
            self.delete(sandbox)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1000


def measure_exec(report: Report, api: Api, raw: RawRunsc, rounds: int) -> None:
    raw.boot()
    raws = [raw.exec_true() * 1000 for _ in range(rounds // 2)]
    raw.delete()
    with api.sandbox() as sandbox:
        api.exec_true(sandbox)
        values = [timed(lambda: api.exec_true(sandbox)) for _ in range(rounds)]
        report.add(
            Row("exec of true, api", "ms", values, raws, "runsc exec", "<= 10 ms, <= 0.35 x"),
            lambda row: row.p50 <= 10 and (row.ratio or 9) <= 0.35,
        )
    with Sandbox.create("base") as sbx:
        sbx.run(["/bin/true"])
        values = [timed(lambda: sbx.run(["/bin/true"])) for _ in range(rounds)]
        report.add(
            Row("exec of true, SDK", "ms", values, raws, "runsc exec", "<= 10 ms, <= 0.35 x"),
            lambda row: row.p50 <= 10 and (row.ratio or 9) <= 0.35,
        )


def measure_pause(report: Report, api: Api, raw: RawRunsc, rounds: int) -> None:
    raw.boot()
    raw_pause, raw_resume, pause, resume = [], [], [], []
    with api.sandbox() as sandbox:
        for _ in range(rounds):
            raw_pause.append(raw.verb("pause") * 1000)
            raw_resume.append(raw.verb("resume") * 1000)
            pause.append(timed(lambda: api.verb(sandbox, "pause")))
            resume.append(timed(lambda: api.verb(sandbox, "resume")))
    raw.delete()
    within = lambda row: (row.ratio or 9) <= 1.3  # noqa: E731
    report.add(Row("pause", "ms", pause, raw_pause, "runsc pause", "<= 1.3 x"), within)
    report.add(Row("resume", "ms", resume, raw_resume, "runsc resume", "<= 1.3 x"), within)


def measure_suspend(report: Report, api: Api, raw: RawRunsc, rounds: int) -> None:
    """Beside the raw checkpoint of the very same guest, and the raw restore of one that has done next to nothing."""
    raw.boot()
    raw_save, raw_restore, suspend, wake = [], [], [], []
    with api.sandbox(pooled=False) as sandbox:
        for _ in range(rounds):
            raw_save.append(checkpoint_in_place(raw.runsc, sandbox, raw.image) * 1000)
            raw.checkpoint()
            raw_restore.append((raw.restore() + raw.exec_true()) * 1000)
            os.sync()  # what the raw tool has not made safe is not to be waited for by ours
            suspend.append(timed(lambda: api.verb(sandbox, "suspend")))
            start = time.perf_counter()
            api.verb(sandbox, "wake")
            api.exec_true(sandbox)
            wake.append((time.perf_counter() - start) * 1000)
    raw.delete()
    within = lambda row: (row.ratio or 9) <= 1.3  # noqa: E731
    report.add(Row("suspend", "ms", suspend, raw_save, "runsc checkpoint", "<= 1.3 x"), within)
    report.add(Row("wake to first output", "ms", wake, raw_restore, "runsc restore + exec", "<= 1.3 x"), within)


def measure_streams(report: Report, raw: RawRunsc, size_mib: int) -> None:
    """How fast bytes move. Two writers: one of large blocks, as a budget's worth, and one of 8 KiB blocks."""
    size = size_mib * MIB
    writers = {
        "1 MiB writes": ["dd", "if=/dev/zero", "bs=1M", f"count={size_mib}", "status=none"],
        "8 KiB writes": ["head", "-c", str(size), "/dev/zero"],
    }
    raw.boot()
    raws = {name: [raw.stdout_mib_per_s(argv, size_mib) for _ in range(2)] for name, argv in writers.items()}
    raw.delete()

    def rate(action: Callable[[], int]) -> float:
        start = time.perf_counter()
        got = action()
        if got != size:
            raise RuntimeError(f"{got} bytes of {size} arrived")
        return size / MIB / (time.perf_counter() - start)

    fast = lambda row: row.p50 >= 250  # noqa: E731
    with Sandbox.create("base", memory_mib=2048, disk_mib=8192) as sbx, tempfile.TemporaryDirectory() as local:

        def stdout(argv: list[str]) -> int:
            return sum(len(event.data) for event in sbx.start(argv) if event.stream == "stdout")

        for name, argv in writers.items():
            values = [rate(lambda: stdout(argv)) for _ in range(3)]  # noqa: B023
            large = name == "1 MiB writes"
            row = Row(f"stdout over WebSocket, {name}", "MB/s", values, raws[name], "runsc exec | read")
            report.add(Row(**{**asdict(row), "budget": ">= 250 MB/s" if large else ""}), fast if large else None)
        source = Path(local) / "upload"
        with source.open("wb") as file:
            for _ in range(size_mib):
                file.write(os.urandom(MIB))

        def upload() -> int:
            sbx.files.upload(source, "/home/user/file")
            return sbx.files.stat("/home/user/file").size

        def download() -> int:
            target = Path(local) / "download"
            sbx.files.download("/home/user/file", target)
            return target.stat().st_size

        report.add(Row("file upload", "MB/s", [rate(upload) for _ in range(3)], budget=">= 250 MB/s"), fast)
        report.add(Row("file download", "MB/s", [rate(download) for _ in range(3)], budget=">= 250 MB/s"), fast)


def used_memory_mib() -> float:
    """Memory of the host that is not available, in MiB (MemTotal - MemAvailable)."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(fields["MemTotal"].split()[0]) - int(fields["MemAvailable"].split()[0])) / 1024


def settled_memory_mib() -> float:
    """Used memory once it has stopped falling: what was ended a moment ago is given back in the background."""
    deadline, lowest = time.monotonic() + 30, used_memory_mib()
    while time.monotonic() < deadline:
        time.sleep(2)
        now = used_memory_mib()
        if now > lowest - 8:
            return now
        lowest = now
    return lowest


def measure_memory_and_burst(report: Report, api: Api, count: int) -> None:
    before = settled_memory_mib() - api.pool_memory_mib()
    start = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        outcomes = list(pool.map(lambda _: _created(api), range(count)))
    took = (time.perf_counter() - start) * 1000
    made = [sandbox for sandbox in outcomes if sandbox]
    try:
        each = (used_memory_mib() - api.pool_memory_mib() - before) / max(1, len(made))
        report.add(
            Row(f"burst of {count} creates, whole", "ms", [took], budget="all succeed"), lambda _: len(made) == count
        )
        report.add(
            Row(f"memory of an idle sandbox ({len(made)} of them)", "MB", [each], budget="<= 40 MB"),
            lambda row: row.p50 <= 40,
        )
    finally:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(api.delete, made))


def _created(api: Api) -> str | None:
    try:
        return api.create()
    except httpx.HTTPError:
        return None


def measure_others(report: Report, rounds: int) -> None:
    """Other ways to run ``true`` in isolation, for scale; only those installed here."""
    bwrap = shutil.which("bwrap")
    if bwrap:
        argv = [bwrap, "--ro-bind", "/", "/", "--unshare-all", "/bin/true"]
        report.add(Row("bwrap true", "ms", [run(*argv) * 1000 for _ in range(rounds)]))
    podman = shutil.which("podman")
    if podman and subprocess.run([podman, "image", "exists", "space-bench"], check=False).returncode == 0:
        argv = [podman, "run", "--rm", "--network=none", "space-bench", "/bin/true"]
        report.add(Row("podman + crun true", "ms", [run(*argv) * 1000 for _ in range(rounds)]))

"""Sandboxes that do not begin with a boot: from the warm pool, from a snapshot, and as forks."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.raw import RawRunsc, checkpoint_in_place
from benchmarks.report import Report, Row
from benchmarks.suite import WAIT, Api, used_memory_mib

POOL_WAIT_S = 30.0
TOUCHED_MIB = 256
STANDSTILLS = 15
# Holds as many MiB as it is told, every page touched, and writes down when it is ready.
TOUCH = """
import sys, time, mmap
held = bytearray(int(sys.argv[1]) << 20)
held[::4096] = b"x" * len(held[::4096])
open("/tmp/touched", "w").write("1")
time.sleep(3600)
"""
# Looks at two clocks a thousand times a second and notes every time that it did not get to.
TICK = """
import time
open("/tmp/ticks", "w").close()
last = (time.monotonic(), time.time())
while True:
    now = (time.monotonic(), time.time())
    gap = max(now[0] - last[0], now[1] - last[1]) * 1000
    last = now
    if gap > 20:
        with open("/tmp/gaps", "a") as file:
            print(gap, file=file)
    time.sleep(0.001)
"""


def measure_pool(report: Report, api: Api, raw: RawRunsc, rounds: int) -> None:
    """From the request to the output of ``true``, with a spare waiting; in between the pool may refill."""
    raws = _raw_restores(raw, min(rounds, 20))
    values = []
    for _ in range(rounds):
        _wait_for_spare(api)
        start = time.perf_counter()
        sandbox = api.create()
        api.exec_true(sandbox)
        values.append((time.perf_counter() - start) * 1000)
        api.delete(sandbox)
    row = Row("create to first output, pool", "ms", values, raws, "runsc restore + exec", "p50 <= 30, p99 <= 90 ms")
    report.add(row, lambda row: row.p50 <= 30 and row.p99 <= 90)


def measure_miss(report: Report, api: Api, raw: RawRunsc, rounds: int) -> None:
    """The same where the pool has nothing of that size, so that the machine is restored for the request."""
    values, raws = [], []
    for number in range(rounds):
        _wait_for_spare(api)  # nothing else is restored meanwhile
        start = time.perf_counter()
        sandbox = api.create(resources={"memory_mib": 600 + number})
        api.exec_true(sandbox)
        values.append((time.perf_counter() - start) * 1000)
        api.delete(sandbox)
        raws += _raw_restores(raw, 1)
    budget = "<= 1.25 x + 25 ms"
    row = Row("create to first output, pool miss", "ms", values, raws, "runsc restore + exec", budget)
    report.add(row, lambda row: row.p50 <= 1.25 * (row.raw_p50 or 0) + 25)


def measure_forks(report: Report, api: Api, raw: RawRunsc, count: int) -> None:
    """Forks of a guest that has touched memory, until each has answered; and how long the source stood still."""
    gaps, raws = [], []
    with api.sandbox(pooled=False) as source:
        _background(api, source, TICK)
        _until(api, source, "test -e /tmp/ticks")
        for _ in range(STANDSTILLS):
            gaps.append(_snapshot_gap(api, source))
            os.sync()
            raws.append(checkpoint_in_place(raw.runsc, source, raw.image) * 1000)
        row = Row("standstill of the source of a snapshot", "ms", gaps, raws, "runsc checkpoint", "<= 1.3 x")
        report.add(row, lambda row: (row.ratio or 9) <= 1.3)
    with api.sandbox() as source:
        _background(api, source, TOUCH, str(TOUCHED_MIB))
        _until(api, source, "test -e /tmp/touched")
        before, start = used_memory_mib(), time.perf_counter()
        made = api.fork(source, count)
        try:
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(api.exec_true, made))
            took = (time.perf_counter() - start) * 1000
            each = (used_memory_mib() - before) / count
            name = f"{count} forks of a guest with {TOUCHED_MIB} MiB, all answering"
            report.add(Row(name, "ms", [took], budget="all answer"), lambda _: len(made) == count)
            report.add(Row("memory of each fork", "MB", [each]))
        finally:
            for sandbox in made:
                api.delete(sandbox)


def _raw_restores(raw: RawRunsc, rounds: int) -> list[float]:
    """Milliseconds of restores of the same guest by the raw tool, each until a program has run in it."""
    raw.boot()
    raw.checkpoint()
    found = []
    for _ in range(rounds):
        found.append((raw.restore() + raw.exec_true()) * 1000)
        raw.delete()
    return found


def _wait_for_spare(api: Api) -> None:
    deadline = time.monotonic() + POOL_WAIT_S
    while not _pool_is_ready(api.http.get("/v1/pool").raise_for_status().json()):
        if time.monotonic() > deadline:
            raise RuntimeError("the warm pool does not fill")
        time.sleep(0.02)


def _pool_is_ready(pool: dict[str, Any]) -> bool:
    shapes = pool["shapes"]
    return any(shape["idle"] for shape in shapes) and not any(shape["filling"] for shape in shapes)


def _background(api: Api, sandbox: str, program: str, *arguments: str) -> None:
    api.write(sandbox, "/tmp/program.py", program.encode())
    words = " ".join(["/usr/bin/python3 /tmp/program.py", *arguments])
    api.output(sandbox, f"nohup {words} >/dev/null 2>&1 &")


def _snapshot_gap(api: Api, source: str) -> float:
    """Return the longest time in milliseconds that a program in the source did not get to run."""
    api.output(source, ": > /tmp/gaps")
    answer = api.http.post(f"/v1/sandboxes/{source}/snapshots", json={"kind": "full"}, headers=WAIT)
    snapshot = answer.raise_for_status().json()["snapshot"]["id"]
    api.http.delete(f"/v1/snapshots/{snapshot}").raise_for_status()
    _until(api, source, "test -s /tmp/gaps")
    return max(map(float, api.output(source, "cat /tmp/gaps").split()))


def _until(api: Api, sandbox: str, command: str) -> None:
    deadline = time.monotonic() + POOL_WAIT_S
    while api.exec(sandbox, command)["exit"]["code"] != 0:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{command} never succeeded")
        time.sleep(0.05)

"""The same figures of every driver that works here, side by side; and of QEMU beside a bare QEMU."""

import os
import time
from typing import Any

import httpx

from benchmarks.raw_qemu import raw_qemu
from benchmarks.report import Report, Row
from benchmarks.suite import MIB, Api, timed
from space import Sandbox
from space.settings import Settings, load

STREAM_MIB = 64
POOL_WAIT_S = 60.0
MEMORY_MIB = 1024


def usable_drivers(settings: Settings) -> list[str]:
    """Return those that the broker has seen to work, strongest first."""
    transport = httpx.HTTPTransport(uds=str(settings.node_socket))
    with httpx.Client(transport=transport, base_url="http://node", timeout=60) as node:
        told = node.get("/drivers").raise_for_status().json()
    return [one["name"] for one in told["drivers"] if one["usable"]]


def measure_drivers(report: Report, api: Api, rounds: int) -> None:
    """A column for each driver, and what a bare QEMU does in the same run."""
    settings = load()
    names = usable_drivers(settings)
    report.say(f"drivers that work here: {', '.join(names)}")
    for name in names:
        _measure_one(report, api, name, rounds)
    if "qemu" in names:
        _measure_beside_raw(report, api, settings, 2 * rounds)  # its ratio is a promise


def _measure_one(report: Report, api: Api, driver: str, rounds: int) -> None:
    def add(what: str, values: list[float], unit: str = "ms") -> None:
        report.add(Row(what, unit, values, driver=driver))

    with api.sandbox(driver=driver) as sandbox:
        api.exec_true(sandbox)
        add("exec of true", [timed(lambda: api.exec_true(sandbox)) for _ in range(rounds * 5)])
        halves: dict[str, list[float]] = {"pause": [], "resume": [], "suspend": []}
        wake: list[float] = []
        for _ in range(rounds):
            for verb in ("pause", "resume"):
                halves[verb].append(timed(lambda: api.verb(sandbox, verb)))  # noqa: B023 called at once
        for _ in range(rounds):
            os.sync()
            halves["suspend"].append(timed(lambda: api.verb(sandbox, "suspend")))
            wake.append(timed(lambda: (api.verb(sandbox, "wake"), api.exec_true(sandbox))))
    for what, values in halves.items():
        add(what, values)
    add("wake to first output", wake)
    add("create to first output, pool", _creates(api, driver, rounds))
    add("create to first output, boot", _boots(api, driver, min(rounds, 3)))
    add("stdout over WebSocket", [_stdout(driver) for _ in range(2)], "MB/s")


def _creates(api: Api, driver: str, rounds: int) -> list[float]:
    found: list[float] = []
    for _ in range(rounds):
        _wait_for_spare(api, driver)
        start = time.perf_counter()
        sandbox = api.create(driver=driver)
        api.exec_true(sandbox)
        found.append((time.perf_counter() - start) * 1000)
        api.delete(sandbox)
    return found


def _boots(api: Api, driver: str, rounds: int) -> list[float]:
    """From a disk: `start` of a stopped sandbox, which no spare can stand in for."""
    with api.sandbox(driver=driver) as sandbox:
        found: list[float] = []
        for _ in range(rounds):
            api.verb(sandbox, "stop")
            found.append(timed(lambda: (api.verb(sandbox, "start"), api.exec_true(sandbox))))
        return found


def _stdout(driver: str) -> float:
    with Sandbox.create("base", driver=driver) as sbx:
        start = time.perf_counter()
        argv = ["dd", "if=/dev/zero", "bs=1M", f"count={STREAM_MIB}", "status=none"]
        got = sum(len(event.data) for event in sbx.start(argv) if event.stream == "stdout")
        if got != STREAM_MIB * MIB:
            raise RuntimeError(f"{got} bytes arrived")
        return STREAM_MIB / (time.perf_counter() - start)


def _measure_beside_raw(report: Report, api: Api, settings: Settings, rounds: int) -> None:
    """The raw restore is of the same kernel, disks and agent, idle, from an image that QEMU wrote just as well."""
    blocks = settings.broker_dir / "disks/blocks/templates"
    base = api.http.get("/v1/templates/base").raise_for_status().json()["digest"].removeprefix("sha256:")
    template = next(path for path in blocks.glob("*.erofs") if base in path.name)
    guest = settings.guest_dir.resolve().name
    runtime = settings.broker_dir / "runtimes" / f"space-{guest}.erofs"
    suspend, raw_save = list[float](), list[float]()
    wake, raw_restore = list[float](), list[float]()
    with (
        raw_qemu(template, runtime, settings.kernel.resolve(), MEMORY_MIB) as raw,
        api.sandbox(driver="qemu") as sandbox,
    ):

        def ours() -> None:
            wake.append(timed(lambda: (api.verb(sandbox, "wake"), api.exec_true(sandbox))))

        def bare() -> None:
            raw_restore.append((raw.restore() + raw.exec_true()) * 1000)

        api.exec_true(sandbox)
        raw.boot()
        raw.exec_true()
        for number in range(rounds):
            raw_save.append(raw.save() * 1000)
            os.sync()  # what the raw tool has not made safe is not to be waited for by ours
            suspend.append(timed(lambda: api.verb(sandbox, "suspend")))
            os.sync()
            # By turns: memory that somebody has just given back is had sooner than such as lay idle for long.
            for go_on in (bare, ours) if number % 2 else (ours, bare):
                go_on()
    report.add(Row("suspend, qemu", "ms", suspend, raw_save, "QEMU: stop, migrate"))
    row = Row("wake to first output, qemu", "ms", wake, raw_restore, "QEMU restore + true", "<= 1.3 x")
    report.add(row, lambda row: (row.ratio or 9) <= 1.3)


def _wait_for_spare(api: Api, driver: str) -> None:
    deadline = time.monotonic() + POOL_WAIT_S
    while not _has_spare(api.http.get("/v1/pool").raise_for_status().json(), driver):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the warm pool of {driver} does not fill")
        time.sleep(0.05)


def _has_spare(pool: dict[str, Any], driver: str) -> bool:
    shapes = [one for one in pool["shapes"] if (one["driver"], one["memory_mib"]) == (driver, MEMORY_MIB)]
    return any(one["idle"] for one in shapes) and not any(one["filling"] for one in pool["shapes"])

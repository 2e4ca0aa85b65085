"""A soak: lifecycle changes at a steady rate, and what the host and SPACE's processes hold before and after.

    python -m tests.chaos.soak --minutes 30

After a warm-up everything is deleted and counted; after the soak again. What is counted then must not have grown.
"""

import argparse
import itertools
import os
import random
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.client import Api, wait_until
from tests.installation import Installation, running

RATE = 10.0
WORKERS = 6
WARM_UP_S = 10.0
SETTLE_S = 60.0
# A pass through a sandbox's life; each word is one lifecycle change.
LIVES = (
    ("create", "pause", "resume", "pause", "resume", "pause", "wake", "delete"),
    ("create", "suspend", "wake", "pause", "resume", "pause", "resume", "delete"),
    ("create", "stop", "wake", "pause", "resume", "pause", "resume", "delete"),
    ("create", "snapshot", "pause", "resume", "fork", "pause", "wake", "delete"),
)
MEMORY_GROWTH_MIB = 24.0
"""Allocators keep what they once had; over a longer soak a leak of a few KiB a change would pass this by far."""
DESCRIPTORS_MAX = 4


@dataclass(frozen=True)
class Count:
    """What is held at one moment at which nothing is under way."""

    mounts: int
    namespaces: int
    links: int
    cgroups: int
    processes: int
    descriptors: dict[str, int]
    memory_mib: dict[str, float]

    def grown(self, before: "Count") -> list[str]:
        """What has grown since ``before``, beyond what may."""
        found = [
            f"{name}: {getattr(before, name)} before, {getattr(self, name)} after"
            for name in ("mounts", "namespaces", "links", "cgroups", "processes")
            if getattr(self, name) > getattr(before, name)
        ]
        for name, held in self.descriptors.items():
            if held > before.descriptors[name] + DESCRIPTORS_MAX:
                found.append(f"descriptors of {name}: {before.descriptors[name]} before, {held} after")
        for name, mib in self.memory_mib.items():
            if mib > before.memory_mib[name] + MEMORY_GROWTH_MIB:
                found.append(f"memory of {name}: {before.memory_mib[name]:.0f} MiB before, {mib:.0f} MiB after")
        return found


@dataclass
class Result:
    """What a soak did and found."""

    changes: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter[str])
    refused: list[str] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list[Count])
    grown: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items()))
        lines = [f"{self.changes} changes in {self.seconds:.0f} s, {self.changes / self.seconds:.1f} a second: {kinds}"]
        lines += [f"refused: {len(self.refused)}", *self.refused[:10], *map(str, self.counts)]
        return "\n".join([*lines, f"grown: {self.grown or 'nothing'}"])


def soak(installation: Installation, seconds: float, seed: int, say: Callable[[str], None] = lambda _: None) -> Result:
    """Change lifecycles at `RATE` a second for as long; count before (after a warm-up) and after."""
    chance = random.Random(seed)
    _drive(installation, WARM_UP_S, chance, Result())
    before = _count(installation)
    say(f"before: {before}")
    result = Result(counts=[before])
    began = time.monotonic()
    _drive(installation, seconds, chance, result)
    result.seconds = time.monotonic() - began
    after = _count(installation)
    result.counts.append(after)
    result.grown = after.grown(before)
    return result


def _drive(installation: Installation, seconds: float, chance: random.Random, result: Result) -> None:
    began, turn, lock = time.monotonic(), itertools.count(), threading.Lock()

    def next_turn() -> bool:
        """Wait for the moment of the next change; False when time is over."""
        with lock:
            at = began + next(turn) / RATE
        time.sleep(max(0.0, at - time.monotonic()))
        return at < began + seconds

    def live() -> None:
        with Api(installation.url, installation.key) as api:
            while time.monotonic() < began + seconds:
                with lock:
                    life = chance.choice(LIVES)
                _one_life(api, life, next_turn, result)

    with ThreadPoolExecutor(WORKERS) as pool:
        for worker in [pool.submit(live) for _ in range(WORKERS)]:
            worker.result()


def _one_life(api: Api, life: tuple[str, ...], next_turn: Callable[[], bool], result: Result) -> None:
    made: list[str] = []
    kept: list[str] = []
    try:
        for change in life:
            if not next_turn():
                return
            try:
                answer = _change(api, change, made[0] if made else "")
            except AssertionError as error:
                result.refused.append(f"{change}: {error}")
                return
            result.changes += 1
            result.kinds[change] += 1
            made += [one["id"] for one in answer.get("sandboxes", [])]
            made += [answer["sandbox"]["id"]] if change == "create" else []
            kept += [answer["snapshot"]["id"]] if change == "snapshot" else []
            if change == "delete":
                made.pop(0)
    finally:
        for sandbox in made:
            api.delete(sandbox)
        for snapshot in kept:
            api.call("DELETE", f"/v1/snapshots/{snapshot}")


def _change(api: Api, change: str, sandbox: str) -> dict[str, Any]:
    path, wait = f"/v1/sandboxes/{sandbox}", {"Prefer": "wait=60"}
    if change == "create":
        answer = api.call("POST", "/v1/sandboxes", json={"template": "base"}, headers=wait)
    elif change == "delete":
        return api.call("DELETE", path, headers=wait).json()
    elif change == "snapshot":
        answer = api.call("POST", f"{path}/snapshots", json={"kind": "full"}, headers=wait)
    elif change == "fork":
        answer = api.call("POST", f"{path}/fork", json={"count": 1}, headers=wait)
    else:
        answer = api.call("POST", f"{path}/{change}", headers=wait)
    api.finished(answer.json())
    return answer.json()


def _count(installation: Installation) -> Count:
    """Delete everything, wait until the warm pool rests, and count."""
    installation.delete_all()
    wait_until(lambda: installation.strays() == [], SETTLE_S, "a host without strays")
    with Api(installation.url, installation.key) as api:
        wait_until(lambda: _pool_rests(api), SETTLE_S, "the warm pool at rest")
    name = installation.instance
    groups = sum(name in path.split("/") for path, _, _ in os.walk("/sys/fs/cgroup"))
    data = str(installation.settings.data_dir)
    pids = {process: installation.pid(process) for process in ("api", "node", "broker")}
    return Count(
        mounts=sum(data in line for line in Path("/proc/mounts").read_text().splitlines()),
        namespaces=sum(path.name.startswith(f"{name}-") for path in Path("/run/netns").iterdir()),
        links=sum(path.name.startswith(f"{name}-") for path in Path("/sys/class/net").iterdir()),
        cgroups=groups,
        processes=sum(_mentions(path, str(installation.settings.run_dir)) for path in Path("/proc").glob("[0-9]*")),
        descriptors={process: len(list(Path(f"/proc/{pid}/fd").iterdir())) for process, pid in pids.items()},
        memory_mib={process: round(installation.memory_mib(process), 1) for process in pids},
    )


def _pool_rests(api: Api) -> bool:
    shapes = api.call("GET", "/v1/pool").json()["shapes"]
    return all(shape["filling"] == 0 and shape["idle"] == shape["target"] for shape in shapes)


def _mentions(process: Path, word: str) -> bool:
    try:
        return word.encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


def main() -> int:
    """Soak an installation of its own; print the figures; 1 when something has grown or was refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args()
    with running(log_level="warning", pool_max=2) as one:
        result = soak(one, options.minutes * 60, options.seed, say=lambda line: print(line, flush=True))
    print(f"seed {options.seed}\n{result}")
    return 1 if result.grown or result.refused else 0


if __name__ == "__main__":
    sys.exit(main())

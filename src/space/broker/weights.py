"""Which of the host's disks heed ``io_weight``: the kernel weighs cgroups against each other only where one of two
schedulers does, BFQ or (with cgroups of version 2) the I/O cost model.
"""

import re
from pathlib import Path


def weighing_disks(root: Path) -> tuple[list[str], list[str]]:
    """Return the names of disks that weigh and of those that do not. `root` is where the kernel's files are read."""
    heed: list[str] = []
    ignore: list[str] = []
    costed = _costed(root)
    for queue in sorted((root / "sys/block").glob("*/queue/scheduler")):
        disk = queue.parents[1]
        if not (disk / "device").exists():  # loop, ram, dm and the like: what they do is weighed on the disk below
            continue
        weighs = "[bfq]" in _read(queue) or _read(disk / "dev").strip() in costed
        (heed if weighs else ignore).append(disk.name)
    return heed, ignore


def _costed(root: Path) -> set[str]:
    """Return the numbers of the devices for which the cost model is switched on."""
    lines = _read(root / "sys/fs/cgroup/io.cost.qos").splitlines()
    return {line.split()[0] for line in lines if re.search(r"\benable=1\b", line)}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

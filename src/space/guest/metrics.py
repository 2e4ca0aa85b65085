"""What the guest's kernel says about its use: cheap, from /proc, each file bounded."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FILE_BYTES_MAX = 1024 * 1024
_ESTABLISHED = b"01"


def metrics(commands: int) -> dict[str, Any]:
    """Return the present use: sizes in bytes, times in seconds."""
    total, available = memory()
    disk = os.statvfs("/")
    return {
        "uptime_s": time.clock_gettime(time.CLOCK_BOOTTIME),
        "cpu_s": _cpu_seconds(),
        "memory_total": total,
        "memory_available": available,
        "memory_used": max(0, total - available),
        "disk_total": disk.f_blocks * disk.f_frsize,
        "disk_used": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
        "pids": sum(name.isdigit() for name in os.listdir("/proc")),
        "commands": commands,
        "load_1m": float((_read("/proc/loadavg").split() or [b"0"])[0]),
    }


def memory() -> tuple[int, int]:
    """Return how many bytes of memory there are, and how many programs could still have."""
    fields = _fields("/proc/meminfo")
    return fields.get("MemTotal", 0) * 1024, fields.get("MemAvailable", 0) * 1024


def connections() -> int:
    """Return how many TCP connections are established, over IPv4 and IPv6, those to itself included."""
    count = 0
    for name in ("tcp", "tcp6"):
        for line in _read(f"/proc/net/{name}").splitlines()[1:]:
            fields = line.split()
            count += len(fields) > 3 and fields[3] == _ESTABLISHED
    return count


def oom_kills() -> int:
    """Return how often this kernel has killed for want of memory since it started; 0 where it does not say."""
    marker = b"\noom_kill "
    text = _read("/proc/vmstat")
    at = text.find(marker)
    return int(text[at + len(marker) :].split(None, 1)[0]) if at >= 0 else 0


def _cpu_seconds() -> float:
    fields = _read("/proc/stat").split(b"\n", 1)[0].split()
    ticks = sum(int(field) for field in fields[1:4]) if fields[:1] == [b"cpu"] else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _fields(path: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in _read(path).splitlines():
        name, _, rest = line.partition(b":")
        number = rest.split(None, 1)[:1]
        if number and number[0].isdigit():
            found[name.decode("ascii", "replace")] = int(number[0])
    return found


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError:
        return b""

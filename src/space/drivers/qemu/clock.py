"""How fast this host's time-stamp counter counts.

A guest on emulated processors reads the host's counter and has nothing to compare it with: its kernel must be told. The
host's own kernel knows the figure and tells nobody; so it is measured.
"""

import ctypes
import mmap
import time

MEASURE_S = 0.05
_RDTSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret


def counter_khz() -> int:
    """Measure for `MEASURE_S`; exact to a few in 100 000. Blocks."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(_RDTSC)
        held = ctypes.c_char.from_buffer(page)
        # SAFETY: the page holds the four instructions above and nothing else; they touch no memory.
        count = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(held))
        try:
            began, from_count = _now(count)
            time.sleep(MEASURE_S)
            ended, to_count = _now(count)
        finally:
            del count, held
    return round((to_count - from_count) * 1_000_000 / (ended - began))


def _now(count: "ctypes._CFunctionType") -> tuple[int, int]:  # pyright: ignore[reportPrivateUsage]
    """Return nanoseconds and the counter at one moment, as closely as can be had."""
    found: list[tuple[int, int, int]] = []
    for _ in range(8):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        counted = count()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        found.append((after - before, (before + after) // 2, counted))
    _, middle, counted = min(found)
    return middle, counted

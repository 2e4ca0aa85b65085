"""Host processes that outlive their starter: identity that a recycled pid cannot forge, and ends that can be waited
for.
"""

import asyncio
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_START_TICKS_FIELD = 19  # of /proc/<pid>/stat, counted after the closing parenthesis of the name; proc(5) calls it 22


@dataclass(frozen=True, slots=True)
class Process:
    """One process for ever: the pid may be given to another, but not with the same start time in the same boot."""

    pid: int
    start_ticks: int
    boot_id: str


def boot_id() -> str:
    """Return the identity of this boot of the host."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Process | None:
    """Return the process that has this pid now, or None when there is none (or only a zombie)."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[_START_TICKS_FIELD]), boot_id())


def open_process(process: Process) -> int | None:
    """Return a pidfd of exactly this process, or None when it has ended. The caller closes it."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except (ProcessLookupError, OSError):
        return None
    # Checked after opening: from here on the descriptor cannot come to mean another process.
    if identify(process.pid) != process:
        os.close(pidfd)
        return None
    return pidfd


def is_alive(process: Process) -> bool:
    """Whether exactly this process still runs."""
    return identify(process.pid) == process


def send_kill(process: Process) -> None:
    """SIGKILL exactly this process, and do not wait."""
    send(process, signal.SIGKILL)


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to exactly this process, if it lives."""
    pidfd = open_process(process)
    if pidfd is None:
        return
    try:
        with suppress(ProcessLookupError):
            # SAFETY: the pidfd was matched against the recorded start time, so no other process can be hit.
            signal.pidfd_send_signal(pidfd, number)
    finally:
        os.close(pidfd)


async def kill(process: Process, timeout_s: float) -> bool:
    """SIGKILL exactly this process and wait for its end. Return False when it has not ended in time."""
    pidfd = open_process(process)
    if pidfd is None:
        return True
    try:
        with suppress(ProcessLookupError):
            # SAFETY: the pidfd was matched against the recorded start time, so no other process can be hit.
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return await wait_ended(pidfd, timeout_s)
    finally:
        os.close(pidfd)


async def wait_ended(pidfd: int, timeout_s: float) -> bool:
    """Wait until the process behind `pidfd` has ended. Return False when it has not in time."""
    if select.select([pidfd], [], [], 0)[0]:
        return True
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(pidfd, lambda: ended.done() or ended.set_result(None))
    try:
        async with asyncio.timeout(timeout_s):
            await ended
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True


def on_end(pidfd: int, call: Callable[[], None]) -> Callable[[], None]:
    """Call once when the process behind `pidfd` ends; return a function that stops watching. Closes `pidfd` either
    way.
    """
    loop = asyncio.get_running_loop()
    watching = True

    def stop() -> None:
        nonlocal watching
        if watching:
            watching = False
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def ended() -> None:
        stop()
        call()

    loop.add_reader(pidfd, ended)
    return stop


def processes_with_argument(argument: str) -> Iterator[tuple[Process, list[str]]]:
    """Yield every process whose command line holds `argument` as one whole word, with that command line."""
    wanted = os.fsencode(argument)
    for entry in PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if wanted in words and (process := identify(int(entry.name))):
                yield process, [os.fsdecode(word) for word in words]

"""Who carries an operation out: this process's identity, its seats, and operations handed over inside the process.

An operation is accepted and leased in one transaction when a seat is free, which saves the way through the queue; else
it waits in the store as pending. A lease that nobody renews lapses, and any runner may take it over.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from space.model.operation import Operation, OperationState
from space.model.sandbox import Sandbox

SEATS = 32
LEASE_S = 30.0
RENEW_S = 10.0


class Leases:
    """The seats of one process. ``owner`` names the process so that it can be told later whether it still lives."""

    def __init__(self, now: Callable[[], datetime], seats: int = SEATS) -> None:
        self.owner = _identity("self")
        self.handed_over: asyncio.Queue[tuple[Operation, Sandbox | None]] = asyncio.Queue()
        self.running: dict[str, asyncio.Task[None]] = {}
        self._pending = asyncio.Event()
        self._backlog = False
        self._now = now
        self._free = seats

    @property
    def free(self) -> int:
        return self._free

    def until(self) -> datetime:
        """Return when a lease taken or renewed now ends."""
        return self._now() + timedelta(seconds=LEASE_S)

    def leased(self, operation: Operation) -> Operation:
        """Return an operation as it is to be stored when this process begins with it now."""
        return replace(
            operation,
            state=OperationState.RUNNING,
            started_at=operation.created_at,
            lease_owner=self.owner,
            lease_until=self.until(),
        )

    def hand_over(self, operation: Operation, sandbox: Sandbox | None) -> None:
        """Hand an operation that is leased to this process to the runner, also when no seat is free.

        For work that a running operation waits for: were it to wait for a seat, both might wait for ever. How much of
        that there may be is for the one who waits to bound.
        """
        self.take()
        self.handed_over.put_nowait((operation, sandbox))

    @contextlib.contextmanager
    def reserve(self) -> Generator["Seat"]:
        """Hold a seat, where one is free, while an operation is being accepted."""
        seat = Seat(self, taken=self._free > 0)
        if seat.taken:
            self._free -= 1
        try:
            yield seat
        finally:
            if seat.taken:
                self._free += 1

    def take(self) -> None:
        self._free -= 1

    def give_back(self) -> None:
        self._free += 1
        if self._backlog:
            self._pending.set()

    def wake(self) -> None:
        """Say that something waits in the store for a seat."""
        self._backlog = True
        self._pending.set()

    def claimed(self, count: int, limit: int) -> None:
        """Note how many operations were claimed of the ``limit`` that there were seats for."""
        self._backlog = count >= limit

    async def wait_for_pending(self, timeout_s: float) -> None:
        """Return when ``wake`` was called since the last return, or after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._pending.wait()
        self._pending.clear()

    async def interrupt(self, operation_id: str) -> None:
        """Make this process's work on an operation end, if there is any, and wait until it has."""
        task = self.running.get(operation_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


class Seat:
    """A place among the operations that run at once, or the knowledge that none is free."""

    def __init__(self, leases: Leases, *, taken: bool) -> None:
        self._leases = leases
        self.taken = taken

    def lease(self, operation: Operation) -> Operation:
        """Return the operation as it is to be stored: leased to this process, or pending."""
        return self._leases.leased(operation) if self.taken else operation

    def start(self, operation: Operation, sandbox: Sandbox) -> None:
        """Hand an operation that is in the store now to the runner, with its sandbox; it gives the seat back."""
        if self.taken:
            self.taken = False
            self._leases.handed_over.put_nowait((operation, sandbox))
        else:
            self._leases.wake()


def is_dead(owner: str) -> bool:
    """Whether the process that ``owner`` names ran on this host and is gone. One on another host is never judged."""
    host, boot, pid, _ = owner.split("/")
    if host != socket.gethostname():
        return False
    return boot != _boot_id() or not pid.isdecimal() or _identity(pid) != owner


def _identity(pid: str) -> str:
    """Name a process by host, boot, pid and start time: a recycled pid is another process."""
    try:
        stat = (Path("/proc") / pid / "stat").read_text()
    except OSError:
        return ""
    number = stat.split(" ", 1)[0]
    started = stat.rpartition(")")[2].split()[19]
    return f"{socket.gethostname()}/{_boot_id()}/{number}/{started}"


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

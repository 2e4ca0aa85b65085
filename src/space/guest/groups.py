"""Which processes belong to a command, whatever they do: setsid, double fork, sudo.

The kernel's control groups say so (``cgroups.py``); where it has none, the family tree together with a mark in the
environment does.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from space.guest.metrics import oom_kills

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

MARK = "SPACE_COMMAND"
_KILL_PASSES = 20
"""Passes in a row against something that multiplies while it is killed."""
_ENVIRON_BYTES_MAX = 4 * 1024 * 1024


class Group(ABC):
    """The processes of one command. Enter it to spawn into it: what this thread spawns meanwhile belongs to it."""

    mark: str | None = None
    """What has to be in the environment under ``MARK``, where membership depends on it."""

    @abstractmethod
    def __enter__(self) -> None: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def pids(self) -> list[int]:
        """Return the processes that belong to it now."""

    def kill(self) -> bool:
        """Kill every process that belongs to it now; True when there was none. To be repeated until it is."""
        pids = found = self.pids()
        for _ in range(_KILL_PASSES):
            for pid in pids:
                send_signal(pid, 9)
            known, pids = set(pids), self.pids()
            if known.issuperset(pids):
                break  # Nothing was born meanwhile; what is dying needs no second signal.
        return not found

    def oom_kills(self) -> int:
        """Return how often the kernel has killed for want of memory: in this group, or anywhere if it cannot tell."""
        return oom_kills()

    @abstractmethod
    def remove(self) -> bool:
        """Forget the group if it is empty; False when it is not."""

    def parts(self) -> list[Group]:
        """Return what is ended by itself when memory runs out: all of it, as all of a command is waited for."""
        return [self]


class Inner(Group):
    """A group looked at from outside, or one process of it: nobody spawns into it."""

    def __init__(self, group: Group, pid: int | None = None) -> None:
        self._group = group
        self._pid = pid

    def __enter__(self) -> None:
        raise TypeError("Nothing is started here.")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to leave."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inner) and (self._group, self._pid) == (other._group, other._pid)

    def __hash__(self) -> int:
        return hash((id(self._group), self._pid))

    def pids(self) -> list[int]:
        return [pid for pid in self._group.pids() if self._pid in {None, pid}]

    def remove(self) -> bool:
        return not self.pids()

    def parts(self) -> list[Group]:
        """Return each process: of what nobody waits for, as a service and its workers, the rest can go on."""
        return [Inner(self._group, pid) for pid in self.pids()]


def send_signal(pid: int, number: int) -> None:
    """Signal a process that may be gone. Never the agent, nor a whole set of processes."""
    if pid > 1 and pid != os.getpid():
        try:
            # SAFETY: pid is one process of a command, not 0, 1 or negative, and has not been waited for by others.
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


class Family(Group):
    """Without control groups: the descendants of the command, and every process that carries its mark."""

    def __init__(self, command_id: str) -> None:
        self.mark = command_id
        self._mark = f"{MARK}={command_id}".encode("utf-8", "surrogateescape")

    def __enter__(self) -> None:
        """Nothing to enter."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to leave."""

    def pids(self) -> list[int]:
        parents = processes()
        members = {pid for pid in parents if self._carries_mark(pid)}
        grown = True
        while grown:
            more = {pid for pid, (parent, _) in parents.items() if parent in members} - members
            members |= more
            grown = bool(more)
        return [pid for pid in members if parents[pid][1] != "Z"]

    def remove(self) -> bool:
        return True

    def _carries_mark(self, pid: int) -> bool:
        if pid == os.getpid():
            return False
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return self._mark in file.read(_ENVIRON_BYTES_MAX).split(b"\0")
        except OSError:
            return False


def processes() -> dict[int, tuple[int, str]]:
    """Return every process: pid → (parent's pid, state letter)."""
    found: dict[int, tuple[int, str]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command's own name may hold anything, so look behind its last parenthesis.
                state, parent = file.read(4096).rpartition(b")")[2].split(None, 2)[:2]
        except (OSError, ValueError):
            continue
        found[int(name)] = (int(parent), state.decode("ascii", "replace"))
    return found

"""Limits and usage of machines through the host's cgroups, version 2 or the version 1 hierarchies.

Every machine has the group ``<instance>/<machine id>``, on version 1 once per controller. All its host processes are
inside before they run guest code. The pids limit counts *host* tasks (the driver says how many a guest's share may
need) and is the backstop that keeps the host alive; the guest's own limit is enforced inside, where exceeding it is
an error instead of the machine's end.
"""

import asyncio
import errno
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from space.drivers.base import HostLimits
from space.errors import HostError

ROOT = Path("/sys/fs/cgroup")
KILL_S = 10.0
FREEZE_S = 10.0
_POLL_S = 0.002
_PERIOD_US = 100_000
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far; memory without file cache that can be dropped, and its peak with it; host tasks now."""

    cpu_s: float = 0.0
    memory_mib: float = 0.0
    memory_peak_mib: float = 0.0
    pids: int = 0
    oom_kills: int = 0


class _Hierarchy(Protocol):
    """How one version of cgroups lays out its files."""

    def groups(self, name: str) -> list[Path]: ...
    def prepare(self) -> None: ...
    def limit(self, name: str, limits: HostLimits) -> None: ...
    def limit_memory(self, name: str, size: int) -> None: ...
    def memory_limit(self, name: str) -> int: ...
    def usage(self, name: str) -> Usage: ...
    def oom_kills(self, name: str) -> int: ...
    def kill_file(self, name: str) -> Path | None: ...
    def can_freeze(self) -> bool: ...
    def freeze(self, name: str, *, still: bool) -> None: ...
    def is_frozen(self, name: str) -> bool: ...


class Cgroups:
    """All groups of one installation."""

    def __init__(self, instance: str, root: Path = ROOT) -> None:
        self._hierarchy: _Hierarchy = _Version2(root / instance) if is_version_2(root) else _Version1(root, instance)

    def create(self, machine_id: str, limits: HostLimits) -> tuple[Path, ...]:
        """Make the group with its limits; return the files that a process writes ``0`` to in order to join."""
        try:
            for group in self._hierarchy.groups(machine_id):
                # SAFETY: the path is made of the controller's mount, the instance's name and a validated id.
                group.mkdir(parents=True, exist_ok=True)
            self._hierarchy.prepare()
            self._hierarchy.limit(machine_id, limits)
        except OSError as error:
            raise HostError(
                "The machine's cgroup could not be made.", code="cgroup-failed", errno=error.errno
            ) from error
        return tuple(group / "cgroup.procs" for group in self._hierarchy.groups(machine_id))

    def limit(self, machine_id: str, limits: HostLimits) -> None:
        """Give a group that exists these limits from now on, whatever runs in it. Repeatable.

        Raise `HostError`. Memory cannot be set below what is in use: that is ``cgroup-busy``, and changes nothing.
        """
        try:
            self._hierarchy.limit(machine_id, limits)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise HostError(
                    f"The machine uses more memory than {limits.memory_mib} MiB now; end something in it first.",
                    code="cgroup-busy",
                    memory_mib=limits.memory_mib,
                ) from error
            raise HostError(
                "The machine's limits could not be changed.", code="cgroup-failed", errno=error.errno
            ) from error

    def limit_memory(self, machine_id: str, memory_mib: int) -> bool:
        """Let the machine use so much memory from now on; False when that is less than what is in use, or no group."""
        try:
            if self._hierarchy.memory_limit(machine_id) != memory_mib * _MIB:
                self._hierarchy.limit_memory(machine_id, memory_mib * _MIB)
        except (OSError, ValueError):
            return False
        return True

    def usage(self, machine_id: str) -> Usage:
        """Return what the machine uses; zeros when it has no group."""
        try:
            return replace(self._hierarchy.usage(machine_id), oom_kills=self.oom_kills(machine_id))
        except OSError:
            return Usage()

    def oom_kills(self, machine_id: str) -> int:
        """Return how many processes of the group the kernel has killed for want of memory.

        Most often that is the machine's main process, and so its end: drivers see to it.
        """
        with suppress(OSError):
            return self._hierarchy.oom_kills(machine_id)
        return 0

    def can_freeze(self) -> bool:
        """Whether this host's cgroups can make a machine's processes stand still."""
        return self._hierarchy.can_freeze()

    def is_frozen(self, machine_id: str) -> bool:
        """Whether all processes of the group stand still; False when there is no group."""
        with suppress(OSError):
            return self.can_freeze() and self._hierarchy.is_frozen(machine_id)
        return False

    async def freeze(self, machine_id: str, *, still: bool) -> None:
        """Make every process of the group stand still, or go on; return when it is so. Repeatable. No group: success.

        The kernel keeps the state, so it is the same before and after a crash of the broker.
        """
        deadline = time.monotonic() + FREEZE_S
        try:
            self._hierarchy.freeze(machine_id, still=still)
            while self._hierarchy.is_frozen(machine_id) is not still:
                if time.monotonic() > deadline:
                    self._hierarchy.freeze(machine_id, still=False)
                    raise HostError("A process of the machine does not stand still.", code="pause-failed")
                await asyncio.sleep(_POLL_S)
        except FileNotFoundError:
            return

    async def remove(self, machine_id: str) -> None:
        """Kill what is in the group and remove it. No group: success."""
        groups = [group for group in self._hierarchy.groups(machine_id) if group.is_dir()]
        deadline = time.monotonic() + KILL_S
        while groups:
            self._kill(machine_id, groups)
            groups = [group for group in groups if not _removed(group)]
            if not groups:
                return
            if time.monotonic() > deadline:
                raise HostError("A process of the machine does not end.", code="machine-stuck")
            await asyncio.sleep(_POLL_S)

    def known(self) -> set[str]:
        """Return the names of all groups of this installation."""
        parents = {group.parent for group in self._hierarchy.groups("any")}
        return {path.name for parent in parents if parent.is_dir() for path in parent.iterdir() if path.is_dir()}

    def remove_all(self) -> None:
        """Remove the installation's own groups, once no machine is left."""
        for parent in {group.parent for group in self._hierarchy.groups("any")}:
            with suppress(OSError):
                parent.rmdir()

    def _kill(self, machine_id: str, groups: list[Path]) -> None:
        if (kill_file := self._hierarchy.kill_file(machine_id)) and kill_file.exists():
            kill_file.write_text("1")
            return
        for group in groups:
            for pid in _members(group):
                _kill_member(pid, group)


def is_version_2(root: Path = ROOT) -> bool:
    """Whether the memory controller is on the unified hierarchy."""
    with suppress(OSError):
        return "memory" in (root / "cgroup.controllers").read_text().split()
    return False


class _Version2:
    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def groups(self, name: str) -> list[Path]:
        return [self._parent / name]

    def prepare(self) -> None:
        for directory in (self._parent.parent, self._parent):
            available = (directory / "cgroup.controllers").read_text().split()
            wanted = [f"+{controller}" for controller in ("cpu", "memory", "pids", "io") if controller in available]
            (directory / "cgroup.subtree_control").write_text(" ".join(wanted))

    def limit(self, name: str, limits: HostLimits) -> None:
        group = self._parent / name
        self.limit_memory(name, limits.memory_mib * _MIB)
        (group / "cpu.max").write_text(f"{int(limits.cpus * _PERIOD_US)} {_PERIOD_US}")
        (group / "pids.max").write_text(str(limits.pids))
        _write_if_there(group / "memory.swap.max", "0")
        _write_if_there(group / "memory.oom.group", "1")  # What is left of a machine is of no use.
        for file in ("io.weight", "io.bfq.weight"):
            _write_if_there(group / file, f"default {limits.io_weight}")

    def limit_memory(self, name: str, size: int) -> None:
        group = self._parent / name
        if self._in_use(group) > size:  # where version 1 would refuse, the kernel would kill here
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        (group / "memory.max").write_text(str(size))

    def memory_limit(self, name: str) -> int:
        return int((self._parent / name / "memory.max").read_text())

    @staticmethod
    def _in_use(group: Path) -> int:
        """Return how many bytes the group cannot do without: what is cached of files can be dropped."""
        if not (group / "memory.current").exists():
            return 0
        cached = _table(group / "memory.stat")
        dispensable = cached.get("active_file", 0) + cached.get("inactive_file", 0)
        return int((group / "memory.current").read_text()) - dispensable

    def usage(self, name: str) -> Usage:
        group = self._parent / name
        current = int((group / "memory.current").read_text())
        peak = group / "memory.peak"
        return Usage(
            cpu_s=_table(group / "cpu.stat").get("usage_usec", 0) / 1e6,
            memory_mib=_mib(current - _table(group / "memory.stat").get("inactive_file", 0)),
            memory_peak_mib=_mib(int(peak.read_text()) if peak.exists() else current),
            pids=int((group / "pids.current").read_text()),
        )

    def oom_kills(self, name: str) -> int:
        return _table(self._parent / name / "memory.events").get("oom_kill", 0)

    def kill_file(self, name: str) -> Path | None:
        return self._parent / name / "cgroup.kill"

    def can_freeze(self) -> bool:
        return True

    def freeze(self, name: str, *, still: bool) -> None:
        (self._parent / name / "cgroup.freeze").write_text("1" if still else "0")

    def is_frozen(self, name: str) -> bool:
        return _table(self._parent / name / "cgroup.events").get("frozen") == 1


class _Version1:
    _CONTROLLERS = ("cpu", "cpuacct", "memory", "pids", "blkio", "freezer")

    def __init__(self, root: Path, instance: str) -> None:
        # cpu and cpuacct are often one hierarchy under two names; by their resolved path they are joined once.
        present = {(root / name).resolve() for name in self._CONTROLLERS if (root / name / "cgroup.procs").exists()}
        self._parents = [path / instance for path in sorted(present)]
        self._by_controller = {name: (root / name).resolve() / instance for name in self._CONTROLLERS}

    def groups(self, name: str) -> list[Path]:
        return [parent / name for parent in self._parents]

    def prepare(self) -> None:
        pass

    def limit(self, name: str, limits: HostLimits) -> None:
        cpu, memory = self._by_controller["cpu"] / name, self._by_controller["memory"] / name
        self.limit_memory(name, limits.memory_mib * _MIB)
        _write_if_there(memory / "memory.swappiness", "0")
        (cpu / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (cpu / "cpu.cfs_quota_us").write_text(str(int(limits.cpus * _PERIOD_US)))
        (self._by_controller["pids"] / name / "pids.max").write_text(str(limits.pids))
        for file in ("blkio.bfq.weight", "blkio.weight"):
            _write_if_there(self._by_controller["blkio"] / name / file, str(limits.io_weight))

    def limit_memory(self, name: str, size: int) -> None:
        # The plain limit may never exceed the one with swap: up, that one goes first, down, last. What is refused
        # (the memory is in use) then leaves both as they were.
        memory = self._by_controller["memory"] / name
        _write_if_there(memory / "memory.memsw.limit_in_bytes", str(size))
        (memory / "memory.limit_in_bytes").write_text(str(size))
        _write_if_there(memory / "memory.memsw.limit_in_bytes", str(size))

    def memory_limit(self, name: str) -> int:
        return int((self._by_controller["memory"] / name / "memory.limit_in_bytes").read_text())

    def usage(self, name: str) -> Usage:
        memory = self._by_controller["memory"] / name
        current = int((memory / "memory.usage_in_bytes").read_text())
        return Usage(
            cpu_s=int((self._by_controller["cpuacct"] / name / "cpuacct.usage").read_text()) / 1e9,
            memory_mib=_mib(current - _table(memory / "memory.stat").get("total_inactive_file", 0)),
            memory_peak_mib=_mib(int((memory / "memory.max_usage_in_bytes").read_text())),
            pids=int((self._by_controller["pids"] / name / "pids.current").read_text()),
        )

    def oom_kills(self, name: str) -> int:
        return _table(self._by_controller["memory"] / name / "memory.oom_control").get("oom_kill", 0)

    def kill_file(self, name: str) -> Path | None:  # noqa: ARG002 version 1 has none
        return None

    def can_freeze(self) -> bool:
        return self._by_controller["freezer"] in self._parents

    def freeze(self, name: str, *, still: bool) -> None:
        if self.can_freeze():
            (self._by_controller["freezer"] / name / "freezer.state").write_text("FROZEN" if still else "THAWED")

    def is_frozen(self, name: str) -> bool:
        return (self._by_controller["freezer"] / name / "freezer.state").read_text().strip() == "FROZEN"


def _mib(count: int) -> float:
    return round(max(0, count) / _MIB, 1)


def _table(file: Path) -> dict[str, int]:
    """Parse lines of ``name number``."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def _write_if_there(file: Path, text: str) -> None:
    """Set a knob that not every kernel offers or lets itself be set on this hierarchy."""
    if file.exists():
        with suppress(OSError):
            file.write_text(text)


def _members(group: Path) -> list[int]:
    with suppress(OSError):
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    return []


def _kill_member(pid: int, group: Path) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # SAFETY: seen in the group while the pidfd pins the process, so a recycled pid is not hit.
        if pid in _members(group):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # busy until the last process is gone
        return False
    return True

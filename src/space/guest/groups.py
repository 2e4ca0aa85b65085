"""Which processes belong to a command, whatever they do: setsid, double fork, sudo.

Three ways, the best that the kernel offers: control groups (version 1 with the ``pids`` controller, as in gVisor, or
version 2), else the family tree together with a mark in the environment.
"""

from __future__ import annotations

import os
from _thread import get_native_id

from space.guest.shares import Shares
from space.guest.system import IS_ROOT, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

MARK = "SPACE_COMMAND"
_OWN_HIERARCHY = "/dev/.space/pids"
_KILL_PASSES = 20
"""Passes in a row against something that multiplies while it is killed."""
_PIDS_BYTES_MAX = 4 * 1024 * 1024
_CGROUP_BYTES_MAX = 64 * 1024


class Group:
    """The processes of one command. Enter it to spawn into it: what this thread spawns meanwhile belongs to it."""

    mark: str | None = None
    """What has to be in the environment under ``MARK``, where membership depends on it."""

    def __enter__(self) -> None:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    def pids(self) -> list[int]:
        """Return the processes that belong to it now."""
        raise NotImplementedError

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

    def remove(self) -> bool:
        """Forget the group if it is empty; False when it is not."""
        raise NotImplementedError


def send_signal(pid: int, number: int) -> None:
    """Signal a process that may be gone. Never the agent, nor a whole set of processes."""
    if pid > 1 and pid != os.getpid():
        try:
            # SAFETY: pid is one process of a command, not 0, 1 or negative, and has not been waited for by others.
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


class Groups:
    """Makes groups, in the hierarchy that was found at start."""

    def __init__(self, directory: str | None = None) -> None:
        """``directory`` is a control group to make groups in; None looks for one, if the agent is the first process."""
        if directory is None and os.getpid() == 1 and IS_ROOT:
            directory = _find_hierarchy()
        self._directory = directory
        self._version = 2 if directory and os.path.exists(f"{directory}/cgroup.kill") else 1
        self._count = 0
        self._shares: Shares | None = None

    @property
    def kind(self) -> str:
        """``cgroup2``, ``cgroup1`` or ``family``."""
        return f"cgroup{self._version}" if self._directory else "family"

    def limit_pids(self, count: int) -> None:
        """Let commands have at most ``count`` processes and threads together. No effect where nothing can be counted.

        Where limits are not inherited (version 1), ``share_out`` has to be called after each ``again_s``.
        """
        if self._directory and self._version == 2:
            _try_write(f"{self._directory}/pids.max", str(count))
        elif self._directory:
            self._shares = Shares(self._directory, count)
            self._shares.divide()

    @property
    def again_s(self) -> float | None:
        """After how long to share out again; None while there is nothing to be shared."""
        return self._shares.again_s if self._shares is not None else None

    def share_out(self) -> None:
        """Let each command grow by its share of the processes that are free now."""
        if self._shares is not None:
            self._shares.divide()

    def new(self, command_id: str) -> Group:
        """Return a new, empty group; raises ``OSError``."""
        if not self._directory:
            return Family(command_id)
        self._count += 1
        path = f"{self._directory}/c{self._count}"
        os.mkdir(path)
        if self._shares is not None:
            self._shares.add(f"c{self._count}")
        return self._group(path, self._directory)

    def of(self, pid: int) -> Group:
        """Return the group a process is in; where it is in none of ours, one that changes nothing."""
        match = _find_membership(pid) if self._directory else None
        if match is None or not self._directory:
            return Family("")
        return self._group(f"{self._directory}/{match}", self._directory)

    def _group(self, path: str, directory: str) -> ControlGroup1:
        return (ControlGroup2 if self._version == 2 else ControlGroup1)(path, directory)


class ControlGroup1(Group):
    """A group of the version 1 ``pids`` hierarchy, where a single thread can move."""

    def __init__(self, path: str, outside: str) -> None:
        self._path = path
        self._outside = outside

    def __enter__(self) -> None:
        _write(f"{self._path}/tasks", str(get_native_id()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _write(f"{os.path.dirname(self._outside)}/tasks", str(get_native_id()))

    def pids(self) -> list[int]:
        return _read_pids(f"{self._path}/cgroup.procs")

    def kill(self) -> bool:
        _try_write(f"{self._path}/pids.max", "0")  # Nothing in it can multiply faster than it is killed.
        return super().kill()

    def remove(self) -> bool:
        try:
            os.rmdir(self._path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class ControlGroup2(ControlGroup1):
    """A group of the version 2 hierarchy: the whole agent moves, and one write kills everything in the group."""

    def __enter__(self) -> None:
        _write(f"{self._path}/cgroup.procs", "0")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _write(f"{os.path.dirname(self._outside)}/cgroup.procs", "0")

    def kill(self) -> bool:
        if not self.pids():
            return True
        _write(f"{self._path}/cgroup.kill", "1")
        return False


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
                return self._mark in file.read(_PIDS_BYTES_MAX).split(b"\0")
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


def _find_hierarchy() -> str | None:
    if os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        base = "/sys/fs/cgroup"
    else:
        base = _OWN_HIERARCHY
        os.makedirs(os.path.dirname(base), mode=0o700, exist_ok=True)
        os.makedirs(base, exist_ok=True)
        try:
            # SAFETY: mounts the guest's own kernel's process groups, below a directory that only root may enter.
            call("mount", b"none", base.encode(), b"cgroup", 0, b"pids")
        except OSError:
            return None
    directory = f"{base}/commands"
    try:
        os.makedirs(directory, exist_ok=True)
        os.makedirs(f"{directory}/probe", exist_ok=True)
        os.rmdir(f"{directory}/probe")
    except OSError:
        return None
    return directory


def _find_membership(pid: int) -> str | None:
    """Return the name of the command's group that a process is in, from ``/proc/<pid>/cgroup``."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="ascii", errors="replace") as file:
            lines = file.read(_CGROUP_BYTES_MAX).splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, place = line.partition(":")
        controllers, _, path = place.partition(":")
        parts = path.split("/")
        if controllers in ("", "pids") and len(parts) > 2 and parts[1] == "commands" and parts[2][1:].isdigit():
            return parts[2]
    return None


def _read_pids(path: str) -> list[int]:
    try:
        with open(path, "rb") as file:
            return [int(line) for line in file.read(_PIDS_BYTES_MAX).split()]
    except (OSError, ValueError):
        return []


def _write(path: str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _try_write(path: str, value: str) -> None:
    try:
        _write(path, value)
    except OSError:
        pass

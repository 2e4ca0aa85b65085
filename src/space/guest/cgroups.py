"""Groups of processes by the control groups of the guest's kernel: version 1 in gVisor, version 2 in virtual machines.

Below the hierarchy's top (version 2) are ``agent``, and ``commands`` with a group for each command. What all commands
may use together leaves enough for agent and kernel, and a command that the kernel ends for want of memory ends whole.
"""

from __future__ import annotations

import os
from _thread import get_native_id

from space.guest.groups import Family, Group
from space.guest.memory import low_bytes
from space.guest.metrics import memory
from space.guest.shares import Shares
from space.guest.system import IS_ROOT, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_V1_OWN = "/dev/.space/pids"
_V2 = "/sys/fs/cgroup"
_CONTROLLERS = ("cpu", "memory", "pids")
_AGENT_CPU_WEIGHT = 200
"""All commands together have 100."""
_AGENT_MEMORY_BYTES = 64 << 20
"""Of the agent's own use this much, files it has read included, is not reclaimed for others."""
_RESERVED_TASKS = 256
"""For the kernel's threads and the agent's, of all the tasks that the kernel can have."""
_PASSING_TASKS = 128
"""What commands may have beyond their limit together: the agent's threads count while it is in a group, to spawn."""
_SCRAPE_EVERY = 32
_SCRAPE_BYTES = 64 * 1024
_FILE_BYTES_MAX = 1024 * 1024
"""The kernel refuses to be asked for much more of what is in ``/proc/sys``."""
_BELOW_MAX = 256
"""Groups that a command's programs have made below its own; of more than these only the whole is known."""


class Groups:
    """Makes groups, in the hierarchy that was found at start."""

    def __init__(self, directory: str | None = None) -> None:
        """``directory`` is a control group to make groups in; None looks for one, if the agent is the first process."""
        if directory is None and os.getpid() == 1 and IS_ROOT:
            directory = _find_hierarchy()
        self._directory = directory
        self._is_v2 = bool(directory) and os.path.exists(f"{directory}/cgroup.kill")
        self._count = 0
        self._shares: Shares | None = None
        if directory and self._is_v2:
            _settle(directory)

    def limit_pids(self, count: int) -> None:
        """Let commands have at most ``count`` processes and threads together. No effect where nothing can be counted.

        While there are several commands, ``share_out`` has to be called after each ``again_s``.
        """
        if self._directory:
            if self._is_v2:
                _try_write(f"{self._directory}/pids.max", str(min(_tasks_max(), count + _PASSING_TASKS)))
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

    def freeze(self, *, frozen: bool) -> bool:
        """Have everything in all groups stand still, which nobody is told of, or go on; False where the kernel does not
        offer that. What is killed meanwhile ends.
        """
        if not (self._directory and self._is_v2):
            return False
        try:
            _write(f"{self._directory}/cgroup.freeze", str(int(frozen)))
        except OSError:
            return False
        return True

    def new(self, command_id: str) -> Group:
        """Return a new, empty group; raises ``OSError``."""
        if not self._directory:
            return Family(command_id)
        self._count += 1
        name = f"c{self._count}"
        os.mkdir(f"{self._directory}/{name}")
        if self._is_v2:
            _try_write(f"{self._directory}/{name}/memory.oom.group", "1")
            if self._count % _SCRAPE_EVERY == 0:
                # The kernel keeps a removed group, some 18 KiB, for as long as a page of a file is counted in it. Asked
                # to reclaim however little, it takes the pages of removed groups first.
                _try_write(f"{self._directory}/memory.reclaim", str(_SCRAPE_BYTES))
        if self._shares is not None:
            self._shares.add(name)
        return self._group(name)

    def of(self, pid: int) -> Group:
        """Return the group a process is in; where it is in none of ours, one that changes nothing."""
        name = _find_membership(pid) if self._directory else None
        return Family("") if name is None else self._group(name)

    def _group(self, name: str) -> Group:
        path = f"{self._directory}/{name}"
        top = os.path.dirname(self._directory or "")
        return ControlGroup2(path, f"{top}/agent") if self._is_v2 else ControlGroup1(path, top)


class ControlGroup1(Group):
    """A group of the version 1 ``pids`` hierarchy, where a single thread can move."""

    def __init__(self, path: str, home: str) -> None:
        """``home`` is the group the agent comes back to."""
        self._path = path
        self._home = home

    def __enter__(self) -> None:
        _write(f"{self._path}/tasks", str(get_native_id()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _write(f"{self._home}/tasks", str(get_native_id()))

    def pids(self) -> list[int]:
        return _read_pids(self._path)

    def kill(self) -> bool:
        _try_write(f"{self._path}/pids.max", "0")  # Nothing in it can multiply faster than it is killed.
        return super().kill()

    def remove(self) -> bool:
        return _remove(self._path)


class ControlGroup2(Group):
    """A group of the version 2 hierarchy: the whole agent moves, and one write kills everything in the group."""

    def __init__(self, path: str, home: str) -> None:
        """``home`` is the group the agent comes back to."""
        self._path = path
        self._home = home
        self._limit = ""

    def __enter__(self) -> None:
        # Who enters what stands still does so, too.
        _try_write(f"{os.path.dirname(self._path)}/cgroup.freeze", "0")
        # All threads of the agent count while they are here; what is started must not be refused because of them.
        self._limit = _read(f"{self._path}/pids.max").decode()
        self._limit_to("max")
        try:
            _write(f"{self._path}/cgroup.procs", "0")
        except OSError:
            self._limit_to(self._limit)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            _write(f"{self._home}/cgroup.procs", "0")
        finally:
            self._limit_to(self._limit)

    def pids(self) -> list[int]:
        return [pid for path in self._paths() for pid in _read_pids(path)]

    def kill(self) -> bool:
        if not self._is_populated():
            return True
        # SAFETY: the agent, a single thread of which does all this, is not in the group now.
        _try_write(f"{self._path}/cgroup.kill", "1")
        return False

    def oom_kills(self) -> int:
        return _field(f"{self._path}/memory.events", b"oom_kill")

    def remove(self) -> bool:
        if _remove(self._path):
            return True
        return not self._is_populated() and all(_remove(path) for path in reversed(self._paths()))

    def _is_populated(self) -> bool:
        """Whether a process is in it, or in a group below it."""
        return _field(f"{self._path}/cgroup.events", b"populated") > 0

    def _paths(self) -> list[str]:
        """Return its directory and those below it that programs in it have made, each after the one it lies in."""
        found = [self._path]
        for path in found:
            try:
                if os.stat(path).st_nlink > 2 and len(found) < _BELOW_MAX:
                    with os.scandir(path) as entries:
                        found += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            except OSError:
                continue  # It has just been removed.
        return found[:_BELOW_MAX]

    def _limit_to(self, tasks: str) -> None:
        if self._limit:
            _try_write(f"{self._path}/pids.max", tasks)


def _find_hierarchy() -> str | None:
    if os.path.exists(f"{_V2}/cgroup.controllers"):
        top = _V2
    else:
        top = _V1_OWN
        os.makedirs(os.path.dirname(top), mode=0o700, exist_ok=True)
        os.makedirs(top, exist_ok=True)
        try:
            # SAFETY: mounts the guest's own kernel's process groups, below a directory that only root may enter.
            call("mount", b"none", top.encode(), b"cgroup", 0, b"pids")
        except OSError:
            return None
    directory = f"{top}/commands"
    try:
        os.makedirs(f"{directory}/probe", exist_ok=True)
        os.rmdir(f"{directory}/probe")
    except OSError:
        return None
    return directory


def _settle(directory: str) -> None:
    """Part the agent from the commands, whose groups are going to be in ``directory``, and keep for it what it needs.

    A kernel may lack a controller; then what that would limit is not limited.
    """
    agent = f"{os.path.dirname(directory)}/agent"
    os.makedirs(agent, exist_ok=True)
    for controller in _CONTROLLERS:
        _try_write(f"{directory}/cgroup.subtree_control", f"+{controller}")
    _try_write(f"{agent}/cpu.weight", str(_AGENT_CPU_WEIGHT))
    _try_write(f"{agent}/memory.min", str(_AGENT_MEMORY_BYTES))
    total, available = memory()
    # Nothing else runs yet: what is gone is the kernel's and the agent's. The guard acts before the kernel has to.
    _try_write(f"{directory}/memory.max", str(max(0, available - low_bytes(total) // 2)))
    _try_write(f"{directory}/pids.max", str(_tasks_max()))
    _write(f"{agent}/cgroup.procs", "0")


def _tasks_max() -> int:
    """Return how many tasks the kernel can have but for those that are not the commands'."""
    texts = [_read(f"/proc/sys/kernel/{name}").strip() for name in ("pid_max", "threads-max")]
    numbers = [int(text) for text in texts if text.isdigit()]
    return max(_RESERVED_TASKS, min(numbers, default=0) - _RESERVED_TASKS)


def _find_membership(pid: int) -> str | None:
    """Return the name of the command's group that a process is in, from ``/proc/<pid>/cgroup``."""
    for line in _read(f"/proc/{pid}/cgroup").decode("ascii", "replace").splitlines():
        _, _, place = line.partition(":")
        controllers, _, path = place.partition(":")
        parts = path.split("/")
        if controllers in ("", "pids") and len(parts) > 2 and parts[1] == "commands" and parts[2][1:].isdigit():
            return parts[2]
    return None


def _field(path: str, name: bytes) -> int:
    """Return a number from lines of names and numbers; 0 where there is none."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(b" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _read_pids(path: str) -> list[int]:
    return [int(line) for line in _read(f"{path}/cgroup.procs").split() if line.isdigit()]


def _remove(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError:
        return b""


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

"""The contract of a driver: how a sandbox becomes a machine.

A driver reports the machine's state and nothing of the product's: it knows no projects, operations or deadlines. The
broker prepares what `Capabilities.needs` names (a disk, a link, a cgroup), opens the guest channel and tells the
driver what to do. All drivers, and the shipped fake in `space.testing`, pass one contract suite
(``tests/contract/test_driver.py``).

Rules that every driver keeps:

* Machines outlive the process that started them. A new driver object over the same directories finds them again.
* Every method is idempotent where that makes sense: `pause` of a paused machine, `destroy` of an absent one succeed.
* A method that fails leaves the machine as it was, or (`start`, `restore`) leaves nothing running that `destroy` with
  the same id does not end.
* Calls about one machine are never made at the same time; the broker holds a lock per machine.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from space.drivers.processes import Process
from space.model.sandbox import Resources


class Need(StrEnum):
    """What the broker must provide before a machine of this driver can start."""

    DISK = "disk"
    """A writable root filesystem as a directory: `Machine.root`."""
    LINK = "link"
    """A network namespace that holds one configured interface: `Machine.netns`."""
    CGROUP = "cgroup"
    """A cgroup with limits that the machine's processes join before they run: `Machine.cgroups`."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What machines of a driver are and can. The same for the life of the process."""

    boundary: str
    """What separates guest and host, in words for people."""
    needs: frozenset[Need]
    checkpoint: bool
    """Memory and processes can be written to files and restored from them."""
    isolates: bool
    """Whether the boundary holds against a hostile guest. False only for the fake."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything a driver must know to start one machine. Paths are the broker's own, never a client's."""

    id: str
    hostname: str
    resources: Resources
    root: Path | None = None
    netns: Path | None = None
    cgroups: tuple[Path, ...] = ()
    """``cgroup.procs`` files; a process writes ``0`` to each to join."""


@dataclass(frozen=True, slots=True)
class Channel:
    """Open descriptors that become the machine's standard input and output. The caller closes its own copies
    afterwards.
    """

    stdin: int
    stdout: int


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What the host's cgroup must allow so that the guest gets its resources: the machine's own overhead comes on
    top.
    """

    cpus: float
    memory_mib: int
    pids: int


class MachineState(StrEnum):
    ABSENT = "absent"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Observation:
    """What the driver sees of one machine now. `process` is the one whose end is the machine's end."""

    state: MachineState
    process: Process | None = None


class Driver(Protocol):
    """One way of running machines. Errors are `space.errors` classes; messages name no host paths."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def limits(self, resources: Resources) -> HostLimits:
        """Return the limits for the machine's cgroup. Pure."""
        ...

    async def prepare(self, machine: Machine) -> None:
        """Write what a start or restore needs. Nothing runs yet; repeating it replaces what was there."""
        ...

    async def start(self, machine: Machine, channel: Channel) -> Process:
        """Boot a prepared machine and return its process. Raise `HostError` when it does not come up."""
        ...

    async def restore(self, machine: Machine, channel: Channel, image: Path) -> Process:
        """Bring a prepared machine back, running, from a directory that `checkpoint` filled."""
        ...

    async def pause(self, machine_id: str) -> None:
        """Stop the machine's CPUs. Raise `MachineLost` when there is no machine."""
        ...

    async def resume(self, machine_id: str) -> None:
        """Let a paused machine go on. Raise `MachineLost` when there is no machine."""
        ...

    async def checkpoint(self, machine_id: str, image: Path) -> None:
        """Write memory and processes of a *paused* machine into the empty directory `image`.

        The machine stays paused either way. Raise `HostFull` when the directory's filesystem has no room. The files
        need not be synced; the caller does that.
        """
        ...

    async def check_image(self, image: Path) -> None:
        """Raise `HostError` unless the image is complete and readable by this driver as it is installed now."""
        ...

    async def destroy(self, machine_id: str, process: Process | None) -> None:
        """End the machine, whatever its state, and remove all that the driver keeps of it. `process` is a hint."""
        ...

    async def inspect(self, machine_id: str) -> Observation:
        """Look at the machine itself, not at what was last asked of it."""
        ...

    async def known(self) -> frozenset[str]:
        """Return the ids of all machines of which the driver keeps anything, running or not."""
        ...

    async def end_strays(self) -> None:
        """End programs of this driver that were working for a broker that died. Called once, before anything else."""
        ...

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
    BLOCKS = "blocks"
    """A writable root filesystem as images of block devices: `Machine.blocks`."""
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
    stands_after_checkpoint: bool = False
    """A checkpoint leaves a machine paused until `resume`: its own kernel writes its disks, which must not change
    before they are kept with the memory. Only the driver pauses and resumes such machines.
    """
    volumes: bool = False
    """Directories of the host can be mounted in its machines, shared with others."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The disks of a machine that has a kernel of its own, which lays one over the other. `drivers.vm.images` makes
    them.
    """

    template: Path
    """An erofs image that many machines share and none writes."""
    layer: Path
    """An ext4 image that is this machine's alone: what it has written."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A directory of the host that machines write together, and where it is in this one."""

    source: Path
    path: str
    """Absolute and plain, and none of those that the machine mounts itself."""


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
    blocks: Blocks | None = None
    shared: tuple[Shared, ...] = ()
    """Only where `Capabilities.volumes`. A machine that is restored has them at the places that its image had."""


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
    io_weight: int = 100
    """1 to 1000: the machine's part of a busy disk, as against the others'."""


class MachineState(StrEnum):
    ABSENT = "absent"
    RUNNING = "running"
    PAUSED = "paused"
    STALLED = "stalled"
    """It stands still since the host has no room for what it writes to its disk; `resume` lets it try once more."""


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
        """Bring a prepared machine back, running, from a directory that `checkpoint` filled.

        Its id, root, namespace and resources may be others than those of the machine that the image was made of, and
        several machines may be restored from one image, also at the same time. Connections that led out of the machine
        are dead in it; those within it live on.
        """
        ...

    async def pause(self, machine_id: str) -> None:
        """Stop the machine's CPUs. Raise `MachineLost` when there is no machine."""
        ...

    async def resume(self, machine_id: str) -> None:
        """Let a paused machine go on. Raise `MachineLost` when there is no machine."""
        ...

    async def checkpoint(self, machine_id: str, image: Path) -> None:
        """Write memory and processes of a *running* machine into the empty directory `image`.

        The machine stands still while that lasts and goes on afterwards, also when it fails, and when the caller dies;
        where `Capabilities.stands_after_checkpoint`, it goes on if it fails, and else stays paused until `resume`.
        Connections that lead out of it may be ended by this. Raise `HostFull` when the directory's filesystem has no
        room. The files need not be synced; the caller does that.
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

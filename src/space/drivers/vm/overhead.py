"""What a virtual machine's program takes of the host beside what its guest is given."""

from dataclasses import dataclass
from pathlib import Path

from space.drivers.base import HostLimits
from space.errors import HostError
from space.model.sandbox import Resources

IMAGE_MIB = 64
"""More than an image has beside the memory and what says where that belongs."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Measured by driver. `tasks` are its threads."""

    cpus: float
    memory_mib: int
    tasks: int

    def on(self, resources: Resources) -> HostLimits:
        """Return what the host must allow so that the guest gets its resources."""
        return HostLimits(
            cpus=resources.cpus + self.cpus,
            memory_mib=resources.memory_mib + self.memory_mib,
            pids=resources.pids + self.tasks,
            io_weight=resources.io_weight,
        )


def file_bytes_max(layer: Path, memory_mib: int) -> int:
    """Return how large a file may become that a machine's program writes: its layer, or an image of its memory.

    A program that its guest has taken over could else fill the host's disk through either. Raise `HostError` where
    there is no layer.
    """
    try:
        size = layer.stat().st_size
    except OSError as error:
        raise HostError(f"The machine's disk cannot be used: {error.strerror}.", code="start-failed") from error
    return max(size, (memory_mib + memory_mib // 64 + IMAGE_MIB) << 20)

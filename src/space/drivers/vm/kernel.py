"""The kernel of virtual machines, and what its command line tells the first program (``scripts/guest_init.sh``)."""

from dataclasses import dataclass
from pathlib import Path

from space.drivers.vm import network
from space.errors import HostError

VMLINUX, INITRD = "vmlinux", "initrd"
DISKS = ("template", "layer", "space")
"""In the order in which they are attached."""
WRITABLE = "layer"
_DEVICES = ("vda", "vdb", "vdc")
"""What the guest's kernel calls them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A directory that ``scripts/guest-kernel`` has made, or an operator: ``vmlinux`` (uncompressed) and ``initrd``.
    Everybody on the host may read it.
    """

    directory: Path

    def resolved(self) -> "Kernel":
        """Return it by the name that does not come to mean another one. Raise `HostError` when there is none."""
        found = Kernel(self.directory.resolve())
        if not all((found.directory / name).is_file() for name in (VMLINUX, INITRD)):
            raise HostError(
                "There is no kernel for virtual machines on this host: run scripts/guest-kernel --activate.",
                code="no-guest-kernel",
            )
        return found


def command_line(*words: str) -> str:
    """Return the guest kernel's command line: what is the same for all, and what a driver adds."""
    fixed = [
        "quiet",
        "panic=-1",  # a kernel that fails ends the machine, at once
        "reboot=t",
        "random.trust_cpu=on",
        f"space.disks={','.join(_DEVICES)}",
        f"space.link={network.GUEST_V4},{network.HOST_V4.ip},{network.GUEST_V6},{network.HOST_V6.ip}",
    ]
    return " ".join([*fixed, *words])

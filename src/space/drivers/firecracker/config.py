"""What a Firecracker is asked for before its machine starts, and for a restored one. Pure: data in, data out.

Paths are those inside the jail, the same for every machine: so a machine's image can be restored in any other's jail.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from space.drivers.vm import network
from space.drivers.vm.kernel import DISKS, INITRD, VMLINUX, WRITABLE, command_line

Request = tuple[str, Mapping[str, Any]]
"""A path of Firecracker's API, and what is put there."""

IMAGE = ("state", "memory")
"""The files of a machine's image, as Firecracker writes them."""
API, VSOCK = "api.sock", "vsock.sock"
OUT = "out"
"""The directory in the jail that an image is written to."""
GUEST_CID = 3
PORT = 1000
"""Of the guest's vsock, where its agent listens for the channel. Below 1024 only the guest's root can."""
# The serial line is what tells how far a guest has come that does not answer; it is kept by the kernel up to a bound.
# The level comes first: what was said before is repeated once there is a line for it, with the level of that moment.
_CONSOLE = ("loglevel=6", "earlyprintk=ttyS0", "console=ttyS0")
# What this machine has: no PCI, and a keyboard controller that can only reset it, which ends Firecracker.
_MACHINE = ("pci=off", "i8042.noaux", "i8042.nomux", "i8042.nopnp", "i8042.dumbkbd", "reboot=k")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a machine has that its image cannot be restored without."""

    cpus: int
    memory_mib: int
    cpu_template: str = ""
    """A template of Firecracker's that hides differences between processors; empty: none."""

    @classmethod
    def of(cls, cpus: float, memory_mib: int, cpu_template: str) -> "Hardware":
        return cls(math.ceil(cpus), memory_mib, cpu_template)


def render_start(hardware: Hardware) -> tuple[Request, ...]:
    """Return the requests that make a machine and start it, in their order."""
    machine: dict[str, Any] = {"vcpu_count": hardware.cpus, "mem_size_mib": hardware.memory_mib, "smt": False}
    if hardware.cpu_template:
        machine["cpu_template"] = hardware.cpu_template
    words = command_line(*_CONSOLE, *_MACHINE, f"space.channel=vsock:{PORT}")
    boot = {"kernel_image_path": f"/{VMLINUX}", "initrd_path": f"/{INITRD}", "boot_args": words}
    link = {"iface_id": "eth0", "guest_mac": network.GUEST_MAC, "host_dev_name": network.TAP}
    balloon = {"amount_mib": 0, "deflate_on_oom": True, "stats_polling_interval_s": 1}
    return (
        ("/machine-config", machine),
        ("/boot-source", boot),
        *((f"/drives/{disk}", _drive(disk)) for disk in DISKS),
        ("/network-interfaces/eth0", link),
        ("/vsock", {"guest_cid": GUEST_CID, "uds_path": f"/{VSOCK}"}),
        ("/entropy", {}),
        ("/balloon", balloon),
        ("/actions", {"action_type": "InstanceStart"}),
    )


def render_checkpoint() -> Request:
    """Return the request that writes a paused machine's image."""
    state, memory = (f"/{OUT}/{name}" for name in IMAGE)
    return "/snapshot/create", {"snapshot_type": "Full", "snapshot_path": state, "mem_file_path": memory}


def render_restore() -> Request:
    """Return the request that brings a machine back, running. Its memory is mapped, never written: what the machine
    changes is its own, and what it does not is shared with all others of the same image.
    """
    state, memory = (f"/{name}" for name in IMAGE)
    backend = {"backend_path": memory, "backend_type": "File"}
    return "/snapshot/load", {"snapshot_path": state, "mem_backend": backend, "resume_vm": True}


def _drive(name: str) -> dict[str, Any]:
    return {
        "drive_id": name,
        "path_on_host": f"/{name}",
        "is_root_device": False,
        "is_read_only": name != WRITABLE,
        "cache_type": "Writeback" if name == WRITABLE else "Unsafe",
    }

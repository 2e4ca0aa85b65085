"""QEMU's command line for one machine. Pure: data in, data out.

QEMU sees nothing of the host but its own program files and the guest's kernel: all else is handed to it as descriptors
by `launch`, in the order given here.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from space.drivers.qemu import launch
from space.drivers.vm import network
from space.drivers.vm.kernel import DISKS, INITRD, VMLINUX, WRITABLE, command_line

PROGRAM = "/usr/bin/qemu-system-x86_64"
# SAFETY: a QEMU taken over by its guest can start no program, get no privilege and use no odd system call.
SANDBOX = ("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")
_FIRST = 3
"""The descriptor of the first disk; `launch` begins with that."""
CODE_CACHE_MIB = 64
"""How much translated code of the guest an emulating QEMU keeps."""
MTU = 1500


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a machine has that a memory image was made with, and that cannot be another when it is restored."""

    cpus: int
    memory_mib: int
    counter_khz: int
    """See `clock`."""

    @classmethod
    def of(cls, cpus: float, memory_mib: int, counter_khz: int) -> "Hardware":
        return cls(math.ceil(cpus), memory_mib, counter_khz)


def render(name: str, hardware: Hardware, *, restores: bool) -> list[str]:
    """Return the argv. Descriptors: the disks; the image to restore, if it `restores`; the monitor's listening socket;
    the tap device. `name` is one word that no other process's command line has.
    """
    image = _FIRST + len(DISKS)
    monitor = image + restores
    argv = [PROGRAM, "-name", name, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", *SANDBOX]
    argv += [
        "-machine",
        "microvm,x-option-roms=off,rtc=on,acpi=on,isa-serial=off,usb=off,dump-guest-core=off,mem-merge=off",
    ]
    argv += ["-accel", f"tcg,thread=multi,tb-size={CODE_CACHE_MIB}", "-cpu", "max"]
    argv += ["-smp", str(hardware.cpus), "-m", str(hardware.memory_mib)]
    argv += ["-kernel", f"{launch.KERNEL}/{VMLINUX}", "-initrd", f"{launch.KERNEL}/{INITRD}"]
    argv += ["-append", command_line(f"tsc_early_khz={hardware.counter_khz}")]
    argv += ["-chardev", f"socket,id=monitor,fd={monitor},server=on,wait=off", "-mon", "chardev=monitor,mode=control"]
    for place, disk in enumerate(DISKS):
        fixed = "off" if disk == WRITABLE else "on"
        argv += ["-add-fd", f"fd={_FIRST + place},set={place}"]
        argv += [
            "-blockdev",
            f"driver=file,node-name={disk},filename=/dev/fdset/{place},read-only={fixed},discard=unmap",
        ]
        argv += ["-device", f"virtio-blk-device,drive={disk},serial={disk}"]
    # The channel: standard input and output, and in the guest the one port that is there.
    argv += ["-chardev", "stdio,id=channel,signal=off", "-device", "virtio-serial-device,max_ports=2"]
    argv += ["-device", "virtserialport,chardev=channel,name=space,nr=1"]
    argv += ["-object", "rng-builtin,id=random", "-device", "virtio-rng-device,rng=random"]
    argv += ["-device", "virtio-balloon-device,id=balloon,deflate-on-oom=on,free-page-reporting=on"]
    argv += ["-netdev", f"tap,id=link,fd={monitor + 1}"]
    argv += ["-device", f"virtio-net-device,netdev=link,mac={network.GUEST_MAC},host_mtu={MTU}"]
    if restores:
        argv += ["-incoming", f"fd:{image}"]
    return [*argv, "-S"]


def is_installed() -> bool:
    return Path(PROGRAM).exists()

"""The QEMU driver: a machine is a virtual machine with a Linux kernel of its own."""

from space.drivers.qemu.driver import QemuDriver

__all__ = ["QemuDriver"]

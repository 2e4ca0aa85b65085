"""The Firecracker driver: a machine is a virtual machine with a Linux kernel of its own, on processors that run guests
(KVM), each under Firecracker's own jailer.
"""

from space.drivers.firecracker.driver import FirecrackerDriver

__all__ = ["FirecrackerDriver"]

"""The gVisor driver: a machine is a runsc sandbox."""

from space.drivers.gvisor.driver import GVisorDriver

__all__ = ["GVisorDriver"]

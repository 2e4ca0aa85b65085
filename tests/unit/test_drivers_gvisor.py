"""What the gVisor driver asks of the host for a machine."""

from pathlib import Path

from space.drivers.gvisor import GVisorDriver
from space.model.sandbox import Resources

DRIVER = GVisorDriver(Path("/nonexistent/runsc"), Path("/nonexistent/state"), Path("/nonexistent/guest"))


def test_the_hosts_limit_leaves_room_for_gvisor_and_for_the_guard_inside() -> None:
    """Measured: 25 MiB for the sentry, 0.41 MiB a process, 110 MiB taken in the worst case before all stands still."""
    small = DRIVER.limits(Resources(cpus=1, memory_mib=512, pids=512))
    assert small.memory_mib >= 512 + 25 + 0.41 * 512 + 110


def test_the_room_for_the_guard_grows_with_the_processors() -> None:
    one, four = (DRIVER.limits(Resources(cpus=cpus, memory_mib=512)).memory_mib for cpus in (1, 4))
    assert four - one == 3 * 64


def test_the_share_of_the_disk_is_handed_on() -> None:
    assert DRIVER.limits(Resources(io_weight=7)).io_weight == 7

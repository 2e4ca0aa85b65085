"""Where the programs and files lie that drivers need on this host, as the settings say, or where set-up puts them."""

import shutil
from contextlib import suppress
from pathlib import Path

from space.drivers.firecracker.versions import Programs
from space.drivers.qemu import command
from space.drivers.vm.kernel import Kernel
from space.errors import HostError
from space.settings import Settings

RUNSC = Path("/opt/space/bin/runsc")
FIRECRACKER = Path("/opt/space/firecracker")


def find_runsc(settings: Settings) -> Path | None:
    """The runsc that the installation uses: the setting, else the one scripts/up fetched, else the one on PATH."""
    if settings.runsc is not None:
        return settings.runsc
    if RUNSC.exists():
        return RUNSC
    found = shutil.which("runsc")
    return Path(found) if found else None


def find_firecracker(settings: Settings) -> Programs | None:
    """Firecracker and its jailer, which lie in one directory; not asked yet whether they can be used."""
    if settings.firecracker is not None:
        return Programs(settings.firecracker)
    if FIRECRACKER.exists():
        return Programs(FIRECRACKER)
    found = shutil.which("firecracker")
    return Programs(Path(found).parent) if found else None


def find_qemu() -> Path | None:
    return Path(command.PROGRAM) if command.is_installed() else None


def find_kernel(settings: Settings) -> Kernel | None:
    """The kernel of virtual machines, by the name that does not come to mean another one."""
    with suppress(HostError):
        return Kernel(settings.kernel).resolved()
    return None


def missing_disk_tools() -> list[str]:
    """Return the programs that are not there of those that make disks of virtual machines."""
    return [name for name in ("bwrap", "mkfs.erofs", "mke2fs") if shutil.which(name) is None]

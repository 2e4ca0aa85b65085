"""Templates and machines' disks: what they promise, whatever the file system below."""

from pathlib import Path
from typing import Protocol

from space.broker.btrfs import BtrfsDisks
from space.broker.overlay import OverlayDisks
from space.settings import Settings


class Disks(Protocol):
    """A store of template directories, never altered, and of machines' writable root file systems above them.

    Paths returned are directories on the host that only root can enter. All methods are idempotent.
    """

    async def open(self) -> None:
        """Make or find the store, mounted."""
        ...

    async def close(self) -> None:
        """Unmount; the contents stay. No machine may run."""
        ...

    def template(self, hexdigest: str) -> Path: ...

    async def new_template(self, name: str) -> Path:
        """Return an empty directory to fill; `name` begins with a dot."""
        ...

    async def seal_template(self, name: str, hexdigest: str) -> int:
        """Turn a filled directory into template `hexdigest`; return its bytes."""
        ...

    async def delete_template(self, name: str) -> None: ...

    async def create(self, machine_id: str, template: Path, template_bytes: int, disk_mib: int) -> Path:
        """Make a machine's disk from a template, in constant time, to which the guest may add `disk_mib`. Ready for
        use.
        """
        ...

    async def attach(self, machine_id: str) -> Path:
        """Make a kept disk ready for use again. Raise `HostError` when there is none."""
        ...

    async def detach(self, machine_id: str) -> None:
        """Release what an unused disk need not hold."""
        ...

    async def delete(self, machine_id: str) -> None: ...

    async def sync(self, machine_id: str) -> None:
        """Return when all that the machine wrote would survive a power cut."""
        ...

    async def used_mib(self) -> dict[str, float]:
        """Return each machine's size, its template's share included where the store counts that."""
        ...

    def known(self) -> set[str]:
        """Return the ids of all machines that have a disk."""
        ...

    def unfinished_templates(self) -> set[str]: ...


def open_disks(settings: Settings) -> Disks:
    """Choose the store for this host: btrfs where the kernel has it, else overlays."""
    directory = settings.broker_dir / "disks"
    if "btrfs" in Path("/proc/filesystems").read_text().split():
        return BtrfsDisks(directory, settings.broker_dir / "disks.btrfs", settings.disk_store_mib)
    return OverlayDisks(directory)

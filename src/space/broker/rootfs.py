"""Templates and machines' disks: what they promise, whatever the file system below."""

from pathlib import Path
from typing import Protocol

from space.broker.btrfs import BtrfsDisks
from space.broker.overlay import OverlayDisks
from space.broker.quotas import Origin
from space.settings import Settings


class MachineDisks(Protocol):
    """What machines write, and what was kept of that. Paths returned are in directories that only root can enter. All
    methods are idempotent.
    """

    async def create(self, machine_id: str, origin: Origin, disk_mib: int) -> Path:
        """Make a machine's disk of `origin`, to which the guest may add `disk_mib` less what the origin holds beyond
        its template. Ready for use.
        """
        ...

    async def limit(self, machine_id: str, template_bytes: int, disk_mib: int) -> None:
        """Let the guest add `disk_mib` from now on; raise `InvalidRequest` where a disk in use keeps its size."""
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

    async def save(self, machine_id: str, name: str, template_bytes: int, disk_mib: int) -> int:
        """Keep the disk, which may have `disk_mib`, as it is now as snapshot `name`, which survives a power cut; return
        its bytes beyond the template. The machine must not write meanwhile.
        """
        ...

    def saved(self, name: str) -> Path:
        """Return where a snapshot is, as an origin for `create`."""
        ...

    async def drop(self, name: str) -> None: ...

    def known_saved(self) -> set[str]:
        """Return the names of all snapshots of disks."""
        ...

    def used(self, machine_id: str, template_bytes: int, disk_mib: int) -> int:
        """Return the bytes that a machine's disk, which may have `disk_mib`, has beyond its template. Raise `HostError`
        when there is none.
        """
        ...

    def known(self) -> set[str]:
        """Return the ids of all machines that have a disk."""
        ...

    def attached(self) -> set[str]:
        """Return the ids of those whose disk holds more of the host than its space."""
        ...


class Disks(MachineDisks, Protocol):
    """A store of templates and snapshots, never altered, and of machines' writable root file systems made of them, as
    directories on the host.
    """

    async def open(self) -> None:
        """Make or find the store, mounted."""
        ...

    async def sweep(self) -> None:
        """Clear up after what was deleted, and see to it that the limits of disks hold."""
        ...

    async def close(self) -> None:
        """Unmount; the contents stay. No machine may run."""
        ...

    def template(self, hexdigest: str) -> Path: ...

    async def new_template(self, name: str, of: str | None = None) -> Path:
        """Return a directory to fill, empty or as the disk of machine `of` is, which does not run; `name` begins with a
        dot.
        """
        ...

    async def seal_template(self, name: str, hexdigest: str, size: int) -> int:
        """Turn a filled directory, whose files take `size` bytes, into template `hexdigest`, which survives a power
        cut; return the bytes that a disk made of it begins with.
        """
        ...

    async def delete_template(self, name: str) -> None: ...

    def known_templates(self) -> set[str]:
        """Return the names of all, finished or not."""
        ...

    async def make_volume(self, name: str, size_mib: int) -> None:
        """Make an empty directory that holds so much at most and survives a power cut. One that is there stays. Raise
        `Conflict` where there can be none.
        """
        ...

    def volume(self, name: str) -> Path:
        """Return a volume's directory, which machines write. Raise `NotFound` when there is none."""
        ...

    async def delete_volume(self, name: str) -> None:
        """Delete a volume. From the first moment on there is none of the name."""
        ...

    def known_volumes(self) -> set[str]: ...


def open_disks(settings: Settings) -> Disks:
    """Choose the store for this host: btrfs where the kernel has it, else overlays."""
    directory = settings.broker_dir / "disks"
    if "btrfs" in Path("/proc/filesystems").read_text().split():
        return BtrfsDisks(directory, settings.broker_dir / "disks.btrfs", settings.disk_store_mib)
    return OverlayDisks(directory)

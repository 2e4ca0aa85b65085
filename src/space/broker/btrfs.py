"""The copy-on-write store on btrfs: a subvolume per template and per machine, limited as `quotas` does.

Where the data directory is not on btrfs itself, the store is a file that is mounted through a loop device. Its space is
taken from the host's file system at once: were it sparse, a full host would lose what guests have written, and with the
file system's own trees every disk there is.
"""

# ruff: noqa: ASYNC240 - names in local directories are looked up in microseconds

import asyncio
import errno
import os
from contextlib import suppress
from pathlib import Path

import structlog

from space.broker import subvolumes
from space.broker.mounts import is_mounted, mount_kind, wait_released
from space.broker.quotas import Origin, Quotas
from space.drivers import programs
from space.errors import HostError, HostFull, NotFound

log = structlog.get_logger()

PROGRAM_S = 60.0
CLEANED_S = 5.0
"""How long a full store waits for what was deleted to be given back."""
FREE_MIB_MIN = 256
JOURNALS_MIB_MIN = 16
"""Beside the store, for what is written down of its machines."""
SIZE_MIB_MIN = 512
KEPT_FREE, KEPT_MIB_MAX = 0.1, 16 * 1024
"""What the store leaves to others of the host's file system, whatever size it is to have: a part, and at most that."""
_MIB = 1 << 20


class BtrfsDisks:
    """Disks as subvolumes under `directory`. See `rootfs.Disks` for what the methods promise."""

    def __init__(self, directory: Path, image: Path, size_mib: int) -> None:
        self._directory = directory
        self._image = image
        self._size_mib = size_mib
        self._templates = directory / "templates"
        self._machines = directory / "machines"
        self._snapshots = directory / "snapshots"
        self._volumes = directory / "volumes"
        self._quotas = Quotas(directory, image.with_suffix(".rooms"))

    async def open(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if mount_kind(self._directory) != "btrfs":
            await self._mount()
        own = is_mounted(self._directory) and self._image.exists()
        await self._quotas.open(self._machines, own=own)
        for directory in (self._templates, self._machines, self._snapshots, self._volumes):
            directory.mkdir(mode=0o700, exist_ok=True)
        for unfinished in self._volumes.glob(".*"):
            await self._delete(unfinished)

    async def sweep(self) -> None:
        await self._quotas.sweep()

    async def close(self) -> None:
        await self._quotas.close()
        if is_mounted(self._directory):
            # SAFETY: our own mount point; the loop device was made by mount and goes with it.
            await programs.check(["umount", str(self._directory)], timeout_s=PROGRAM_S)
            await wait_released(self._image)

    def template(self, hexdigest: str) -> Path:
        return self._templates / hexdigest

    async def new_template(self, name: str, of: str | None = None) -> Path:
        path = self._templates / name
        await self.delete_template(name)
        await self._check_room()
        if of is None:
            await programs.check(["btrfs", "subvolume", "create", str(path)], timeout_s=PROGRAM_S)
        else:
            await asyncio.to_thread(subvolumes.snapshot, await self.attach(of), path)
        return path

    async def seal_template(self, name: str, hexdigest: str, size: int) -> int:
        path = self.template(hexdigest)
        await self.delete_template(hexdigest)
        (self._templates / name).rename(path)
        await programs.check(["btrfs", "property", "set", "-ts", str(path), "ro", "true"], timeout_s=PROGRAM_S)
        await asyncio.to_thread(subvolumes.sync, path)
        try:
            return self._quotas.origin_bytes(path, size)
        except OSError as error:
            raise HostError("The disk store does not account for a disk.", code="disk-store-damaged") from error

    async def delete_template(self, name: str) -> None:
        await self._delete(self._templates / name)

    async def create(self, machine_id: str, origin: Origin, disk_mib: int) -> Path:
        path = self._machines / machine_id
        await self._check_room()
        await asyncio.to_thread(self._create, path, origin, disk_mib)
        return path

    async def limit(self, machine_id: str, template_bytes: int, disk_mib: int) -> None:
        await asyncio.to_thread(self._quotas.change, self._machines / machine_id, template_bytes, disk_mib)

    async def attach(self, machine_id: str) -> Path:
        # A full store keeps nobody from the disk that is there; a host that is full under an unreserved one does.
        if not self._is_safe():
            raise HostFull("The host's file system is full, and the disk store lies on it.", code="disk-store-full")
        path = self._machines / machine_id
        if not path.is_dir():
            raise HostError("The machine's disk is gone.", code="disk-lost")
        return path

    async def detach(self, machine_id: str) -> None:
        """A subvolume needs no taking down."""

    async def delete(self, machine_id: str) -> None:
        await self._delete(self._machines / machine_id)

    async def sync(self, machine_id: str) -> None:
        await asyncio.to_thread(subvolumes.sync, self._machines / machine_id)

    async def save(self, machine_id: str, name: str, template_bytes: int, disk_mib: int) -> int:
        await self._check_room("snapshot-store-full")
        try:
            await asyncio.to_thread(_save, self._machines / machine_id, self._snapshots / name)
        except OSError as error:
            raise full_or_stuck(error) from error
        # The kernel has committed both, so this is of now.
        return self.used(machine_id, template_bytes, disk_mib)

    def saved(self, name: str) -> Path:
        return self._snapshots / name

    async def drop(self, name: str) -> None:
        await self._delete(self._snapshots / name)

    def known_saved(self) -> set[str]:
        return {path.name for path in self._snapshots.iterdir()}

    def used(self, machine_id: str, template_bytes: int, disk_mib: int) -> int:
        try:
            return self._quotas.used(self._machines / machine_id, template_bytes, disk_mib)
        except OSError as error:
            raise HostError("The disk store does not account for a disk.", code="disk-store-damaged") from error

    def known(self) -> set[str]:
        return {path.name for path in self._machines.iterdir()}

    def attached(self) -> set[str]:
        return set()

    def known_templates(self) -> set[str]:
        return {path.name for path in self._templates.iterdir()}

    async def make_volume(self, name: str, size_mib: int) -> None:
        path, working = self._volumes / name, self._volumes / f".{name}"
        if path.is_dir():
            return
        await self._check_room()
        await self._delete(working)
        # SAFETY: in a directory of root's alone, an id by pattern. Who is what in a volume, its machines decide.
        await programs.check(["btrfs", "subvolume", "create", str(working)], timeout_s=PROGRAM_S)
        await asyncio.to_thread(self._quotas.begin, working, Origin(working, 0), size_mib)
        working.chmod(0o777)
        working.rename(path)
        await asyncio.to_thread(subvolumes.sync, path)

    def volume(self, name: str) -> Path:
        path = self._volumes / name
        if not path.is_dir():
            raise NotFound("There is no such volume on this host.", code="volume-not-found", volume=name)
        return path

    async def delete_volume(self, name: str) -> None:
        with suppress(FileNotFoundError):
            (self._volumes / name).rename(self._volumes / f".{name}")
        await self._delete(self._volumes / f".{name}")

    def known_volumes(self) -> set[str]:
        return {path.name for path in self._volumes.iterdir() if not path.name.startswith(".")}

    async def _mount(self) -> None:
        if not self._image.exists():
            await self._make()
        before = self._image.stat().st_size
        await self._reserve(self._image, before)
        grown = self._image.stat().st_size > before
        # SAFETY: our own image on our own directory. Device nodes and set-uid bits that templates bring along mean
        # nothing on the host; inside a machine its own kernel interprets them.
        # Space that was discarded would be the host's again, for others to take.
        options = "loop,noatime,nodev,nosuid,nodiscard"
        words = ["mount", "-t", "btrfs", "-o", options, str(self._image), str(self._directory)]
        await programs.check(words, timeout_s=PROGRAM_S)
        # Machines that are starting hold a copy of every mount for a moment; what is shared is unmounted there, too.
        await programs.check(["mount", "--make-shared", str(self._directory)], timeout_s=PROGRAM_S)
        if grown:
            await programs.check(["btrfs", "filesystem", "resize", "max", str(self._directory)], timeout_s=PROGRAM_S)

    async def _make(self) -> None:
        temporary = self._image.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        temporary.touch(mode=0o600)
        await self._reserve(temporary, 0)
        # SAFETY: a regular file just made in root's own directory; an image in use has another name.
        # One copy of the metadata: the file system below is where redundancy belongs.
        await programs.check(["mkfs.btrfs", "-q", "-K", "-m", "single", str(temporary)], timeout_s=PROGRAM_S)
        temporary.rename(self._image)

    async def _reserve(self, image: Path, size: int) -> None:
        """Make an image as large as it may be, not smaller than ``size``, and take all of that space now."""
        host, file = os.statvfs(image.parent), image.stat()
        kept = min(int(host.f_blocks * host.f_frsize * KEPT_FREE), KEPT_MIB_MAX * _MIB)
        most = file.st_blocks * 512 + max(host.f_bavail * host.f_frsize - kept, 0)
        wanted = min(self._size_mib * _MIB, most // _MIB * _MIB)
        if size == 0 and wanted < SIZE_MIB_MIN * _MIB:
            raise HostFull("The host's file system has no room for the disk store.", code="disk-store-full")
        if size > most:
            log.warning("disk-store-not-reserved", missing_mib=(size - most) // _MIB)
            return
        wanted = max(size, wanted)
        # SAFETY: a regular file in root's own directory, and a number of our own.
        done = await programs.run(["fallocate", "-l", str(wanted), str(image)], timeout_s=PROGRAM_S)
        if done.status != 0:
            # A file system that cannot promise space; the store is as safe as its owner keeps room.
            log.warning("disk-store-not-reserved", reason="fallocate")
            os.truncate(image, max(wanted, file.st_size))

    async def _check_room(self, code: str = "disk-store-full") -> None:
        """A store that could not be reserved would break in the middle of writes instead of here."""
        if self._has_room():
            return
        # What was removed a moment ago is given back by the file system's own thread, and with the next commit.
        words = ["timeout", f"{CLEANED_S:g}", "btrfs", "subvolume", "sync", str(self._directory)]
        await programs.run(words, timeout_s=PROGRAM_S)
        await asyncio.to_thread(subvolumes.sync, self._directory)
        if not self._has_room():
            raise HostFull("The host's disk store is full.", code=code)

    def _has_room(self) -> bool:
        return self._is_safe() and _free_mib(self._directory) >= FREE_MIB_MIN

    def _is_safe(self) -> bool:
        """Whether what is written to the store has its place on the host."""
        image = self._image.stat() if self._image.exists() else None
        reserved = image is not None and image.st_blocks * 512 >= image.st_size
        return _free_mib(self._image.parent) >= (JOURNALS_MIB_MIN if reserved else FREE_MIB_MIN)

    async def _delete(self, path: Path) -> None:
        try:
            await asyncio.to_thread(subvolumes.delete, path)
        except OSError as error:
            raise HostError("The disk could not be removed.", code="disk-stuck") from error
        self._quotas.deleted()

    def _create(self, path: Path, origin: Origin, disk_mib: int) -> None:
        """Make a limited subvolume of `origin`. A half-made one is replaced."""
        if subvolumes.is_subvolume(path):
            subvolumes.delete(path)
        subvolumes.snapshot(origin.path, path)
        self._quotas.begin(path, origin, disk_mib)


def _save(source: Path, target: Path) -> None:
    """Keep `source` as `target`, read-only. The kernel commits both by itself."""
    subvolumes.delete(target)
    subvolumes.snapshot(source, target, read_only=True)


def full_or_stuck(error: OSError) -> HostError:
    """Say in our words why a snapshot of a disk could not be made."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return HostFull("There is no room for the snapshot.", code="snapshot-store-full")
    return HostError("The snapshot of the disk could not be made.", code="snapshot-failed", errno=error.errno)


def _free_mib(directory: Path) -> float:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize / _MIB

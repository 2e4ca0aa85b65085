"""The copy-on-write store on btrfs: a subvolume per template and per machine, with a quota group each.

Where the data directory is not on btrfs itself, the store is a file that is mounted through a loop device. Its space is
taken from the host's file system at once: were it sparse, a full host would lose what guests have written, and with the
file system's own trees every disk there is.
"""

# ruff: noqa: ASYNC240 - names in local directories are looked up in microseconds

import fcntl
import os
import re
import struct
import uuid
from contextlib import suppress
from pathlib import Path

import structlog

from space.broker.mounts import is_mounted, mount_kind, wait_released
from space.drivers import programs
from space.errors import HostError, HostFull

log = structlog.get_logger()

PROGRAM_S = 60.0
FREE_MIB_MIN = 256
JOURNALS_MIB_MIN = 16
"""Beside the store, for what is written down of its machines."""
SIZE_MIB_MIN = 512
KEPT_FREE = 0.1
"""The part of the host's file system that the store leaves to others, whatever size it is to have."""
_MIB = 1 << 20
# linux/btrfs.h: BTRFS_IOC_FS_INFO, BTRFS_IOC_INO_LOOKUP, BTRFS_FIRST_FREE_OBJECTID
_FS_INFO, _INO_LOOKUP, _FIRST_INODE = 0x8400941F, 0xD0009412, 256


class BtrfsDisks:
    """Disks as subvolumes under `directory`. See `rootfs.Disks` for what the methods promise."""

    def __init__(self, directory: Path, image: Path, size_mib: int) -> None:
        self._directory = directory
        self._image = image
        self._size_mib = size_mib
        self._templates = directory / "templates"
        self._machines = directory / "machines"

    async def open(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if mount_kind(self._directory) != "btrfs":
            await self._mount()
        # SAFETY: on the file system that the store lies on; it makes the kernel count and forbids nothing by itself.
        await programs.check(["btrfs", "quota", "enable", str(self._directory)], timeout_s=PROGRAM_S)
        for directory in (self._templates, self._machines):
            directory.mkdir(mode=0o700, exist_ok=True)
        await self._drop_stale_groups()

    async def close(self) -> None:
        if is_mounted(self._directory):
            # SAFETY: our own mount point; the loop device was made by mount and goes with it.
            await programs.check(["umount", str(self._directory)], timeout_s=PROGRAM_S)
            await wait_released(self._image)

    def template(self, hexdigest: str) -> Path:
        return self._templates / hexdigest

    async def new_template(self, name: str) -> Path:
        path = self._templates / name
        await self.delete_template(name)
        await programs.check(["btrfs", "subvolume", "create", str(path)], timeout_s=PROGRAM_S)
        return path

    async def seal_template(self, name: str, hexdigest: str) -> int:
        path = self.template(hexdigest)
        await self.delete_template(hexdigest)
        (self._templates / name).rename(path)
        await programs.check(["btrfs", "property", "set", "-ts", str(path), "ro", "true"], timeout_s=PROGRAM_S)
        return await self._referenced(path)

    async def delete_template(self, name: str) -> None:
        await self._delete(self._templates / name)

    async def create(self, machine_id: str, template: Path, template_bytes: int, disk_mib: int) -> Path:
        path = self._machines / machine_id
        self._check_room()
        await self._delete(path)
        # SAFETY: both paths are under the store, made of a digest and an id that matched their patterns.
        await programs.check(["btrfs", "subvolume", "snapshot", str(template), str(path)], timeout_s=PROGRAM_S)
        # The limit counts what the template brings along, so that comes on top of what the guest may add.
        # SAFETY: two whole numbers, checked as fields of the request and of the template's record; our own subvolume.
        limit = str(template_bytes + disk_mib * _MIB)
        await programs.check(["btrfs", "qgroup", "limit", limit, str(path)], timeout_s=PROGRAM_S)
        return path

    async def attach(self, machine_id: str) -> Path:
        self._check_room()
        path = self._machines / machine_id
        if not path.is_dir():
            raise HostError("The machine's disk is gone.", code="disk-lost")
        return path

    async def detach(self, machine_id: str) -> None:
        """A subvolume needs no taking down."""

    async def delete(self, machine_id: str) -> None:
        await self._delete(self._machines / machine_id)

    async def sync(self, machine_id: str) -> None:
        await programs.check(["sync", "-f", str(self._machines / machine_id)], timeout_s=PROGRAM_S)

    async def used_mib(self) -> dict[str, float]:
        groups = _groups_directory(self._directory)
        found: dict[str, float] = {}
        for machine_id in self.known():
            with suppress(OSError):
                group = groups / f"0_{_subvolume_id(self._machines / machine_id)}"
                found[machine_id] = int((group / "referenced").read_text()) / _MIB
        return found

    def known(self) -> set[str]:
        return {path.name for path in self._machines.iterdir()}

    def unfinished_templates(self) -> set[str]:
        return {path.name for path in self._templates.iterdir() if not re.fullmatch(r"[0-9a-f]{64}", path.name)}

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
        kept = int(host.f_blocks * host.f_frsize * KEPT_FREE)
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

    def _check_room(self) -> None:
        """A store that could not be reserved would break in the middle of writes instead of here."""
        image = self._image.stat() if self._image.exists() else None
        reserved = image is not None and image.st_blocks * 512 >= image.st_size
        for directory, mib in (
            (self._directory, FREE_MIB_MIN),
            (self._image.parent, JOURNALS_MIB_MIN if reserved else FREE_MIB_MIN),
        ):
            found = os.statvfs(directory)
            if found.f_bavail * found.f_frsize < mib * _MIB:
                raise HostFull("The host's disk store is full.", code="disk-store-full")

    async def _delete(self, path: Path) -> None:
        if not path.exists():
            return
        # SAFETY: the path is under the store and made of a validated name.
        await programs.run(["btrfs", "subvolume", "delete", str(path)], timeout_s=PROGRAM_S)
        if path.exists():
            raise HostError("The disk could not be removed.", code="disk-stuck")

    async def _referenced(self, path: Path) -> int:
        """Return the bytes that the subvolume at `path` refers to, shared or not."""
        words = ["btrfs", "qgroup", "show", "--sync", "-f", "--raw", str(path)]
        rows = _rows(await programs.check(words, timeout_s=PROGRAM_S))
        if len(rows) != 1:
            raise HostError("The disk store does not account for its subvolumes.", code="disk-store-damaged")
        return int(rows[0][1])

    async def _groups(self) -> list[list[str]]:
        return _rows(
            await programs.check(["btrfs", "qgroup", "show", "--raw", str(self._directory)], timeout_s=PROGRAM_S)
        )

    async def _drop_stale_groups(self) -> None:
        """Kernels before 6.12 keep the quota group of a deleted subvolume."""
        output = await programs.check(["btrfs", "subvolume", "list", str(self._directory)], timeout_s=PROGRAM_S)
        living = {f"0/{line.split()[1]}" for line in output.decode().splitlines()} | {"0/5"}
        for row in await self._groups():
            if row[0] not in living:
                # SAFETY: a group that the kernel itself has listed and whose subvolume it does not.
                await programs.run(["btrfs", "qgroup", "destroy", row[0], str(self._directory)], timeout_s=PROGRAM_S)


def _rows(output: bytes) -> list[list[str]]:
    """Parse ``qgroup show``: group, referenced, exclusive, path."""
    return [line.split() for line in output.decode().splitlines() if line.startswith("0/")]


def _groups_directory(path: Path) -> Path:
    """Return where the kernel shows the quota groups of the file system that `path` lies on."""
    buffer = bytearray(1024)
    _ask(path, _FS_INFO, buffer)
    return Path("/sys/fs/btrfs", str(uuid.UUID(bytes=bytes(buffer[16:32]))), "qgroups")


def _subvolume_id(path: Path) -> int:
    buffer = bytearray(4096)
    struct.pack_into("=QQ", buffer, 0, 0, _FIRST_INODE)
    _ask(path, _INO_LOOKUP, buffer)
    return struct.unpack_from("=Q", buffer)[0]


def _ask(path: Path, request: int, buffer: bytearray) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, request, buffer)
    finally:
        os.close(descriptor)

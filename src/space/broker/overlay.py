"""The store where btrfs cannot be had: a template is a directory, a machine's disk an overlay on it.

The upper layer of each machine is a sparse ext4 image of exactly its size on a loop device, so the limit holds here,
too.
"""

import shutil
from pathlib import Path

from space.broker.mounts import is_mounted, wait_released
from space.broker.quotas import Origin
from space.drivers import programs
from space.errors import Conflict, HostError, HostFull, InvalidRequest, NotFound

PROGRAM_S = 60.0
COPY_S = 600.0
SYNC_S = 300.0
_MIB = 1 << 20
# What ext4 keeps for itself on a small image; measured, rounded up.
_OVERHEAD_MIB = 16


class OverlayDisks:
    """Disks as overlay mounts under `directory`. See `rootfs.Disks` for what the methods promise."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._templates = directory / "templates"
        self._machines = directory / "machines"
        self._snapshots = directory / "snapshots"

    async def open(self) -> None:
        for directory in (self._directory, self._templates, self._machines, self._snapshots):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def sweep(self) -> None:
        """Each disk is a file system of its own size, and leaves nothing behind."""

    async def close(self) -> None:
        for machine_id in self.known():
            await self.detach(machine_id)

    def template(self, hexdigest: str) -> Path:
        return self._templates / hexdigest

    async def new_template(self, name: str, of: str | None = None) -> Path:
        await self.delete_template(name)
        (path := self._templates / name).mkdir(mode=0o755)
        if of is not None:
            # SAFETY: the machine does not run, and the copy follows no link; it lies in a directory of root's alone.
            words = ["cp", "-a", "--one-file-system", "--", f"{await self.attach(of)}/.", str(path)]
            try:
                finished = await programs.run(words, timeout_s=COPY_S)
            finally:
                await self.detach(of)
            if finished.status:
                raise HostFull("There is no room for the template.", code="disk-store-full")
        return path

    async def seal_template(self, name: str, hexdigest: str, size: int) -> int:
        path = self.template(hexdigest)
        await self.delete_template(hexdigest)
        (self._templates / name).rename(path)
        await programs.check(["sync", "-f", str(path)], timeout_s=SYNC_S)
        return size

    async def delete_template(self, name: str) -> None:
        if (path := self._templates / name).is_dir():
            # SAFETY: a name of our own in a directory of root's alone; `rm` follows no link, however deep the tree is.
            await programs.check(["rm", "-rf", "--one-file-system", "--", str(path)], timeout_s=COPY_S)

    async def create(self, machine_id: str, origin: Origin, disk_mib: int) -> Path:
        await self.delete(machine_id)
        directory = self._machines / machine_id
        for name in ("layer", "root"):
            (directory / name).mkdir(mode=0o755, parents=True)
        image, size = directory / "layer.ext4", (disk_mib + _OVERHEAD_MIB) * _MIB
        if origin.path.parent == self._templates:
            (directory / "template").write_text(origin.path.name)
            _resize(image, size)
            # SAFETY: a regular file just made in root's own directory; nothing that was there is formatted.
            words = ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1", str(image)]
            await programs.check(words, timeout_s=PROGRAM_S)
            return await self.attach(machine_id)
        if (origin.path / "layer.ext4").stat().st_size > size:
            raise InvalidRequest(
                "On this host a disk may not be smaller than that which the snapshot was made of.",
                field="resources.disk_mib",
                min=(origin.path / "layer.ext4").stat().st_size // _MIB - _OVERHEAD_MIB,
            )
        shutil.copyfile(origin.path / "template", directory / "template")
        await self._copy(origin.path / "layer.ext4", image)
        if (origin.path / "layer.ext4").stat().st_size < size:
            await self._grow(image, size)
        return await self.attach(machine_id)

    async def limit(self, machine_id: str, template_bytes: int, disk_mib: int) -> None:  # noqa: ARG002
        present = (self._machines / machine_id / "layer.ext4").stat().st_size // _MIB - _OVERHEAD_MIB
        if present != disk_mib:
            raise InvalidRequest(
                "On this host a disk in use keeps its size.", field="resources.disk_mib", min=present, max=present
            )

    async def attach(self, machine_id: str) -> Path:
        directory = self._machines / machine_id
        layer, root = directory / "layer", directory / "root"
        if not (directory / "template").is_file():
            raise HostError("The machine's disk is gone.", code="disk-lost")
        # SAFETY: all paths are under the store and made of validated names; device nodes and set-uid bits in there mean
        # nothing on the host.
        if not is_mounted(layer):
            options = "loop,noatime,nodev,nosuid"
            await self._mount("ext4", options, directory / "layer.ext4", layer)
            for name in ("upper", "work"):
                (layer / name).mkdir(exist_ok=True)
        if not is_mounted(root):
            lower = self._templates / (directory / "template").read_text()
            options = f"lowerdir={lower},upperdir={layer / 'upper'},workdir={layer / 'work'},noatime,nodev,nosuid"
            await self._mount("overlay", options, Path("overlay"), root)
        return root

    async def detach(self, machine_id: str) -> None:
        for name in ("root", "layer"):
            if is_mounted(path := self._machines / machine_id / name):
                # SAFETY: a mount point of our own; refused by the kernel while anything still uses it.
                await programs.check(["umount", str(path)], timeout_s=PROGRAM_S)
        await wait_released(self._machines / machine_id / "layer.ext4")

    async def delete(self, machine_id: str) -> None:
        await self.detach(machine_id)
        if (directory := self._machines / machine_id).is_dir():
            shutil.rmtree(directory)

    async def sync(self, machine_id: str) -> None:
        directory = self._machines / machine_id
        for place in (directory / "layer", directory / "layer.ext4"):
            await programs.check(["sync", "-f", str(place)], timeout_s=PROGRAM_S)

    async def save(self, machine_id: str, name: str, template_bytes: int, disk_mib: int) -> int:  # noqa: ARG002
        await self.drop(name)
        source, target = self._machines / machine_id, self._snapshots / name
        target.mkdir(mode=0o700)
        if is_mounted(layer := source / "layer"):
            # What the file system has in memory goes into the image; nobody writes, so the image is whole then.
            await programs.check(["sync", "-f", str(layer)], timeout_s=PROGRAM_S)
        await self._copy(source / "layer.ext4", target / "layer.ext4")
        shutil.copyfile(source / "template", target / "template")
        await programs.check(["sync", "-f", str(target)], timeout_s=PROGRAM_S)
        return (target / "layer.ext4").stat().st_blocks * 512

    def saved(self, name: str) -> Path:
        return self._snapshots / name

    async def drop(self, name: str) -> None:
        if (path := self._snapshots / name).is_dir():
            shutil.rmtree(path)

    def known_saved(self) -> set[str]:
        return {path.name for path in self._snapshots.iterdir()}

    def used(self, machine_id: str, template_bytes: int, disk_mib: int) -> int:  # noqa: ARG002
        try:
            return (self._machines / machine_id / "layer.ext4").stat().st_blocks * 512
        except FileNotFoundError as error:
            raise HostError("The machine's disk is gone.", code="disk-lost") from error

    def known(self) -> set[str]:
        return {path.name for path in self._machines.iterdir()}

    def attached(self) -> set[str]:
        return {name for name in self.known() if is_mounted(self._machines / name / "layer")}

    def known_templates(self) -> set[str]:
        return {path.name for path in self._templates.iterdir()}

    async def make_volume(self, name: str, size_mib: int) -> None:  # noqa: ARG002
        raise Conflict(
            "Volumes need a disk store on btrfs, which this host's kernel has not: `space doctor` says more.",
            code="not-supported",
        )

    def volume(self, name: str) -> Path:
        raise NotFound("There is no such volume on this host.", code="volume-not-found", volume=name)

    async def delete_volume(self, name: str) -> None:
        """There is none."""

    def known_volumes(self) -> set[str]:
        return set()

    async def _copy(self, source: Path, target: Path) -> None:
        """Copy an image: its blocks are shared where the host's file system can, its holes stay holes anyway."""
        # SAFETY: two paths under the store, in directories of root's alone.
        words = ["cp", "--reflink=auto", "--sparse=always", str(source), str(target)]
        finished = await programs.run(words, timeout_s=COPY_S)
        if finished.status:
            raise HostFull("There is no room for the snapshot.", code="snapshot-store-full")

    async def _grow(self, image: Path, size: int) -> None:
        """Give a disk not in use more room."""
        _resize(image, size)
        # SAFETY: both on our own image. Its structure was written by the host's kernel alone, not by a guest.
        await programs.run(["e2fsck", "-f", "-p", str(image)], timeout_s=PROGRAM_S)
        await programs.check(["resize2fs", str(image)], timeout_s=PROGRAM_S)

    async def _mount(self, kind: str, options: str, source: Path, target: Path) -> None:
        # SAFETY: callers pass fixed kinds and paths below the store, whose directories are root's alone, so no part of
        # them is a link made by others; every mount is without device nodes and set-uid programs.
        finished = await programs.run(
            ["mount", "-t", kind, "-o", options, str(source), str(target)], timeout_s=PROGRAM_S
        )
        if finished.status:
            raise HostFull("The machine's disk could not be mounted.", code="disk-mount-failed")
        # Machines that are starting hold a copy of every mount for a moment; what is shared is unmounted there, too.
        await programs.check(["mount", "--make-shared", str(target)], timeout_s=PROGRAM_S)


def _resize(image: Path, size: int) -> None:
    with image.open("ab") as file:
        file.truncate(size)

"""Disks of machines that have a kernel of their own: one image of each template, and a layer for each machine.

They lie in the store that holds templates as trees, so copies share their blocks where that can. A layer is an ext4
that the guest's kernel mounts and writes, so no kernel of the host's ever mounts it, and what reads it runs without
rights. It has its size from the beginning: that is the limit. On btrfs it is written in place: copied on every write,
one block that is left of an old extent would keep all of that, and a guest could fill the store with a small disk. See
`rootfs.MachineDisks` for what the methods promise.
"""

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

from space.broker.files import sync
from space.broker.quotas import Origin
from space.drivers import programs
from space.drivers.vm import images
from space.errors import HostError, HostFull, InvalidRequest

COPY_S = 600.0
ATTRIBUTE_S = 30.0
FREE_MIB_MIN = 256
_MIB = 1 << 20
_LAYER, _IMAGE = ".ext4", ".erofs"


class BlockDisks:
    """Disks as files under `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._templates = directory / "templates"
        self._machines = directory / "machines"
        self._snapshots = directory / "snapshots"
        self._making: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        for directory in (self._directory, self._templates, self._machines, self._snapshots):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What is made there is written in place, and shares its blocks with copies made there. Only btrfs knows that.
        await programs.run(["chattr", "+C", str(self._machines), str(self._snapshots)], timeout_s=ATTRIBUTE_S)
        for unfinished in self._templates.glob(".*"):
            await asyncio.to_thread(shutil.rmtree, unfinished)

    async def close(self) -> None:
        """End what is being made. Nothing is mounted."""
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    async def template(self, tree: Path) -> Path:
        """Return the image of a template, which is made when it is first asked for. Large ones take minutes: whoever
        gives up waiting finds it made when asking again. Raise `HostError` when the template is deleted meanwhile.
        """
        image = self._templates / f"{tree.name}{_IMAGE}"
        if image.exists():
            return image
        task = self._making.get(tree.name)
        if task is None:
            task = self._making[tree.name] = asyncio.create_task(self._make(tree, image))
            task.add_done_callback(lambda _: self._making.pop(tree.name))
        await asyncio.wait([task])
        if task.cancelled():
            raise HostError("The template is gone, or the broker ends.", code="image-not-made")
        task.result()
        return image

    async def delete_template(self, hexdigest: str) -> None:
        if task := self._making.get(hexdigest):
            task.cancel()
            await asyncio.wait([task])
        (self._templates / f"{hexdigest}{_IMAGE}").unlink(missing_ok=True)

    def known_templates(self) -> set[str]:
        return {path.stem for path in self._templates.glob(f"*{_IMAGE}") if not path.name.startswith(".")}

    async def create(self, machine_id: str, origin: Origin, disk_mib: int) -> Path:
        """Make a layer: empty, or the copy of one that was saved."""
        layer = self._layer(machine_id)
        layer.unlink(missing_ok=True)
        self._check_room("disk-store-full")
        if origin.path.parent != self._snapshots:
            await images.make_layer(layer, disk_mib)
            return layer
        if not origin.path.is_file():
            raise HostError("The snapshot's disk is gone.", code="disk-lost")
        present = images.layer_mib(origin.path)
        if disk_mib < present:
            raise InvalidRequest(
                "A virtual machine's disk may not be smaller than that which the snapshot was made of.",
                field="resources.disk_mib",
                min=present,
            )
        if origin.in_use:
            _check_size(present, disk_mib)
        await _copy(origin.path, layer, "disk-store-full")
        if disk_mib > present:
            await images.grow_layer(layer, disk_mib)
        return layer

    async def limit(self, machine_id: str, template_bytes: int, disk_mib: int) -> None:  # noqa: ARG002
        _check_size(images.layer_mib(await self.attach(machine_id)), disk_mib)

    async def attach(self, machine_id: str) -> Path:
        layer = self._layer(machine_id)
        if not layer.is_file():
            raise HostError("The machine's disk is gone.", code="disk-lost")
        return layer

    async def detach(self, machine_id: str) -> None:
        """A file needs no taking down."""

    async def delete(self, machine_id: str) -> None:
        self._layer(machine_id).unlink(missing_ok=True)

    async def sync(self, machine_id: str) -> None:
        with suppress(FileNotFoundError):
            await asyncio.to_thread(sync, self._layer(machine_id))

    async def save(self, machine_id: str, name: str, template_bytes: int, disk_mib: int) -> int:
        self._check_room("snapshot-store-full")
        saved = self.saved(name)
        saved.unlink(missing_ok=True)
        await _copy(await self.attach(machine_id), saved, "snapshot-store-full")
        await asyncio.to_thread(sync, saved)
        await asyncio.to_thread(sync, self._snapshots)
        return self.used(machine_id, template_bytes, disk_mib)

    def saved(self, name: str) -> Path:
        return self._snapshots / f"{name}{_LAYER}"

    async def drop(self, name: str) -> None:
        self.saved(name).unlink(missing_ok=True)

    def known_saved(self) -> set[str]:
        return _stems(self._snapshots)

    def used(self, machine_id: str, template_bytes: int, disk_mib: int) -> int:  # noqa: ARG002
        """Return what the host gives up for it; tables beyond its size do not count."""
        try:
            blocks = self._layer(machine_id).stat().st_blocks
        except FileNotFoundError as error:
            raise HostError("The machine's disk is gone.", code="disk-lost") from error
        return min(blocks * 512, disk_mib * _MIB)

    def known(self) -> set[str]:
        return _stems(self._machines)

    def attached(self) -> set[str]:
        return set()

    def _layer(self, machine_id: str) -> Path:
        return self._machines / f"{machine_id}{_LAYER}"

    async def _make(self, tree: Path, image: Path) -> None:
        async with self._turn:  # what one needs is not promised to another
            self._check_room("disk-store-full", await images.measure_tree(tree))
            await images.write_tree(tree, image)

    def _check_room(self, code: str, needed_bytes: int = 0) -> None:
        found = os.statvfs(self._directory)
        if found.f_bavail * found.f_frsize < FREE_MIB_MIN * _MIB + needed_bytes:
            raise HostFull("The host's disk store is full.", code=code)


async def _copy(source: Path, target: Path, code: str) -> None:
    """Copy a layer: its blocks are shared where the store can, its holes stay holes anyway. `code` is that of the
    `HostFull` when there is no room.
    """
    # SAFETY: two paths below the store, in directories of root's alone; the content is not looked at.
    words = ["cp", "--reflink=auto", "--sparse=always", "--", str(source), str(target)]
    finished = await programs.run(words, timeout_s=COPY_S)
    if finished.status:
        target.unlink(missing_ok=True)  # noqa: ASYNC240 a local file
        if images.NO_SPACE in finished.complaint:
            raise HostFull("There is no room for the disk's copy.", code=code)
        raise HostError("The disk could not be copied: the host's disk store may be damaged.")


def _check_size(present: int, disk_mib: int) -> None:
    if present != disk_mib:
        raise InvalidRequest(
            "A virtual machine's disk in use keeps its size.", field="resources.disk_mib", min=present, max=present
        )


def _stems(directory: Path) -> set[str]:
    return {path.name.removesuffix(_LAYER) for path in directory.glob(f"*{_LAYER}")}

"""The store where btrfs cannot be had: a template is a directory, a machine's disk an overlay on it.

The upper layer of each machine is a sparse ext4 image of exactly its size on a loop device, so the limit holds here,
too.
"""

import shutil
from pathlib import Path

from space.broker.mounts import is_mounted, wait_released
from space.drivers import programs
from space.errors import HostError, HostFull

PROGRAM_S = 60.0
_MIB = 1 << 20
# What ext4 keeps for itself on a small image; measured, rounded up.
_OVERHEAD_MIB = 16


class OverlayDisks:
    """Disks as overlay mounts under `directory`. See `rootfs.Disks` for what the methods promise."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._templates = directory / "templates"
        self._machines = directory / "machines"

    async def open(self) -> None:
        for directory in (self._directory, self._templates, self._machines):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def close(self) -> None:
        for machine_id in self.known():
            await self.detach(machine_id)

    def template(self, hexdigest: str) -> Path:
        return self._templates / hexdigest

    async def new_template(self, name: str) -> Path:
        await self.delete_template(name)
        (path := self._templates / name).mkdir(mode=0o755)
        return path

    async def seal_template(self, name: str, hexdigest: str) -> int:
        path = self.template(hexdigest)
        await self.delete_template(hexdigest)
        (self._templates / name).rename(path)
        output = await programs.check(["du", "-s", "--block-size=1", str(path)], timeout_s=PROGRAM_S)
        return int(output.split()[0])

    async def delete_template(self, name: str) -> None:
        if (path := self._templates / name).is_dir():
            shutil.rmtree(path)

    async def create(self, machine_id: str, template: Path, template_bytes: int, disk_mib: int) -> Path:  # noqa: ARG002
        await self.delete(machine_id)
        directory = self._machines / machine_id
        for name in ("layer", "root"):
            (directory / name).mkdir(mode=0o755, parents=True)
        (directory / "template").write_text(template.name)
        with (image := directory / "layer.ext4").open("wb") as file:
            file.truncate((disk_mib + _OVERHEAD_MIB) * _MIB)
        # SAFETY: a regular file just made in root's own directory; nothing that was there is formatted.
        words = ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1", str(image)]
        await programs.check(words, timeout_s=PROGRAM_S)
        return await self.attach(machine_id)

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

    async def used_mib(self) -> dict[str, float]:
        images = {machine_id: self._machines / machine_id / "layer.ext4" for machine_id in self.known()}
        return {
            machine_id: image.stat().st_blocks * 512 / _MIB for machine_id, image in images.items() if image.exists()
        }

    def known(self) -> set[str]:
        return {path.name for path in self._machines.iterdir()}

    def unfinished_templates(self) -> set[str]:
        return {path.name for path in self._templates.iterdir() if path.name.startswith(".")}

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

"""Images of the guest runtime, which machines with a kernel of their own have as a disk at ``/.space``."""

import asyncio
from pathlib import Path

from space.drivers.vm import images
from space.errors import HostError


class Runtimes:
    """Each is made at its first use, in `images_dir`, and stays: an image of memory may need it."""

    def __init__(self, guest_dir: Path, images_dir: Path) -> None:
        self._guest_dir = guest_dir
        self._images = images_dir
        self._building = asyncio.Lock()

    async def current(self) -> Path:
        """Return that of the runtime that is installed now."""
        guest = self._guest_dir.resolve()
        image = self._images / f"space-{guest.name}.erofs"
        async with self._building:
            self._images.mkdir(mode=0o700, parents=True, exist_ok=True)
            await images.write_tree(guest, image)
        return image

    def named(self, name: str) -> Path:
        """Return one by the name that an image of memory has of it."""
        image = self._images / name
        if not image.is_file():
            raise HostError("The guest runtime that the memory image needs is gone.", code="image-version")
        return image

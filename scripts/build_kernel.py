"""Build a virtual machine's kernel and its initramfs from unpacked Debian packages; used by `guest-kernel`.

build_kernel.py kernel VMLINUZ OUT           take the uncompressed kernel out of a bzImage
build_kernel.py initramfs FILES INIT OUT     pack modules of FILES, its static busybox and the program INIT
"""

import os
import re
import stat
import struct
import subprocess
import sys
from pathlib import Path

# What a machine's devices and file systems need, beside what is built in. Each is loaded after those it depends on.
MODULES = [
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_console",
    "virtio_balloon",
    "virtio-rng",
    "vmw_vsock_virtio_transport",
    "erofs",
    "overlay",
]
APPLETS = ["cat", "env", "insmod", "ip", "ln", "mkdir", "mount", "rm", "sh", "switch_root", "usleep"]
DIRECTORIES = ["bin", "dev", "layer", "modules", "proc", "root", "sys", "template"]
_BOOT_SECTOR_SETUP = 0x1F1  # Linux: Documentation/x86/boot.rst
_BOOT_MAGIC = 0x202
_BOOT_PAYLOAD = 0x248
_LZ4_LEGACY = b"\x02\x21\x4c\x18"
_ELF = b"\x7fELF"


def write_kernel(vmlinuz: Path, out: Path) -> None:
    image = vmlinuz.read_bytes()
    if image[_BOOT_MAGIC : _BOOT_MAGIC + 4] != b"HdrS":
        sys.exit(f"{vmlinuz} is no kernel for x86.")
    offset, length = struct.unpack_from("<II", image, _BOOT_PAYLOAD)
    begin = (image[_BOOT_SECTOR_SETUP] + 1) * 512 + offset
    payload, size = image[begin : begin + length - 4], struct.unpack_from("<I", image, begin + length - 4)[0]
    if not payload.startswith(_LZ4_LEGACY):
        sys.exit(f"{vmlinuz} is not compressed by LZ4, the only method known here.")
    kernel = subprocess.run(["lz4", "-dc"], input=payload, stdout=subprocess.PIPE, check=True).stdout
    if len(kernel) != size or not kernel.startswith(_ELF):
        sys.exit(f"{vmlinuz} holds no whole kernel.")
    out.write_bytes(kernel)


def write_initramfs(files: Path, init: Path, out: Path) -> None:
    archive = Archive()
    for name in DIRECTORIES:
        archive.add(name, stat.S_IFDIR | 0o755)
    # Before /dev is mounted the kernel opens this for the first program's standard streams.
    archive.add("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    archive.add("bin/busybox", stat.S_IFREG | 0o755, (files / "bin/busybox").read_bytes())
    for name in APPLETS:
        archive.add(f"bin/{name}", stat.S_IFLNK | 0o777, b"busybox")
    modules = in_order(files)
    for path in modules:
        archive.add(f"modules/{path.name}", stat.S_IFREG | 0o644, path.read_bytes())
    order = "".join(f"{path.name}\n" for path in modules)
    archive.add("modules/order", stat.S_IFREG | 0o644, order.encode())
    archive.add("init", stat.S_IFREG | 0o755, init.read_bytes())
    out.write_bytes(archive.finished())


def in_order(files: Path) -> list[Path]:
    """Every module that is wanted or needed by one, after those it needs."""
    found = {plain(path.stem): path for path in sorted((files / "lib/modules").glob("*/kernel/**/*.ko"))}
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in ordered or name not in found:  # what is not there as a file is built in
            return
        needs = re.search(rb"\0depends=([^\0]*)\0", found[name].read_bytes())
        for need in needs[1].decode().split(",") if needs else []:
            add(plain(need))
        ordered[name] = found[name]

    for name in MODULES:
        if plain(name) not in found:
            sys.exit(f"This kernel has no module {name}.")
        add(plain(name))
    return list(ordered.values())


def plain(name: str) -> str:
    return name.replace("-", "_")


class Archive:
    """A cpio archive as the kernel reads it ("newc", Documentation/driver-api/early-userspace/buffer-format.rst). The
    same entries give the same bytes.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._count = 0

    def add(self, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        self._count += 1
        encoded = os.fsencode(name) + b"\0"
        fields = [self._count, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(encoded), 0]
        self._bytes += b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        self._pad()
        self._bytes += data
        self._pad()

    def finished(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return bytes(self._bytes)

    def _pad(self) -> None:
        self._bytes += bytes(-len(self._bytes) % 4)


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    {"kernel": write_kernel, "initramfs": write_initramfs}[what](*map(Path, paths))

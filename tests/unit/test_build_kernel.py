"""scripts/build_kernel.py: the kernel out of a bzImage, and an initramfs with modules in the order of their needs."""

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/build_kernel.py"
WANTED = "virtio_mmio virtio_blk virtio_net virtio_console virtio_balloon vmw_vsock_virtio_transport erofs overlay"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", SCRIPT, *words], capture_output=True, text=True, timeout=60, check=False
    )


def bzimage(kernel: bytes) -> bytes:
    payload = subprocess.run(["lz4", "-lc"], input=kernel, stdout=subprocess.PIPE, check=True).stdout
    payload += struct.pack("<I", len(kernel))
    image = bytearray(1024)
    image[0x1F1] = 1  # one sector of setup, after the boot sector
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 64, len(payload))
    return bytes(image) + bytes(64) + payload


@pytest.mark.skipif(shutil.which("lz4") is None, reason="needs lz4: run scripts/packages vm")
def test_a_kernel_comes_out_whole_or_not_at_all(tmp_path: Path) -> None:
    kernel = b"\x7fELF" + bytes(range(256)) * 100
    image, out = tmp_path / "vmlinuz", tmp_path / "vmlinux"
    image.write_bytes(bzimage(kernel))
    assert run("kernel", image, out).returncode == 0
    assert out.read_bytes() == kernel
    out.unlink()
    for damaged in (bytes(2048), bzimage(b"no kernel" * 100)):
        image.write_bytes(damaged)
        assert run("kernel", image, out).returncode != 0
        assert not out.exists()


def module(files: Path, name: str, *needs: str) -> None:
    path = files / "lib/modules/6.1/kernel/some/where" / f"{name}.ko"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"ELF\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0name=x\0")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    files = tmp_path / "files"
    (files / "bin").mkdir(parents=True)
    (files / "bin/busybox").write_bytes(b"busybox")
    for name in WANTED.split():
        module(files, name, "virtio")
    module(files, "virtio", "virtio_ring")
    module(files, "virtio_ring")
    module(files, "virtio-rng", "virtio", "not-a-file-as-it-is-built-in")
    module(files, "unwanted")
    return files


def entries(archive: bytes) -> dict[str, tuple[int, bytes]]:
    """Mode and contents by name, read as the kernel reads it."""
    found, place = {}, 0
    while True:
        assert archive[place : place + 6] == b"070701"
        fields = [int(archive[place + 6 + 8 * n : place + 14 + 8 * n], 16) for n in range(13)]
        name = archive[place + 110 : place + 110 + fields[11] - 1].decode()
        place += 110 + fields[11]
        place += -place % 4
        if name == "TRAILER!!!":
            return found
        found[name] = (fields[1], archive[place : place + fields[6]])
        place += fields[6]
        place += -place % 4


def test_every_module_comes_after_those_it_needs_and_no_other_is_there(files: Path, tmp_path: Path) -> None:
    (tmp_path / "init").write_text("#!/bin/sh\n")
    assert run("initramfs", files, tmp_path / "init", tmp_path / "initrd").returncode == 0
    found = entries((tmp_path / "initrd").read_bytes())
    order = found["modules/order"][1].decode().splitlines()
    assert order[:2] == ["virtio_ring.ko", "virtio.ko"]
    assert sorted(order) == sorted(
        ["virtio.ko", "virtio_ring.ko", "virtio-rng.ko", *(f"{n}.ko" for n in WANTED.split())]
    )
    assert all(f"modules/{name}" in found for name in order)
    assert "modules/unwanted.ko" not in found
    assert found["init"] == (0o100755, b"#!/bin/sh\n")
    assert found["bin/sh"] == (0o120777, b"busybox")


def test_the_same_packages_give_the_same_initramfs(files: Path, tmp_path: Path) -> None:
    (tmp_path / "init").write_text("#!/bin/sh\n")
    for name in ("one", "two"):
        assert run("initramfs", files, tmp_path / "init", tmp_path / name).returncode == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_kernel_that_lacks_a_module_is_told_of(files: Path, tmp_path: Path) -> None:
    (files / "lib/modules/6.1/kernel/some/where/erofs.ko").unlink()
    (tmp_path / "init").touch()
    done = run("initramfs", files, tmp_path / "init", tmp_path / "initrd")
    assert done.returncode != 0
    assert "no module erofs" in done.stderr

"""A full host takes nothing from guests that was written, and guests take nothing from the host that was not set aside."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from space.broker.btrfs import KEPT_FREE, SIZE_MIB_MIN, BtrfsDisks
from space.broker.quotas import Origin
from space.errors import HostFull
from space.model.ids import new_id
from tests import installation

MIB = 1 << 20
HOST_MIB = 900
WRITTEN_MIB = 200


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    """A small file system as the one of the data directory."""
    if reason := installation.unfit():
        pytest.skip(reason)
    if "btrfs" not in Path("/proc/filesystems").read_text().split():
        pytest.skip("this kernel has no btrfs")
    image, directory = tmp_path / "host.img", tmp_path / "host"
    directory.mkdir()
    with image.open("wb") as file:
        file.truncate(HOST_MIB * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, directory], check=True)
    yield directory
    subprocess.run(["umount", directory], check=True)


@pytest.fixture
async def disks(host: Path) -> AsyncIterator[BtrfsDisks]:
    one = store(host)
    yield one
    await one.close()


def store(host: Path, size_mib: int = 4 * HOST_MIB) -> BtrfsDisks:
    return BtrfsDisks(host / "disks", host / "disks.btrfs", size_mib)


def free_mib(directory: Path) -> float:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize / MIB


def fill(directory: Path) -> None:
    with suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(MIB)):
            pass


async def test_what_is_written_to_the_store_is_kept_on_a_full_host(host: Path, disks: BtrfsDisks) -> None:
    await disks.open()
    assert free_mib(host) > HOST_MIB * KEPT_FREE / 2
    fill(host)
    assert free_mib(host) < 1
    pieces = [os.urandom(MIB) for _ in range(WRITTEN_MIB)]
    path = host / "disks/machines/written"
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            assert file.write(piece) == MIB
        os.fsync(file.fileno())
    await disks.close()
    await disks.open()
    with path.open("rb") as file:
        assert all(file.read(MIB) == piece for piece in pieces)


async def test_disks_are_made_in_what_is_set_aside_however_little_the_host_has_besides(
    host: Path, disks: BtrfsDisks
) -> None:
    await disks.open()
    await disks.new_template(".import-1")
    size = await disks.seal_template(".import-1", "ab" * 32, 0)
    machine = new_id("sbx")
    assert free_mib(host) < 256
    await disks.create(machine, Origin(disks.template("ab" * 32), size), 64)
    await disks.attach(machine)
    fill(host)
    with pytest.raises(HostFull):
        await disks.attach(machine)
    await disks.delete(machine)
    assert disks.known() == set()


async def test_what_a_guest_deletes_stays_set_aside(host: Path, disks: BtrfsDisks) -> None:
    await disks.open()
    before = (host / "disks.btrfs").stat().st_blocks
    path = host / "disks/machines/written"
    with path.open("wb") as file:
        file.write(os.urandom(WRITTEN_MIB * MIB))
        os.fsync(file.fileno())
    path.unlink()
    await disks.close()
    assert (host / "disks.btrfs").stat().st_blocks >= before


async def test_a_store_grows_into_the_room_that_there_is(host: Path) -> None:
    small = store(host, SIZE_MIB_MIN)
    await small.open()
    (host / "disks/machines/kept").write_text("kept")
    await small.close()
    large = store(host)
    await large.open()
    try:
        assert (host / "disks/machines/kept").read_text() == "kept"
        found = os.statvfs(host / "disks")
        assert found.f_blocks * found.f_frsize > (SIZE_MIB_MIN + 100) * MIB
        assert free_mib(host) > HOST_MIB * KEPT_FREE / 2
    finally:
        await large.close()


async def test_a_host_without_room_gets_no_store(host: Path, disks: BtrfsDisks) -> None:
    fill(host)
    with pytest.raises(HostFull):
        await disks.open()

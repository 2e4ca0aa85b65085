"""Disks of machines with kernels of their own: what `space.broker.rootfs.MachineDisks` promises, kept by files."""

# ruff: noqa: ASYNC221 - a test has nothing else to do while a program runs

import asyncio
import errno
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from space.broker.blocks import BlockDisks
from space.broker.quotas import Origin
from space.drivers.vm import images
from space.errors import HostError, HostFull, InvalidRequest
from space.model.ids import new_id
from tests import installation

HEX = "ab" * 32
SNAPSHOT = "snpabcdefgh234567ab"
MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    bool(installation.unfit()) or not all(shutil.which(name) for name in ("bwrap", "mkfs.erofs", "mke2fs")),
    reason="needs root and scripts/packages vm",
)


@pytest.fixture
async def disks(tmp_path: Path) -> AsyncIterator[BlockDisks]:
    one = BlockDisks(tmp_path / "blocks")
    await one.open()
    yield one
    await one.close()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "templates" / HEX
    (root / "etc").mkdir(parents=True)
    (root / "etc/name").write_text("template")
    return root


def written(layer: Path, name: str, content: bytes) -> None:
    """What a guest would have written, without a guest: into the layer's file system, through a mount of the test's
    own.
    """
    place = layer.with_suffix(".mount")
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", layer, place], check=True)
    try:
        (place / name).write_bytes(content)
    finally:
        subprocess.run(["umount", place], check=True)
        place.rmdir()


def read(layer: Path, name: str) -> bytes:
    return subprocess.run(["debugfs", "-R", f"cat /{name}", layer], capture_output=True, check=True).stdout


async def test_a_template_has_one_image_which_is_made_once(disks: BlockDisks, tree: Path) -> None:
    first, second = await asyncio.gather(disks.template(tree), disks.template(tree))
    assert first == second
    made = first.stat()
    assert await disks.template(tree) == first
    assert first.stat().st_ino == made.st_ino
    assert first.read_bytes()[1024:1028] == bytes.fromhex("e2e1f5e0")  # erofs, by its magic number
    assert disks.known_templates() == {HEX}
    await disks.delete_template(HEX)
    await disks.delete_template(HEX)
    assert disks.known_templates() == set()


async def test_whoever_gives_up_waiting_for_an_image_does_not_end_its_making(disks: BlockDisks, tree: Path) -> None:
    waiting = asyncio.create_task(disks.template(tree))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(20):
        while disks.known_templates() != {HEX}:  # noqa: ASYNC110 - nobody asks again, and nobody tells
            await asyncio.sleep(0.01)


async def test_whoever_waits_for_an_image_of_a_template_that_is_deleted_is_told(disks: BlockDisks, tree: Path) -> None:
    waiting = [asyncio.create_task(disks.template(tree)) for _ in range(2)]
    await asyncio.sleep(0)
    await disks.delete_template(HEX)
    for one in waiting:
        with pytest.raises(HostError) as caught:
            await asyncio.wait_for(one, 20)
        assert caught.value.code == "image-not-made"
    assert disks.known_templates() == set()
    assert (await asyncio.wait_for(disks.template(tree), 20)).is_file()


async def test_an_image_that_was_not_finished_is_no_image_and_goes(disks: BlockDisks, tmp_path: Path) -> None:
    (unfinished := tmp_path / "blocks/templates" / f".{HEX}.erofs").mkdir()
    assert disks.known_templates() == set()
    await BlockDisks(tmp_path / "blocks").open()
    assert not unfinished.exists()


async def test_a_layer_is_the_machines_own_and_has_the_size_that_was_asked_for(disks: BlockDisks, tree: Path) -> None:
    machine, other = new_id("sbx"), new_id("sbx")
    layer = await disks.create(machine, Origin(tree, 0), 48)
    assert layer != await disks.create(other, Origin(tree, 0), 48)
    assert disks.known() == {machine, other}
    with pytest.raises(OSError, match="No space") as caught:
        written(layer, "large", bytes(128 * MIB))
    assert caught.value.errno == errno.ENOSPC
    assert disks.used(other, 0, 48) < 2 * MIB
    assert disks.used(machine, 0, 48) == 48 * MIB
    await disks.delete(machine)
    await disks.delete(machine)
    assert disks.known() == {other}
    with pytest.raises(HostError, match="gone"):
        await disks.attach(machine)


async def test_a_saved_layer_begins_others_and_does_not_change_with_them(disks: BlockDisks, tree: Path) -> None:
    machine = new_id("sbx")
    layer = await disks.create(machine, Origin(tree, 0), 48)
    written(layer, "file", b"kept")
    await disks.save(machine, SNAPSHOT, 0, 48)
    written(layer, "later", b"not kept")
    copy = await disks.create(new_id("sbx"), Origin(disks.saved(SNAPSHOT), 0), 48)
    assert read(copy, "file") == b"kept"
    assert read(copy, "later") == b""
    written(copy, "copys", b"own")
    again = await disks.create(new_id("sbx"), Origin(disks.saved(SNAPSHOT), 0), 48)
    assert read(again, "copys") == b""
    assert disks.known_saved() == {SNAPSHOT}
    await disks.drop(SNAPSHOT)
    await disks.drop(SNAPSHOT)
    assert disks.known_saved() == set()
    assert read(again, "file") == b"kept"


async def test_a_guest_that_writes_its_disk_anew_takes_no_more_of_the_store_than_its_size(
    tmp_path: Path, tree: Path
) -> None:
    """Whatever it leaves of what it wrote before, also once its disk was copied."""
    with open(tmp_path / "store", "wb") as file:  # noqa: PTH123, ASYNC230 a local file
        file.truncate(1024 * MIB)
    subprocess.run(["mkfs.btrfs", "-q", tmp_path / "store"], check=True, capture_output=True)
    (place := tmp_path / "btrfs").mkdir()
    subprocess.run(["mount", "-o", "loop", tmp_path / "store", place], check=True)
    try:
        disks = BlockDisks(place / "blocks")
        await disks.open()
        machine = new_id("sbx")
        layer = await disks.create(machine, Origin(tree, 0), 64)
        assert 30 <= most_taken(place, layer) < 60
        before = free_mib(place)
        await disks.save(machine, SNAPSHOT, 0, 64)
        copy = await disks.create(new_id("sbx"), Origin(disks.saved(SNAPSHOT), 0), 64)
        assert before - free_mib(place) < 8, "copies share their blocks"
        assert 30 <= most_taken(place, copy) < 60
    finally:
        subprocess.run(["umount", place], check=True)


def most_taken(place: Path, layer: Path) -> int:
    """How many MiB of its store a layer comes to take of which 32 are written again and again, but for the beginning."""
    before, most = free_mib(place), 0
    for turn in range(6):
        with layer.open("r+b") as file:
            file.seek(32 * MIB + turn * 4096)
            file.write(os.urandom(32 * MIB - turn * 4096))
            os.fsync(file.fileno())
        os.sync()
        most = max(most, before - free_mib(place))
    return most


def free_mib(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize // MIB


async def test_a_template_of_holes_is_refused_before_it_fills_the_store(disks: BlockDisks, tree: Path) -> None:
    with (tree / "etc/hole").open("wb") as file:
        file.truncate(64 << 30)
    with pytest.raises(InvalidRequest) as caught:
        await disks.template(tree)
    assert caught.value.code == "template-too-large"
    assert caught.value.details["needed_mib"] == 64 << 10
    assert disks.known_templates() == set()


async def test_a_disk_that_is_gone_is_not_taken_for_a_full_store(disks: BlockDisks) -> None:
    for asked in (
        disks.save(new_id("sbx"), SNAPSHOT, 0, 48),
        disks.create(new_id("sbx"), Origin(disks.saved(SNAPSHOT), 0), 48),
    ):
        with pytest.raises(HostError) as caught:
            await asked
        assert caught.value.code == "disk-lost"
    assert disks.known() == disks.known_saved() == set()


async def test_a_disk_made_of_a_snapshot_may_be_larger_but_not_smaller(disks: BlockDisks, tree: Path) -> None:
    machine = new_id("sbx")
    written(await disks.create(machine, Origin(tree, 0), 48), "file", b"kept")
    await disks.save(machine, SNAPSHOT, 0, 48)
    saved = Origin(disks.saved(SNAPSHOT), 0)
    larger = await disks.create(new_id("sbx"), saved, 512)
    written(larger, "large", bytes(256 * MIB))
    assert read(larger, "file") == b"kept"
    assert images.layer_mib(larger) == 512
    with pytest.raises(InvalidRequest) as caught:
        await disks.create(new_id("sbx"), saved, 47)
    assert caught.value.details["min"] == 48


@pytest.mark.parametrize("disk_mib", [47, 49])
async def test_a_disk_that_a_kernel_has_in_use_keeps_its_size(disks: BlockDisks, tree: Path, disk_mib: int) -> None:
    machine = new_id("sbx")
    await disks.create(machine, Origin(tree, 0), 48)
    await disks.save(machine, SNAPSHOT, 0, 48)
    with pytest.raises(InvalidRequest) as caught:
        await disks.limit(machine, 0, disk_mib)
    assert caught.value.details == {"field": "resources.disk_mib", "min": 48, "max": 48}
    with pytest.raises(InvalidRequest):
        await disks.create(new_id("sbx"), Origin(disks.saved(SNAPSHOT), 0, in_use=True), disk_mib)
    await disks.limit(machine, 0, 48)


async def test_a_layer_that_makes_no_sense_is_refused_by_a_program_without_rights(
    disks: BlockDisks, tree: Path
) -> None:
    machine = new_id("sbx")
    layer = await disks.create(machine, Origin(tree, 0), 48)
    with layer.open("r+b") as file:
        file.write(os.urandom(8 * MIB))
    await disks.save(machine, SNAPSHOT, 0, 48)
    with pytest.raises(HostError) as caught:
        await disks.create(new_id("sbx"), Origin(disks.saved(SNAPSHOT), 0), 96)
    assert caught.value.code == "disk-damaged"


async def test_a_full_store_refuses_new_disks_and_snapshots_and_harms_no_old_one(tmp_path: Path, tree: Path) -> None:
    (place := tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "none", place], check=True)
    try:
        disks = BlockDisks(place / "blocks")
        await disks.open()
        machine = new_id("sbx")
        layer = await disks.create(machine, Origin(tree, 0), 48)
        (place / "filler").write_bytes(bytes(60 * MIB))
        for refused in (
            disks.create(new_id("sbx"), Origin(tree, 0), 48),
            disks.save(machine, SNAPSHOT, 0, 48),
            disks.template(tree),
        ):
            with pytest.raises(HostFull):
                await refused
        assert await disks.attach(machine) == layer
        assert disks.known() == {machine}
    finally:
        subprocess.run(["umount", place], check=True)

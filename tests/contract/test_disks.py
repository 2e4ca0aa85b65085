"""One suite for both stores of disks: what `space.broker.rootfs.Disks` promises, on btrfs and on overlays."""

# ruff: noqa: ASYNC221, ASYNC240 - a test has nothing else to do while a program runs

import errno
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from space.broker.btrfs import BtrfsDisks
from space.broker.mounts import mount_points
from space.broker.overlay import OverlayDisks
from space.broker.rootfs import Disks
from space.errors import HostError
from space.model.ids import new_id
from tests import installation
from tests.brokers import wait

DIGEST = "ab" * 32
DISK_MIB = 48
MIB = 1 << 20


class Store:
    """One store in a directory of the test's own; `make` opens it anew, as the next broker does."""

    def __init__(self, make: Callable[[], Disks]) -> None:
        self.make = make
        self.disks = make()
        self.bytes = 0

    async def template(self) -> Path:
        root = await self.disks.new_template(".import-1")
        (root / "etc").mkdir()
        (root / "etc/name").write_text("template")
        (root / "large").write_bytes(os.urandom(4 * MIB))
        self.bytes = await self.disks.seal_template(".import-1", DIGEST)
        return self.disks.template(DIGEST)

    async def machine(self) -> tuple[str, Path]:
        machine = new_id("sbx")
        return machine, await self.disks.create(machine, self.disks.template(DIGEST), self.bytes, DISK_MIB)


@pytest.fixture(params=["btrfs", "overlay"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if reason := installation.unfit():
        pytest.skip(reason)
    kinds: dict[str, Callable[[], Disks]] = {
        "btrfs": lambda: BtrfsDisks(tmp_path / "disks", tmp_path / "disks.btrfs", 1024),
        "overlay": lambda: OverlayDisks(tmp_path / "disks"),
    }
    if request.param not in Path("/proc/filesystems").read_text().split():
        pytest.skip(f"this kernel has no {request.param}")
    one = Store(kinds[request.param])
    await one.disks.open()
    await one.template()
    yield one
    for machine in one.disks.known():
        await one.disks.delete(machine)
    await one.disks.close()
    assert [place for place in mount_points() if tmp_path in place.parents] == []
    # Machines that start elsewhere at this moment hold a copy of every mount until they have left the host's root.
    wait(lambda: str(tmp_path) not in backing_files(), "the loop devices are free")


def backing_files() -> str:
    words = ["losetup", "--list", "--output", "BACK-FILE"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def fill(root: Path) -> tuple[int, int]:
    """Write until it fails; return the errno and the MiB written."""
    written = 0
    with (root / "filler").open("wb", buffering=0) as file:
        try:
            while written < 4 * DISK_MIB:
                file.write(os.urandom(MIB))
                os.fsync(file.fileno())
                written += 1
        except OSError as error:
            return error.errno or 0, written
    return 0, written


async def test_a_disk_begins_as_its_template_and_changes_alone(store: Store) -> None:
    (first, root), (_, other) = await store.machine(), await store.machine()
    assert (root / "etc/name").read_text() == "template"
    (root / "etc/name").write_text("mine")
    (root / "large").unlink()
    assert (other / "etc/name").read_text() == "template"
    assert (store.disks.template(DIGEST) / "etc/name").read_text() == "template"
    assert (store.disks.template(DIGEST) / "large").stat().st_size == 4 * MIB
    assert first in store.disks.known()


async def test_a_disk_takes_what_was_promised_and_little_more(store: Store) -> None:
    _, root = await store.machine()
    error, written = fill(root)
    assert error in {errno.ENOSPC, errno.EDQUOT}
    assert DISK_MIB * 0.8 <= written <= DISK_MIB * 1.2


async def test_a_full_disk_leaves_room_for_others_and_can_be_deleted(store: Store) -> None:
    machine, root = await store.machine()
    fill(root)
    _, other = await store.machine()
    (other / "file").write_bytes(os.urandom(MIB))
    await store.disks.delete(machine)
    assert machine not in store.disks.known()
    assert not root.exists()


async def test_a_kept_disk_is_there_for_the_next_broker(store: Store) -> None:
    machine, root = await store.machine()
    (root / "file").write_text("kept")
    await store.disks.sync(machine)
    await store.disks.detach(machine)
    again = store.make()
    await again.open()
    assert ((await again.attach(machine)) / "file").read_text() == "kept"
    assert ((await again.attach(machine)) / "file").read_text() == "kept"


async def test_taken_down_and_opened_again_disks_and_templates_are_there(store: Store) -> None:
    machine, root = await store.machine()
    (root / "file").write_text("kept")
    await store.disks.detach(machine)
    await store.disks.close()
    await store.disks.close()
    store.disks = store.make()
    await store.disks.open()
    assert ((await store.disks.attach(machine)) / "file").read_text() == "kept"
    _, other = await store.machine()
    assert (other / "etc/name").read_text() == "template"


async def test_a_disk_that_is_gone_cannot_be_attached_and_deleting_it_again_succeeds(store: Store) -> None:
    machine, _ = await store.machine()
    for _ in range(2):
        await store.disks.delete(machine)
    with pytest.raises(HostError):
        await store.disks.attach(machine)


async def test_a_disk_made_again_replaces_a_half_made_one(store: Store) -> None:
    machine, root = await store.machine()
    (root / "file").write_text("old")
    again = await store.disks.create(machine, store.disks.template(DIGEST), store.bytes, DISK_MIB)
    assert not (again / "file").exists()


async def test_use_is_told_per_machine(store: Store) -> None:
    (machine, root), (other, _) = await store.machine(), await store.machine()
    before = (await store.disks.used_mib())[machine]
    (root / "file").write_bytes(os.urandom(16 * MIB))
    await store.disks.sync(machine)
    used = await store.disks.used_mib()
    assert used.keys() == {machine, other}
    assert 12 <= used[machine] - before <= 24


async def test_a_template_sealed_again_replaces_an_unrecorded_one_and_its_bytes_are_told(store: Store) -> None:
    root = await store.disks.new_template(".import-2")
    (root / "new").write_text("x")
    assert store.disks.unfinished_templates() == {".import-2"}
    assert await store.disks.seal_template(".import-2", DIGEST) < 2 * MIB < 4 * MIB <= store.bytes
    assert (store.disks.template(DIGEST) / "new").read_text() == "x"
    assert store.disks.unfinished_templates() == set()


async def test_device_nodes_and_set_user_bits_of_a_template_mean_nothing_on_the_host(store: Store) -> None:
    _, root = await store.machine()
    os.mknod(root / "device", 0o666 | 0o020000, os.makedev(1, 3))
    with pytest.raises(PermissionError):
        os.open(root / "device", os.O_RDONLY)
    subprocess.run(["cp", "/usr/bin/id", root / "id"], check=True)
    (root / "id").chmod(0o4755)
    for parent in (root, *list(root.parents)[:-2]):
        parent.chmod(parent.stat().st_mode | 0o111)
    drop = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    seen = subprocess.run([*drop, root / "id", "-u"], capture_output=True, text=True, check=True).stdout
    assert seen.strip() == "12345"

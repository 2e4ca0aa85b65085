"""Images of disks, what a QEMU is started with, and what it may answer."""

# ruff: noqa: ASYNC221, ASYNC240 - a test has nothing else to do meanwhile

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from space.drivers.qemu import clock, command, monitor
from space.drivers.qemu.command import Hardware
from space.drivers.vm import images, kernel, network
from space.drivers.vm.kernel import Kernel
from space.errors import HostError, MachineLost

GREETING = b'{"QMP": {"version": {}}}\n'
DONE = b'{"return": {}}\n'

as_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("bwrap") or not shutil.which("mkfs.erofs"),
    reason="needs root, bubblewrap and erofs-utils: run scripts/packages vm",
)


# --- images


def tree(directory: Path) -> Path:
    (directory / "etc").mkdir(parents=True)
    (directory / "etc/shadow").write_text("secret")
    (directory / "etc/shadow").chmod(0o000)
    os.chown(directory / "etc/shadow", 1234, 42)
    (directory / "link").symlink_to("/etc/hostname")
    (directory / "link-out").symlink_to("../../../../etc/passwd")
    for name in ("etc/shadow", "link", "link-out", "etc", "."):
        os.utime(directory / name, (1_000_000_000, 1_000_000_000), follow_symlinks=False)
    return directory


def mounted(image: Path, place: Path) -> Path:
    place.mkdir()
    subprocess.run(["mount", "-o", "loop,ro", image, place], check=True)
    return place


@as_root
async def test_an_image_has_names_owners_modes_times_and_links_as_they_are(tmp_path: Path) -> None:
    await images.write_tree(tree(tmp_path / "tree"), tmp_path / "image")
    place = mounted(tmp_path / "image", tmp_path / "place")
    try:
        info = (place / "etc/shadow").stat()
        assert (info.st_uid, info.st_gid, info.st_mode & 0o7777, info.st_mtime) == (1234, 42, 0, 1_000_000_000)
        assert (place / "etc/shadow").read_text() == "secret"
        assert os.readlink(place / "link-out") == "../../../../etc/passwd"  # noqa: PTH115
    finally:
        subprocess.run(["umount", place], check=True)


@as_root
async def test_the_same_tree_gives_the_same_image_and_another_gives_another(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    for name in ("one", "two"):
        await images.write_tree(tmp_path / name, tmp_path / f"{name}.erofs")
    assert (tmp_path / "one.erofs").read_bytes() == (tmp_path / "two.erofs").read_bytes()
    (two / "etc/shadow").write_text("another")
    await images.write_tree(two, tmp_path / "three.erofs")
    assert (tmp_path / "one.erofs").read_bytes() != (tmp_path / "three.erofs").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "one.erofs", "two.erofs", "three.erofs"}
    assert one.exists()


@as_root
async def test_a_tree_that_is_not_there_leaves_no_image(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        await images.write_tree(tmp_path / "none", tmp_path / "image")
    assert caught.value.code == "image-not-made"
    assert list(tmp_path.iterdir()) == []


@as_root
async def test_a_program_for_images_that_is_taken_over_cannot_have_a_file_of_the_hosts_opened_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves in the image's place may be a link, which is neither followed nor taken for the image."""
    (secret := tmp_path / "secret").write_text("secret")
    secret.chmod(0o600)

    def taken_over(_: Path, work: Path) -> list[str]:
        return ["ln", "-s", str(secret), str(work / "image")]

    monkeypatch.setattr(images, "_jailed", taken_over)
    with pytest.raises(HostError) as caught:
        await images.write_tree(tree(tmp_path / "tree"), tmp_path / "image")
    assert caught.value.code == "image-not-made"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "tree"}


async def test_a_layer_takes_no_space_until_it_is_written_and_replaces_nothing(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    await images.make_layer(layer, 512)
    assert layer.stat().st_size == (512 + images.OVERHEAD_MIB) << 20
    assert layer.stat().st_blocks * 512 < 4 << 20
    with pytest.raises(FileExistsError):
        await images.make_layer(layer, 512)


# --- command line, kernel, network


def test_a_qemu_is_confined_and_opens_nothing_of_the_machines_own() -> None:
    argv = command.render("name", Hardware.of(1.5, 512, 2_000_000), restores=True)
    assert argv[argv.index("-sandbox") + 1].split(",")[0] == "on"
    assert argv[argv.index("-smp") + 1] == "2"
    named = {word for word in argv if "/" in word and not word.startswith(("quiet", "driver=file"))}
    assert named == {command.PROGRAM, "/kernel/vmlinux", "/kernel/initrd"}
    drives = [word for word in argv if word.startswith("driver=file")]
    assert ["read-only=on" in word for word in drives] == [True, False, True]
    assert argv[argv.index("-incoming") + 1] == "fd:6"
    assert "socket,id=monitor,fd=7,server=on,wait=off" in argv
    assert "tap,id=link,fd=8" in argv
    assert argv[-1] == "-S"


def test_descriptors_move_up_where_nothing_is_restored() -> None:
    argv = command.render("name", Hardware(1, 512, 2_000_000), restores=False)
    assert "socket,id=monitor,fd=6,server=on,wait=off" in argv
    assert "tap,id=link,fd=7" in argv
    assert "-incoming" not in argv


def test_the_kernel_is_told_disks_and_addresses() -> None:
    words = kernel.command_line("x=1").split()
    assert "space.disks=vda,vdb,vdc" in words
    assert f"space.link=192.0.0.2/29,192.0.0.1,{network.GUEST_V6},{network.HOST_V6.ip}" in words
    assert words[-1] == "x=1"


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("nft"), reason="needs root and nftables")
def test_the_rules_of_a_namespace_load_again_over_themselves() -> None:
    name = f"spcv{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    inside = ["ip", "netns", "exec", name, "nft"]
    try:
        listed = []
        for _ in range(2):
            subprocess.run([*inside, "-f", "-"], input=network.RULES, text=True, check=True)
            listed.append(subprocess.run([*inside, "list", "ruleset"], capture_output=True, check=True).stdout)
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    assert listed[0] == listed[1]
    assert b"policy drop" in listed[0]


def test_a_kernel_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        Kernel(tmp_path).resolved()
    assert caught.value.code == "no-guest-kernel"


def test_the_speed_of_the_counter_is_measured_alike_again_and_again() -> None:
    found = [clock.counter_khz() for _ in range(3)]
    assert min(found) > 100_000
    assert max(found) - min(found) < min(found) // 1000


# --- the monitor


@asynccontextmanager
async def qemu(
    tmp_path: Path, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[Path]:
    """Something that listens where a QEMU would."""

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(served, tmp_path / "monitor")
    async with server:
        yield tmp_path / "monitor"


async def test_events_between_request_and_answer_are_passed_over(tmp_path: Path) -> None:
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        while line := await reader.readline():
            asked.append(json.loads(line)["execute"])
            answer = b'{"return": {"status": "running"}}\n' if asked[-1] == "query-status" else DONE
            writer.write(b'{"event": "STOP", "data": {"status": "paused"}}\n' * 3 + answer)

    async with qemu(tmp_path, serve) as address, monitor.connected(address) as one:
        assert await one.status() == "running"
        await one.ask("cont")
    assert asked == ["qmp_capabilities", "query-status", "cont"]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"null\n", "machine-silent"),
        (b"[" * 40000 + b"\n", "machine-silent"),
        (b"\xff\n", "machine-silent"),
        (b'{"return": ' + b" " * (3 * monitor.LINE_BYTES_MAX), "machine-silent"),
        (b'{"event": "X"}\n' * (monitor.EVENTS_MAX + 1), "machine-silent"),
        (b'{"error": {"class": "GenericError", "desc": "no"}}\n', "monitor-refused"),
        (b'{"error": "no"}\n', "machine-silent"),
    ],
)
async def test_whatever_a_qemu_answers_is_bounded_and_not_taken_for_success(
    tmp_path: Path, answer: bytes, code: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readline()
        writer.write(DONE)
        await reader.readline()
        writer.write(answer)
        await writer.drain()
        await reader.read()

    async with qemu(tmp_path, serve) as address, monitor.connected(address) as one:
        with pytest.raises(HostError) as caught:
            await one.ask("stop")
    assert caught.value.code == code


async def test_a_qemu_that_says_nothing_is_given_up_and_one_that_goes_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "ANSWER_S", 0.05)

    async def mute(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async def gone(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)

    async with qemu(tmp_path, mute) as address:
        with pytest.raises(HostError) as caught:
            async with monitor.connected(address):
                pass
        assert caught.value.code == "machine-silent"
    address.unlink(missing_ok=True)
    async with qemu(tmp_path, gone) as address:
        with pytest.raises(MachineLost):
            async with monitor.connected(address) as one:
                await one.ask("stop")
    address.unlink(missing_ok=True)
    with pytest.raises(MachineLost):
        async with monitor.connected(address):
            pass

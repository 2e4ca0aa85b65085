"""What a Firecracker is asked for, which releases are used, and what its API and its user's files may do to us."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from space.drivers.firecracker import api, config, versions
from space.drivers.firecracker.config import Hardware
from space.drivers.firecracker.jail import Jail
from space.drivers.firecracker.versions import Programs
from space.drivers.vm import users
from space.drivers.vm.bundles import Bundle
from space.errors import HostError, MachineLost

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


# --- what it is asked for


def test_a_machine_is_configured_before_it_is_started_and_only_its_layer_can_be_written() -> None:
    asked = config.render_start(Hardware.of(1.5, 512, ""))
    assert asked[-1] == ("/actions", {"action_type": "InstanceStart"})
    found = dict(asked)
    assert found["/machine-config"] == {"vcpu_count": 2, "mem_size_mib": 512, "smt": False}
    drives = [body for path, body in asked if path.startswith("/drives/")]
    assert [(one["drive_id"], one["is_read_only"]) for one in drives] == [
        ("template", True),
        ("layer", False),
        ("space", True),
    ]
    assert found["/boot-source"]["boot_args"].endswith("reboot=k space.channel=vsock:1000")
    assert {"/entropy", "/balloon", "/vsock", "/network-interfaces/eth0"} <= set(found)


def test_a_template_of_processors_is_asked_for_where_one_is_set() -> None:
    assert dict(config.render_start(Hardware.of(1, 128, "T2")))["/machine-config"]["cpu_template"] == "T2"


def test_an_image_is_written_where_no_restored_machine_reads() -> None:
    written = config.render_checkpoint()[1]
    read = config.render_restore()[1]
    assert Path(written["mem_file_path"]).parent != Path(read["mem_backend"]["backend_path"]).parent
    assert read["resume_vm"] is True


# --- releases


@pytest.mark.parametrize(
    ("release", "reason"),
    [("1.11.0", "too old"), ("0.25.2", "too old"), ("1.16.0", r"vsock.*restored.*later")],
)
def test_a_release_that_cannot_be_used_is_refused_with_the_reason(release: str, reason: str) -> None:
    with pytest.raises(HostError, match=reason) as caught:
        versions.check(versions.parse(f"Firecracker v{release}\n\nmore\n".encode()))
    assert caught.value.code == "firecracker-version"


@pytest.mark.parametrize("release", ["1.12.0", "1.12.1", "1.15.9", "1.16.1", "2.0.0"])
def test_other_releases_are_used(release: str) -> None:
    assert versions.check(versions.parse(f"Firecracker v{release}\n".encode())) == release


@pytest.mark.parametrize("said", [b"", b"Firecracker", b"QEMU v1.12.1", b"Firecracker v1.12", b"\xff\xfe"])
def test_what_does_not_say_its_release_is_refused(said: bytes) -> None:
    with pytest.raises(HostError, match="does not say"):
        versions.parse(said)


def release(directory: Path, firecracker: str, jailer: str) -> Programs:
    for name, said in (("firecracker", f"Firecracker v{firecracker}"), ("jailer", f"Jailer v{jailer}")):
        (directory / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (directory / name).chmod(0o755)
    return Programs(directory)


async def test_programs_of_two_releases_are_refused_and_so_are_absent_ones(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        await Programs(tmp_path).version()
    assert caught.value.code == "no-firecracker"
    with pytest.raises(HostError, match="different releases"):
        await release(tmp_path, "1.12.1", "1.13.0").version()
    assert await release(tmp_path, "1.13.1", "1.13.1").version() == "1.13.1"


async def test_a_link_to_a_program_of_another_name_is_refused(tmp_path: Path) -> None:
    found = release(tmp_path, "1.13.1", "1.13.1")
    (tmp_path / "firecracker").rename(tmp_path / "firecracker-v1.13.1")
    (tmp_path / "firecracker").symlink_to("firecracker-v1.13.1")
    with pytest.raises(HostError, match="name"):
        await found.version()


# --- the API


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(address: Path, *pieces: bytes, endless: bytes = b"") -> AsyncIterator[list[bytes]]:
    """Answer every request with these pieces and then, over and over, with the endless one; yield what was asked."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read(65536))
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while endless:
                writer.write(endless)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort() if endless else writer.close()

    server = await asyncio.start_unix_server(answer, address)
    try:
        yield asked
    finally:
        server.close()


def reply(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


async def test_an_answer_is_read_however_it_is_cut(tmp_path: Path) -> None:
    whole = reply("200 OK", b'{"state": "Paused"}')
    async with serving(tmp_path / "api", *(whole[at : at + 1] for at in range(len(whole)))):
        assert await api.state(tmp_path / "api") == "Paused"


async def test_a_request_without_an_answer_to_read_is_done(tmp_path: Path) -> None:
    async with serving(tmp_path / "api", b"HTTP/1.1 204 \r\nConnection: keep-alive\r\n\r\n") as asked:
        assert await api.ask(tmp_path / "api", "PATCH", "/vm", {"state": "Paused"}) is None
    assert asked[0].startswith(b"PATCH /vm HTTP/1.1\r\n")
    assert asked[0].endswith(b'\r\n\r\n{"state": "Paused"}')


async def test_a_refusal_is_told_without_what_firecracker_says(tmp_path: Path) -> None:
    async with serving(tmp_path / "api", reply("400 Bad", b'{"fault_message": "secret words"}')):
        with pytest.raises(HostError, match="refused /vm") as caught:
            await api.ask(tmp_path / "api", "PATCH", "/vm", {})
    assert caught.value.code == "monitor-refused"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("pieces", "endless"),
    [
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n",), b"x" * 4096),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",), b"1\r\nx\r\n" * 1000),
        ((b"HTTP/1.1 200 OK\r\n",), b"Header: x\r\n" * 100),
        ((b"SSH-2.0\r\n\r\n",), b""),
        ((reply("200 OK", b"[" * 60000),), b""),
        ((reply("200 OK", b'{"state": 1}'),), b""),
        ((reply("200 OK", b"[]"),), b""),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{",), b""),
    ],
)
async def test_an_answer_without_end_or_sense_is_refused(
    tmp_path: Path, pieces: tuple[bytes, ...], endless: bytes
) -> None:
    async with serving(tmp_path / "api", *pieces, endless=endless):
        with pytest.raises(HostError) as caught:
            await api.state(tmp_path / "api")
    assert caught.value.code == "machine-silent"


async def test_one_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    async with serving(tmp_path / "api", endless=b"HTTP/1.1 100 Continue\r\n\r\n"):
        with pytest.raises(HostError, match="does not answer"):
            await api.ask(tmp_path / "api", "GET", "/", timeout_s=0.2)


async def test_one_that_hangs_up_is_lost(tmp_path: Path) -> None:
    async with serving(tmp_path / "api"):
        with pytest.raises(MachineLost):
            await api.state(tmp_path / "api")


async def test_a_link_in_the_place_of_the_socket_is_not_followed(tmp_path: Path) -> None:
    """A guest that has taken over its Firecracker owns the jail: what it puts there leads to nobody else's socket."""
    async with serving(tmp_path / "other", reply("200 OK", b'{"state": "Running"}')) as asked:
        (tmp_path / "api").symlink_to(tmp_path / "other")
        with pytest.raises(MachineLost):
            await api.state(tmp_path / "api")
        (tmp_path / "file").touch()
        with pytest.raises(MachineLost):
            await api.state(tmp_path / "file")
        with pytest.raises(MachineLost):
            await api.state(tmp_path / "absent")
    assert asked == []


# --- what is taken of an image


def written(directory: Path) -> tuple[Jail, Path]:
    jail = Jail(Bundle(directory / "bundle"), directory / "jail")
    image = directory / "image"
    image.mkdir()
    jail.out.mkdir(parents=True)
    (jail.out / "state").write_bytes(b"state")
    (jail.out / "memory").write_bytes(os.urandom(10000))
    return jail, image


def test_an_image_is_a_copy_that_its_writer_no_longer_reaches(tmp_path: Path) -> None:
    jail, image = written(tmp_path)
    memory = (jail.out / "memory").read_bytes()
    with (jail.out / "memory").open("r+b") as kept:
        jail.take_image(image, 1 << 20)
        kept.write(b"changed")
    assert (image / "memory").read_bytes() == memory
    assert (image / "memory").stat().st_mode & 0o777 == 0o444
    assert list(jail.out.iterdir()) == []


def test_what_is_no_file_of_possible_size_is_not_taken_for_an_image(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for name, put in {
        "link": lambda path: path.symlink_to(tmp_path / "secret"),
        "pipe": os.mkfifo,
        "large": lambda path: path.write_bytes(b"x" * 20000),
        "absent": lambda path: None,
    }.items():
        (tmp_path / name).mkdir()
        jail, image = written(tmp_path / name)
        (jail.out / "memory").unlink()
        put(jail.out / "memory")
        with pytest.raises((HostError, OSError)):
            jail.take_image(image, 15000)
        assert not (image / "memory").exists()


@as_root
def test_a_jail_is_made_anew_and_removed_whatever_was_put_there(tmp_path: Path) -> None:
    jail = Jail(Bundle(tmp_path / "bundle"), tmp_path / "jail")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    taken = set()
    for _ in range(2):
        jail.make(tmp_path / "netns")
        taken.add(jail.user)
        assert list(jail.root.iterdir()) == []
        assert jail.out.stat().st_uid == jail.user
        assert jail.bundle.path.stat().st_mode & 0o777 == 0o700
        (jail.root / "link").symlink_to(tmp_path / "precious")
        (jail.out / "link").symlink_to(tmp_path / "precious")
    jail.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious"]
    assert (tmp_path / "precious/file").exists()
    assert not any((users.TAKEN / str(user)).is_symlink() for user in taken)


@as_root
def test_a_serial_line_that_nobody_reads_holds_what_a_pipe_holds(tmp_path: Path) -> None:
    jail = Jail(Bundle(tmp_path / "bundle"), tmp_path / "jail")
    jail.make(tmp_path / "netns")
    line = os.open(jail.bundle.path / "console", os.O_RDWR | os.O_NONBLOCK)
    try:
        fits = 16
        for _ in range(fits):
            os.write(line, b"x" * 4096)
        with pytest.raises(BlockingIOError):
            os.write(line, b"x")
        assert jail.read_console() == "x" * 65536
        assert jail.read_console() == ""
    finally:
        os.close(line)
        jail.remove()

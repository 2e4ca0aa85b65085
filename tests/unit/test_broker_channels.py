"""The guest channel's FIFOs: who may do what with them, and that they are gone when they should be."""

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from space.broker.channels import PIPE_BYTES, Channels, close
from space.model.ids import new_id


@pytest.fixture
def channels(tmp_path: Path) -> Channels:
    one = Channels(tmp_path / "channels", os.geteuid(), os.getegid())
    one.open()
    return one


def test_bytes_go_through_by_path(channels: Channels, tmp_path: Path) -> None:
    machine = new_id("sbx")
    channel = channels.create(machine)
    writer = os.open(tmp_path / "channels" / machine / "in", os.O_WRONLY | os.O_NONBLOCK)
    os.write(writer, b"to the guest")
    assert os.read(channel.stdin, 100) == b"to the guest"
    os.close(writer)
    close(channel)


def test_the_channel_ends_when_the_machine_that_alone_holds_it_does(channels: Channels, tmp_path: Path) -> None:
    machine = new_id("sbx")
    channel = channels.create(machine)
    reader = os.open(tmp_path / "channels" / machine / "out", os.O_RDONLY | os.O_NONBLOCK)
    os.write(channel.stdout, b"last words")
    close(channel)
    assert os.read(reader, 100) == b"last words"
    assert os.read(reader, 100) == b""
    os.close(reader)


def test_the_fifos_hold_a_mebibyte_and_only_root_and_the_nodes_group_come_near_them(
    channels: Channels, tmp_path: Path
) -> None:
    if os.geteuid() != 0 and int(Path("/proc/sys/fs/pipe-max-size").read_text()) < PIPE_BYTES:
        pytest.skip("needs root to make pipes that large here")
    machine = new_id("sbx")
    channel = channels.create(machine)
    for name, descriptor in (("in", channel.stdin), ("out", channel.stdout)):
        found = (tmp_path / "channels" / machine / name).lstat()
        assert stat.S_ISFIFO(found.st_mode)
        assert fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) == PIPE_BYTES
    assert stat.S_IMODE((tmp_path / "channels" / machine).stat().st_mode) == 0o750
    close(channel)


def test_a_fifo_that_runsc_gave_to_root_is_open_to_the_node_alone() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    node, other = 65533, 65534
    with tempfile.TemporaryDirectory() as top:  # where every user gets in, unlike tmp_path
        Path(top).chmod(0o755)
        fifo = Path(top) / "in"
        channels = Channels(Path(top) / "channels", node, node)
        channels.open()
        machine = new_id("sbx")
        channel = channels.create(machine)
        os.fchown(channel.stdin, 0, 0)
        os.link(Path(top) / "channels" / machine / "in", fifo)
        opens = "import os, sys; os.open(sys.argv[1], os.O_RDWR)"
        done = [
            subprocess.run([sys.executable, "-S", "-c", opens, fifo], user=uid, group=uid, extra_groups=[], check=False)
            for uid in (node, other)
        ]
        close(channel)
    assert [one.returncode for one in done] == [0, 1]


def test_a_channel_made_again_is_a_fresh_one(channels: Channels) -> None:
    """After a wake nothing of the bytes before it is left in the pipe."""
    machine = new_id("sbx")
    first = channels.create(machine)
    os.write(first.stdin, b"stale")
    second = channels.create(machine)
    os.set_blocking(second.stdin, False)
    with pytest.raises(BlockingIOError):
        os.read(second.stdin, 100)
    close(first)
    close(second)


def test_a_removed_channel_is_gone_and_may_be_removed_again(channels: Channels) -> None:
    machine = new_id("sbx")
    close(channels.create(machine))
    assert channels.known() == {machine}
    channels.remove(machine)
    channels.remove(machine)
    assert channels.known() == set()


def test_programs_started_by_the_broker_do_not_inherit_channels(channels: Channels) -> None:
    channel = channels.create(new_id("sbx"))
    assert not os.get_inheritable(channel.stdin)
    assert not os.get_inheritable(channel.stdout)
    close(channel)

"""The one process that is root: who may speak to it, what the node's user may touch of its making, what a guest sees of it."""

# ruff: noqa: ASYNC240 - a test has nothing else to do while a program runs

import contextlib
import grp
import io
import json
import os
import pwd
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from space.broker import setup
from space.broker.defaults import Defaults
from space.errors import HostError
from tests.brokers import GUEST_PYTHON, Separate, Site, cleared, started

NODE = "daemon"
"""A user of every Debian, here in the node's place."""
STRANGER = 12345
SECRET = "key-that-nobody-may-see"
ASK = """
import socket, sys
with socket.socket(socket.AF_UNIX) as one:
    one.settimeout(10)
    try:
        one.connect(sys.argv[1])
        one.sendall(b'{"id": 1, "verb": "machines"}\\n')
        print("answer" if one.recv(100) else "closed")
    except OSError as error:
        print(type(error).__name__)
"""


class Guarded(Separate):
    """The broker as root starts it, with something in its environment that is nobody's business."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.settings = self.settings.model_copy(update={"node_user": NODE})

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "SPACE_STORE_URL": SECRET, "TOKEN": SECRET}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with started(Guarded(tmp_path_factory.mktemp("broker"))) as one:
        yield one


@pytest.fixture
async def site(broker: Guarded) -> AsyncIterator[Site]:
    async with cleared(broker) as one:
        yield one


def as_user(uid: int, gid: int, *words: str) -> subprocess.CompletedProcess[str]:
    drop = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
    return subprocess.run([*drop, *words], capture_output=True, text=True, check=False, cwd="/", timeout=30)


def as_node(*words: str) -> subprocess.CompletedProcess[str]:
    user = pwd.getpwnam(NODE)
    return as_user(user.pw_uid, user.pw_gid, *words)


def ask_as(broker: Guarded, uid: int, gid: int) -> str:
    return as_user(uid, gid, sys.executable, "-I", "-c", ASK, str(broker.settings.broker_socket)).stdout.strip()


async def test_the_node_and_root_are_answered(broker: Guarded) -> None:
    node = pwd.getpwnam(NODE)
    assert ask_as(broker, node.pw_uid, node.pw_gid) == "answer"
    assert ask_as(broker, 0, 0) == "answer"


async def test_another_user_cannot_connect(broker: Guarded) -> None:
    assert ask_as(broker, STRANGER, STRANGER) == "PermissionError"


async def test_another_user_of_the_nodes_group_is_shut_out_by_the_kernels_word(broker: Guarded) -> None:
    assert ask_as(broker, STRANGER, grp.getgrnam(NODE).gr_gid) in {"closed", "ConnectionResetError", "BrokenPipeError"}


async def test_the_node_can_open_the_channel_but_not_exchange_it(broker: Guarded, site: Site) -> None:
    machine = await site.boot()
    directory = broker.settings.channels_dir / machine
    opened = "import os, sys\nos.open(sys.argv[1] + '/in', os.O_WRONLY | os.O_NONBLOCK)\nos.open(sys.argv[1] + '/out', os.O_RDONLY | os.O_NONBLOCK)"
    assert as_node(sys.executable, "-I", "-c", opened, str(directory)).returncode == 0
    for words in (
        ["rm", "-f", f"{directory}/in"],
        ["touch", f"{directory}/new"],
        ["mv", str(directory), f"{directory}x"],
        ["rmdir", str(directory)],
    ):
        assert as_node(*words).returncode != 0, words
    assert sorted(path.name for path in directory.iterdir()) == ["in", "out"]


async def test_another_user_cannot_open_a_channel(broker: Guarded, site: Site) -> None:
    machine = await site.boot()
    for name in ("in", "out"):
        assert (
            as_user(STRANGER, STRANGER, "test", "-e", str(broker.settings.channels_dir / machine / name)).returncode
            != 0
        )


async def test_the_node_cannot_read_disks_images_journals_or_the_machines_state(broker: Guarded, site: Site) -> None:
    """Root's files are root's: a node that was taken over still needs the broker for everything."""
    machine = await site.boot()
    await site.call("suspend", machine=machine)
    private = [
        broker.settings.broker_dir,
        broker.settings.broker_dir / "disks",
        broker.settings.broker_dir / "snapshots",
    ]
    private += [broker.settings.run_dir / "broker/bundles" / machine, site.image(machine)]
    for path in private:
        assert as_node("ls", str(path)).returncode != 0, path


async def test_a_machines_processes_know_nothing_of_the_brokers_environment(broker: Guarded, site: Site) -> None:
    machine = await site.boot()
    pids = members(broker, machine)
    assert len(pids) >= 2
    for pid in pids:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert SECRET.encode() not in environment
        assert b"SPACE_" not in environment
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def members(broker: Guarded, machine: str) -> list[int]:
    found = Path("/sys/fs/cgroup").glob(f"**/{broker.settings.instance}/{machine}/cgroup.procs")
    return sorted({int(pid) for procs in found for pid in procs.read_text().split()})


async def test_all_of_a_machines_processes_are_in_its_cgroup_and_none_in_the_hosts_network(
    broker: Guarded, site: Site
) -> None:
    machine = await site.boot()
    pids = set(members(broker, machine))
    ours = {int(path.name) for path in Path("/proc").glob("[0-9]*") if machine in cmdline(path)}
    assert ours
    assert ours <= pids
    host = Path("/proc/self/ns/net").readlink()
    for pid in ours:
        assert Path(f"/proc/{pid}/ns/net").readlink() != host


async def test_a_machine_runs_at_the_usual_priority_and_the_broker_above_it(broker: Guarded, site: Site) -> None:
    machine = await site.boot()
    assert broker.process
    assert os.getpriority(os.PRIO_PROCESS, broker.process.pid) < 0
    assert min(os.getpriority(os.PRIO_PROCESS, pid) for pid in members(broker, machine)) == 0


def cmdline(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


async def test_a_guests_root_sees_no_path_of_the_host_and_its_own_memory_as_all_there_is(
    broker: Guarded, site: Site
) -> None:
    machine = await site.boot(memory_mib=192)
    look = "print(open('/proc/mounts').read(), open('/proc/self/cgroup').read(), open('/proc/1/cmdline').read(), open('/proc/meminfo').read())"
    with site.peer(machine) as peer:
        seen = peer.run(*GUEST_PYTHON, look).stdout.decode()
    for secret in (
        str(broker.settings.data_dir),
        str(broker.settings.run_dir),
        broker.settings.instance,
        SECRET,
        machine,
    ):
        assert secret not in seen, secret
    total = next(int(line.split()[-2]) for line in seen.splitlines() if "MemTotal" in line)
    assert total == 192 * 1024


REMOUNT = "import ctypes\nctypes.CDLL(None).mount(b'none', b'/.space', None, 32, None)"
WRITE = """
import os
attempts = [
    lambda: open('/.space/new', 'wb'),
    lambda: open('/.space/agent.pyz', 'wb'),
    lambda: open('/.space/bin/python3', 'r+b'),
    lambda: open('/proc/1/exe', 'wb'),
    lambda: os.truncate('/.space/lib/libz.so.1', 0),
    lambda: os.rename('/.space/agent.pyz', '/.space/other'),
    lambda: os.unlink('/.space/agent.pyz'),
    lambda: os.mkdir('/.space/directory'),
    lambda: os.symlink('x', '/.space/link'),
]
for attempt in attempts:
    try:
        attempt()
        print('done')
    except OSError:
        print('refused')
"""


@pytest.mark.parametrize("woken", [False, True])
async def test_a_guests_root_cannot_write_where_its_runtime_is(site: Site, woken: bool) -> None:
    """All machines share those files: also when the guest makes its own mount writable, which it can, the host's is not."""
    machine = await site.boot()
    with site.peer(machine) as peer:
        peer.run(*GUEST_PYTHON, REMOUNT)
    if woken:
        await site.call("suspend", machine=machine)
        await site.call("wake", machine=machine)
    before = {path: path.stat() for path in site.settings.guest_dir.rglob("*")}
    with site.peer(machine) as peer:
        answers = peer.run(*GUEST_PYTHON, WRITE).stdout.decode().split()
    assert answers == ["refused"] * 9
    after = {path: path.stat() for path in site.settings.guest_dir.rglob("*")}
    assert [(path, found.st_size, found.st_mtime, found.st_mode) for path, found in before.items()] == [
        (path, found.st_size, found.st_mtime, found.st_mode) for path, found in after.items()
    ]


async def test_a_guest_cannot_fill_the_host_through_its_standard_error(broker: Guarded, site: Site) -> None:
    machine = await site.boot()
    spill = "import os\nf = os.open('/proc/1/fd/2', os.O_WRONLY)\nfor _ in range(64): os.write(f, b'x' * 65536)\nprint('done')"
    bundle = broker.settings.run_dir / "broker/bundles" / machine
    with site.peer(machine) as peer:
        peer.run(*GUEST_PYTHON, spill)
    assert sum(path.stat().st_size for path in bundle.iterdir()) < 1 << 20


async def test_a_guests_processes_hold_no_capability_once_they_are_a_users(site: Site) -> None:
    machine = await site.boot()
    with site.peer(machine) as peer:
        seen = peer.run(*GUEST_PYTHON, "print(open('/proc/self/status').read())", user="user").stdout.decode()
    sets = dict(line.split(":\t") for line in seen.splitlines() if line.startswith("Cap"))
    assert len(sets) >= 4
    for name in set(sets) - {"CapBnd"}:
        assert int(sets[name], 16) == 0, name


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info, b""


async def test_a_template_archive_cannot_write_outside_its_root(broker: Guarded, tmp_path: Path) -> None:
    """F4: parent paths, absolute paths, and a path through a link that the archive brought itself."""
    outside = tmp_path / "outside"
    outside.mkdir()
    source = archive(
        tmp_path / "hostile.tar",
        link("way-out", str(outside)),
        (tarfile.TarInfo("way-out/through-link"), b"x"),
        (tarfile.TarInfo(f"{outside}/absolute"), b"x"),
        (tarfile.TarInfo(f"../../../../../../../..{outside}/parent"), b"x"),
    )
    with contextlib.suppress(HostError):
        await setup.import_template(broker.settings, source, "hostile", "latest", Defaults())
    assert list(outside.iterdir()) == []


async def test_a_template_whose_directories_lead_out_is_refused_and_leaves_nothing(
    broker: Guarded, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    templates = broker.settings.broker_dir / "disks/templates"
    before = sorted(templates.iterdir())
    source = archive(tmp_path / "hostile.tar", link("etc", str(outside)))
    with pytest.raises(Exception, match="not a directory"):
        await setup.import_template(broker.settings, source, "hostile", "latest", Defaults())
    assert list(outside.iterdir()) == []
    assert sorted(templates.iterdir()) == before


async def test_what_the_broker_says_names_no_path_of_the_host(broker: Guarded, site: Site) -> None:
    machine = await site.boot()
    said = json.dumps(
        [await site.call("inspect", machine=machine), await site.call("templates"), await site.call("machines")]
    )
    for path in (broker.settings.data_dir, broker.settings.run_dir, broker.settings.guest_dir):
        assert str(path) not in said

"""Snapshots, copies, spares and strays through the broker on gVisor. No node, no api; so guests are not quiesced here."""

# ruff: noqa: ASYNC221 - a test has nothing else to do while a program runs

import asyncio
import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from space.broker import links
from space.broker.addressing import link
from space.broker.subvolumes import snapshot as copy_subvolume
from space.drivers import processes
from space.drivers.base import Need
from space.errors import Conflict, HostFull, InvalidRequest, SpaceError
from space.model.ids import new_id
from space.model.sandbox import Resources
from space.testing import FakeDriver
from tests import installation
from tests.brokers import GUEST_PYTHON, RESOURCES, Separate, Site, cleared, serving, settings_in, started, until

# It measures, or needs the host's memory and processors to itself.
pytestmark = pytest.mark.alone

FILL = """
import errno, os
size = 0
try:
    with open('/filler', 'wb', buffering=0) as file:
        while True:
            size += file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
except OSError as error:
    print(errno.errorcode[error.errno], size >> 20)
"""
MORE = FILL.replace("/filler", "/more")
COUNT = "import itertools, os, time\nfor n in itertools.count():\n    open('/n', 'w').write(str(n))\n    os.rename('/n', '/count')\n    time.sleep(0.01)"
ADDRESS = (
    "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('{host}', 9)); print(s.getsockname()[0])"
)
HOLD = """
import socket, time
held = [socket.socket(type=socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_DGRAM)]
held[0].connect(('{host}', 53))
held[1].bind(('{own}', 7001))
open('/ready', 'w').close()
time.sleep(600)
"""
INSIST = """
import os, socket, time
told = False
while True:
    try:
        socket.create_connection(('{host}', 80), 60)
    except OSError as error:
        # Once: nobody stops this program for the checkpoint, and a file that changes meanwhile would not be found again.
        if not told:
            open('/refused.new', 'w').write(type(error).__name__)
            os.rename('/refused.new', '/refused')
        told = True
"""


# Fills socket buffers, of which a sentry makes several copies when it writes its memory.
FULL_BUFFERS = """
import socket, time
listening = socket.create_server(('127.0.0.1', 5000), backlog=2048)
held = []
for number in range(700):
    near = socket.create_connection(('127.0.0.1', 5000))
    far, _ = listening.accept()
    near.setblocking(False)
    try:
        sent = near.send(bytes(100_000))
    except BlockingIOError:
        pass
    held += [near, far]
open('/filled', 'w').close()
time.sleep(3600)
"""
DELETED = """
import os, time

file = open('/gone', 'w')
os.unlink('/gone')
open('/unlinked', 'w').close()
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separate]:
    with started(Separate(tmp_path_factory.mktemp("broker"))) as one:
        yield one


@pytest.fixture
async def site(broker: Separate) -> AsyncIterator[Site]:
    async with cleared(broker) as one:
        yield one


def python(site: Site, body: str, code: str) -> str:
    with site.peer(body) as peer:
        done = peer.run(*GUEST_PYTHON, code)
    assert done.exit["code"] == 0, done.stderr
    return done.stdout.decode()


def groups_named(*names: str) -> list[Path]:
    """Every cgroup whose path ends in these. Not by a pattern: that stumbles over those that go meanwhile."""
    tops = [Path(top) for top, _, _ in os.walk("/sys/fs/cgroup")]
    return [top for top in tops if top.parts[-len(names) :] == names]


def start(site: Site, body: str, code: str, sign: str) -> None:
    """Start a program that goes on, and wait until it has left a sign."""
    with site.peer(body) as peer:
        peer.start(*GUEST_PYTHON, code)
        root = site.settings.broker_dir / "disks/machines" / body
        peer.until((root / sign).exists, f"{sign} is there")


async def keep(site: Site, machine: str, kind: str = "full") -> str:
    name = new_id("snp")
    await site.call("snapshot", machine=machine, snapshot=name, kind=kind)
    return name


async def boot(site: Site, machine: str, **changes: Any) -> dict[str, Any]:
    fields = {"template": site.template, "driver": "gvisor", "resources": RESOURCES, "hostname": "guest", **changes}
    return await site.call("boot", machine=machine, **fields)


def link_of(broker: Separate, machine: str) -> Any:
    import json

    journal = broker.settings.broker_dir / "machines" / machine / "journal.json"
    return link(broker.settings.instance, json.loads(journal.read_text())["link"])


async def test_copies_go_on_from_the_moment_of_the_snapshot_and_so_does_the_machine(
    broker: Separate, site: Site
) -> None:
    machine = await site.boot()
    start(site, machine, COUNT, "count")
    name = await keep(site, machine)
    then = int(python(site, machine, "print(open('/count').read())"))
    copies = [new_id("sbx") for _ in range(2)]
    for number, copy in enumerate(copies):
        answer = await boot(
            site, copy, snapshot=name, hostname=f"copy-{number}", resources={**RESOURCES, "memory_mib": 300}
        )
        assert answer["restored"]
        assert "machine-again" not in answer["timings"]
    seen = {}
    for one in [machine, *copies]:
        own = link_of(broker, one)
        assert python(site, one, ADDRESS.format(host=own.host_v4)).strip() == str(own.guest_v4)
        seen[one] = python(site, one, "print(open('/proc/meminfo').readline().split()[1])").strip()
        before = int(python(site, one, "print(open('/count').read())"))
        with site.peer(one) as peer:
            look = (*GUEST_PYTHON, "print(open('/count').read())")
            peer.until(lambda: int(peer.run(*look).stdout) > before, "it goes on counting")  # noqa: B023
    assert then >= 0
    assert [seen[one] for one in copies] == [str(300 * 1024)] * 2
    assert len({str(link_of(broker, one).guest_v4) for one in [machine, *copies]}) == 3
    python(site, copies[0], "open('/mine', 'w').close()")
    for one in (machine, copies[1]):
        assert python(site, one, "import os; print(os.path.exists('/mine'))") == "False\n"


async def test_sixteen_machines_from_one_snapshot_at_once(site: Site) -> None:
    machine = await site.boot()
    python(site, machine, "open('/then', 'w').write('then')")
    name = await keep(site, machine)
    await site.call("destroy", machine=machine)
    copies = [new_id("sbx") for _ in range(16)]
    await asyncio.gather(*(boot(site, copy, snapshot=name) for copy in copies))
    for copy in copies:
        assert python(site, copy, "print(open('/then').read())") == "then\n"
    assert len({seen["pid"] for seen in await site.call("machines")}) == 16


async def test_a_suspended_machine_shares_its_image_with_its_snapshot_and_wakes_from_its_own(site: Site) -> None:
    machine = await site.boot()
    python(site, machine, "open('/then', 'w').write('then')")
    await site.call("suspend", machine=machine)
    name = await keep(site, machine)
    image = site.image(machine) / "pages.img"
    assert image.stat().st_nlink == 2
    await site.call("wake", machine=machine)
    python(site, machine, "open('/then', 'w').write('now')")
    copy = new_id("sbx")
    await boot(site, copy, snapshot=name)
    assert python(site, copy, "print(open('/then').read())") == "then\n"


async def test_of_a_stopped_machine_the_disk_is_kept(site: Site) -> None:
    machine = await site.boot()
    python(site, machine, "open('/then', 'w').write('then')")
    await site.call("stop", machine=machine)
    name = await keep(site, machine, "disk")
    copy = new_id("sbx")
    answer = await boot(site, copy, snapshot=name)
    assert not answer["restored"]
    assert python(site, copy, "print(open('/then').read())") == "then\n"


async def test_a_full_disk_can_be_kept_and_counts_against_the_disk_of_what_is_made_of_it(site: Site) -> None:
    """F10."""
    machine = await site.boot(disk_mib=48)
    assert python(site, machine, FILL).split()[0] in {"EDQUOT", "ENOSPC"}
    full, disk = await keep(site, machine), await keep(site, machine, "disk")
    listed = {one["snapshot"]: one["bytes"] for one in await site.call("snapshots")}
    assert 40 << 20 < listed[disk] < 60 << 20
    assert listed[full] > listed[disk]
    assert python(site, machine, "print('goes on')") == "goes on\n"
    for name in (full, disk):
        with pytest.raises(InvalidRequest) as caught:
            await boot(site, new_id("sbx"), snapshot=name, resources={**RESOURCES, "disk_mib": 32})
        assert caught.value.details["field"] == "resources.disk_mib"
        larger = new_id("sbx")
        await boot(site, larger, snapshot=name, resources={**RESOURCES, "disk_mib": 80})
        error, more = python(site, larger, MORE).split()
        assert error in {"EDQUOT", "ENOSPC"}
        assert 16 <= int(more) <= 48
        usage = (await site.call("inspect", machine=larger))["usage"]["disk_mib"]
        assert 64 <= usage <= 90


async def test_a_full_store_refuses_a_snapshot_and_old_ones_and_the_machine_are_as_before(site: Site) -> None:
    """F10: the store of memory, found full beforehand and while writing, and the store of disks."""
    machine = await site.boot()
    python(site, machine, "open('/then', 'w').write('then')")
    old = await keep(site, machine)
    store = site.image(machine).parent
    with mounted_over(store, "1m"), pytest.raises(HostFull) as beforehand:
        await keep(site, machine)
    ballast = "import os\nfd = os.open('/dev/shm/b', os.O_CREAT | os.O_WRONLY)\nfor _ in range(100): os.write(fd, os.urandom(1 << 20))"
    python(site, machine, ballast)
    with mounted_over(store, "170m"):
        subprocess.run(["fallocate", "-l", "80M", store / "other"], check=True)
        with pytest.raises(HostFull) as writing:
            await keep(site, machine)
        assert {path.name for path in store.iterdir()} == {"other"}
    disks = site.settings.broker_dir / "disks"
    try:
        fill_up(disks)
        with pytest.raises(HostFull) as disk:
            await keep(site, machine, "disk")
    finally:
        (disks / "other").unlink()
    assert {caught.value.code for caught in (beforehand, writing, disk)} == {"snapshot-store-full"}
    assert [one["snapshot"] for one in await site.call("snapshots")] == [old]
    assert python(site, machine, "print('as before')") == "as before\n"
    copy = new_id("sbx")
    await boot(site, copy, snapshot=old)
    assert python(site, copy, "print(open('/then').read())") == "then\n"


@contextlib.contextmanager
def mounted_over(directory: Path, size: str) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


def fill_up(directory: Path) -> None:
    """Leave a file system next to nothing."""
    piece, size = 16 << 20, 0
    with (directory / "other").open("wb") as file, contextlib.suppress(OSError):
        while True:
            os.posix_fallocate(file.fileno(), size, piece)
            size += piece


# --- addresses and connections


async def test_a_suspended_machine_keeps_its_address_and_nobody_else_gets_it(broker: Separate, site: Site) -> None:
    machine = await site.boot()
    own = link_of(broker, machine)
    start(site, machine, HOLD.format(host=own.host_v4, own=own.guest_v4), "ready")
    await site.call("suspend", machine=machine)
    others = [await site.boot() for _ in range(3)]
    answer = await site.call("wake", machine=machine)
    assert "machine-again" not in answer["timings"]
    assert link_of(broker, machine) == own
    assert own.guest_v4 not in {link_of(broker, one).guest_v4 for one in others}
    assert python(site, machine, ADDRESS.format(host=own.host_v4)).strip() == str(own.guest_v4)


class LinkedFake(FakeDriver):
    """Machines as processes, each with a link that it does not use."""

    capabilities = dataclasses.replace(FakeDriver.capabilities, needs=frozenset({Need.LINK}))


async def test_the_link_of_one_that_sleeps_is_given_to_another_before_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := installation.unfit():
        pytest.skip(reason)
    monkeypatch.setattr(links, "LINKS_MAX", 2)
    settings = settings_in(tmp_path / "data", tmp_path / "run")
    async with serving(settings, {"fake": LinkedFake(tmp_path / "fake")}) as (one, machines):
        sleeper, other = await one.boot(), await one.boot()
        await one.call("suspend", machine=sleeper)
        await until(lambda: not machines.is_unreleased(sleeper), "its link is not in use any more")
        had = machines.entries[sleeper].link
        third = await one.boot()
        assert machines.entries[third].link == had
        with pytest.raises(HostFull) as caught:
            await one.call("wake", machine=sleeper)
        assert caught.value.code == "links-full"
        await one.call("destroy", machine=other)
        await one.call("wake", machine=sleeper)
        entry = machines.entries[sleeper]
        assert (entry.former_links, entry.link != had) == ((had,), True)
        for machine in (sleeper, third):
            await one.call("destroy", machine=machine)
    subprocess.run(["nft", "delete", "table", "inet", settings.instance], check=True)


async def test_a_copy_whose_memory_has_sockets_with_its_sources_address_comes_up_under_its_own(
    broker: Separate, site: Site
) -> None:
    """L15: such an image ends the sentry on a link without the address; and a copy of the copy has two such."""
    machine = await site.boot()
    own = link_of(broker, machine)
    start(site, machine, HOLD.format(host=own.host_v4, own=own.guest_v4), "ready")
    for _ in range(2):
        name, copy = await keep(site, machine), new_id("sbx")
        answer = await boot(site, copy, snapshot=name)
        assert answer["timings"]["machine-again"] > 0
        mine = link_of(broker, copy)
        assert mine != own
        assert python(site, copy, ADDRESS.format(host=mine.host_v4)).strip() == str(mine.guest_v4)
        machine = copy
    await site.call("suspend", machine=copy)
    await site.call("wake", machine=copy)
    assert python(site, copy, "print('woken')") == "woken\n"


async def test_what_is_not_let_through_is_refused_at_once_so_that_it_never_keeps_a_machine_from_its_image(
    broker: Separate, site: Site
) -> None:
    """A connection that waited for an answer could not be written; a program here does nothing but connect."""
    machine = await site.boot()
    start(site, machine, INSIST.format(host=link_of(broker, machine).host_v4), "refused")
    root = site.settings.broker_dir / "disks/machines" / machine
    assert (root / "refused").read_text() == "ConnectionRefusedError"
    for _ in range(3):
        await site.call("suspend", machine=machine)
        await site.call("wake", machine=machine)
    assert python(site, machine, "print('woken')") == "woken\n"


# --- spares


async def test_a_claimed_spare_has_the_limits_of_its_machine(broker: Separate, site: Site) -> None:
    spare, machine = new_id("sbx"), new_id("sbx")
    await boot(site, spare, spare=True)
    resources = {"cpus": 0.5, "memory_mib": 256, "disk_mib": 32, "pids": 300}
    answer = await site.call("claim", machine=machine, spare=spare, resources=resources, hostname="mine")
    assert answer["body"] == spare
    error, written = python(site, spare, FILL).split()
    assert error in {"EDQUOT", "ENOSPC"}
    assert 16 <= int(written) <= 40
    groups = {path.name: path for group in groups_named(broker.settings.instance, spare) for path in group.iterdir()}
    assert groups["pids.max"].read_text().strip() == str(broker.driver().limits(Resources(pids=300)).pids)
    await site.call("suspend", machine=machine)
    await site.call("wake", machine=machine)
    assert python(site, spare, "import os; print(os.path.exists('/filler'))") == "True\n"
    await site.call("destroy", machine=machine)
    assert site.strays() == []


async def test_spares_from_one_warm_snapshot_are_machines_of_their_own(broker: Separate, site: Site) -> None:
    first = await site.boot()
    name = await keep(site, first)
    await site.call("destroy", machine=first)
    spares, machines = [new_id("sbx") for _ in range(4)], [new_id("sbx") for _ in range(4)]
    await asyncio.gather(*(boot(site, spare, snapshot=name, spare=True) for spare in spares))
    for machine, spare in zip(machines, spares, strict=True):
        await site.call("claim", machine=machine, spare=spare, resources=RESOURCES, hostname="h")
        python(site, spare, f"open('/{machine}', 'w').close()")
    for spare in spares:
        assert python(site, spare, "import os; print(sum(n.startswith('sbx') for n in os.listdir('/')))") == "1\n"
    assert {seen["machine"] for seen in await site.call("machines")} == set(machines)


# --- strays


async def test_everything_that_belongs_to_nobody_is_found_and_removed(broker: Separate, site: Site) -> None:
    """L12: processes without state, state without processes, groups, links, channels, disks, images, snapshots."""
    machine = await site.boot()
    instance, settings = broker.settings.instance, broker.settings
    stray, orphan, kept = await site.boot(), new_id("sbx"), new_id("snp")
    pid = (await site.call("inspect", machine=stray))["pid"]
    broker.kill()
    shutil.rmtree(settings.broker_dir / "machines" / stray)
    for path in (settings.run_dir / "broker").rglob(f"*{stray}*"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
    broker.start()
    assert processes.identify(pid) is None
    assert await site.state(machine) == "running"
    disks = settings.broker_dir / "disks"
    copy_subvolume(disks / "machines" / machine, disks / "machines" / orphan)
    copy_subvolume(disks / "machines" / machine, disks / "snapshots" / kept, read_only=True)
    (site.image(orphan)).mkdir()
    (settings.channels_dir / orphan).mkdir()
    subprocess.run(["ip", "netns", "add", f"{instance}-{orphan}"], check=True)
    subprocess.run(["ip", "link", "add", f"{instance}-07ff", "type", "veth"], check=True)
    groups = [path / orphan for path in groups_named(instance)]
    for group in groups:
        group.mkdir()
    wanted = {
        *((kind, orphan) for kind in ("cgroup", "channel", "disk", "image", "link")),
        *(("snapshot", kept), ("link", f"{instance}-07ff")),
    }
    for dry_run in (True, False):
        found = (await site.call("gc", dry_run=dry_run))["strays"]
        assert {(one["kind"], one["name"]) for one in found} == wanted
        assert {one["removed"] for one in found} == {not dry_run}
    assert (await site.call("gc", dry_run=False))["strays"] == []
    assert not any(group.exists() for group in groups)
    assert f"{instance}-07ff" not in [name for _, name in socket.if_nameindex()]
    assert python(site, machine, "print('untouched')") == "untouched\n"


async def test_a_snapshot_of_a_machine_whose_process_has_ended_says_so(site: Site) -> None:
    machine = await site.boot()
    os.kill((await site.call("inspect", machine=machine))["pid"], 9)
    with pytest.raises(SpaceError) as caught:
        await keep(site, machine)
    assert caught.value.code in {"machine-lost", "conflict"}
    await site.until(machine, "exited")


async def test_writing_its_memory_does_not_end_a_machine_that_holds_full_socket_buffers(site: Site) -> None:
    machine = await site.boot(memory_mib=256)
    start(site, machine, FULL_BUFFERS, "filled")
    await keep(site, machine)
    assert await site.state(machine) == "running"
    assert python(site, machine, "print('on')") == "on\n"
    await site.call("suspend", machine=machine)
    await site.call("wake", machine=machine)
    assert python(site, machine, "print('on')") == "on\n"


async def test_a_deleted_file_that_is_open_refuses_the_image_says_why_and_harms_nothing(site: Site) -> None:
    machine = await site.boot()
    start(site, machine, DELETED, "unlinked")
    for attempt in (site.call("suspend", machine=machine), keep(site, machine)):
        with pytest.raises(Conflict) as refused:
            await attempt
        assert refused.value.code == "open-deleted-file"
    assert python(site, machine, "print('on')") == "on\n"
    name = await keep(site, machine, "disk")
    assert name

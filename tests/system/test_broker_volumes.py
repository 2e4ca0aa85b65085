"""Volumes through the broker on gVisor: shared by machines, kept over suspend, of their own size, and shut in."""

# ruff: noqa: ASYNC221 - a test has nothing else to do while a program runs

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from space.errors import SpaceError
from space.model.ids import new_id
from tests.brokers import GUEST_PYTHON, RESOURCES, Separate, Site, cleared, started

FILL = """
import errno, os, sys
size = 0
try:
    with open('/data/filler', 'wb', buffering=0) as file:
        while True:
            size += file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
except OSError as error:
    print(errno.errorcode[error.errno], size >> 20)
"""
HOLD = """
import time
file = open('/data/held')
open('/data/opened', 'w').close()
while True:
    time.sleep(1)
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separate]:
    with started(Separate(tmp_path_factory.mktemp("broker"))) as one:
        yield one


@pytest.fixture
async def site(broker: Separate) -> AsyncIterator[Site]:
    async with cleared(broker) as one:
        yield one


@pytest.fixture
async def volume(site: Site) -> AsyncIterator[str]:
    made = new_id("vol")
    await site.call("make-volume", volume=made, size_mib=16)
    yield made
    for row in await site.call("machines"):
        await site.call("destroy", machine=row["machine"])
    await site.call("drop-volume", volume=made)
    assert [row["volume"] for row in await site.call("volumes")] == []


async def boot(site: Site, volume: str, path: str = "/data", **changes: Any) -> str:
    fields = {
        "machine": new_id("sbx"),
        "template": site.template,
        "driver": site.driver,
        "resources": RESOURCES,
        "hostname": "guest",
        "volumes": [{"volume": volume, "path": path}],
    }
    fields |= changes
    await site.call("boot", **fields)
    return fields["machine"]


def python(site: Site, machine: str, code: str) -> str:
    with site.peer(machine) as peer:
        done = peer.run(*GUEST_PYTHON, code)
    assert done.exit["code"] == 0, done.stderr
    return done.stdout.decode()


def place(site: Site, volume: str) -> Path:
    return site.settings.broker_dir / "disks" / "volumes" / volume


async def test_two_machines_see_at_once_what_either_writes(site: Site, volume: str) -> None:
    one, other = await boot(site, volume), await boot(site, volume, "/srv/deep/inside")
    python(site, one, "open('/data/note', 'w').write('first')")
    assert python(site, other, "print(open('/srv/deep/inside/note').read())") == "first\n"
    python(site, other, "open('/srv/deep/inside/note', 'w').write('second, longer')")
    assert python(site, one, "print(open('/data/note').read())") == "second, longer\n"
    python(site, one, "import os; os.unlink('/data/note')")
    assert python(site, other, "import os; print(os.listdir('/srv/deep/inside'))") == "[]\n"


async def test_a_machine_that_slept_sees_what_others_wrote_meanwhile(site: Site, volume: str) -> None:
    one, other = await boot(site, volume), await boot(site, volume)
    python(site, one, "open('/data/mine', 'w').write('before')")
    await site.call("suspend", machine=one)
    python(site, other, "open('/data/mine', 'a').write(' and after'); open('/data/new', 'w').write('new')")
    await site.call("wake", machine=one)
    assert python(site, one, "print(open('/data/mine').read(), open('/data/new').read())") == "before and after new\n"
    await site.call("stop", machine=one)
    await site.call("start", machine=one)
    assert python(site, one, "print(open('/data/new').read())") == "new\n"


async def test_a_machine_whose_open_file_of_a_volume_is_gone_can_be_started_if_not_woken(
    site: Site, volume: str
) -> None:
    one, other = await boot(site, volume), await boot(site, volume)
    python(site, other, "open('/data/held', 'w').close()")
    with site.peer(one) as peer:
        peer.start(*GUEST_PYTHON, HOLD)
        peer.until(
            lambda: peer.run(*GUEST_PYTHON, "import os; print(os.path.exists('/data/opened'))").stdout == b"True\n",
            "it is open",
        )
    await site.call("suspend", machine=one)
    python(site, other, "import os; os.unlink('/data/held')")
    with pytest.raises(SpaceError) as refused:
        await site.call("wake", machine=one)
    assert refused.value.code == "volume-changed"
    assert await site.state(one) == "suspended"
    await site.call("start", machine=one)
    assert python(site, one, "import os; print(os.path.exists('/data/opened'))") == "True\n"


async def test_a_volume_holds_its_size_and_the_rest_of_the_host_has_room(site: Site, volume: str) -> None:
    one, other = await boot(site, volume), await boot(site, volume)
    outcome, size = python(site, one, FILL).split()
    assert outcome in {"EDQUOT", "ENOSPC"}
    assert 10 <= int(size) <= 16 + 4
    assert python(site, other, "print(open('/fine', 'w').write('x' * 1000))") == "1000\n"


async def test_a_link_in_a_volume_leads_nowhere_but_into_the_machine(site: Site, volume: str) -> None:
    one, other = await boot(site, volume), await boot(site, volume)
    marker = site.settings.data_dir / "owner"
    python(
        site,
        one,
        f"import os\nos.symlink('{marker}', '/data/absolute')\nos.symlink('../../../../../{marker}', '/data/up')\n"
        "os.symlink('/etc/hostname', '/data/name')",
    )
    assert (place(site, volume) / "absolute").readlink() == marker, "it would lead to a file of the host"
    seen = python(
        site,
        other,
        "import os\nfor n in ('absolute', 'up'):\n    print(os.path.exists('/data/' + n))\n"
        "print(os.path.samefile('/data/name', '/etc/hostname'), sorted(os.listdir('/data/..')) == sorted(os.listdir('/')))",
    )
    assert seen.split() == ["False", "False", "True", "True"]


async def test_a_place_that_the_guest_made_a_link_is_mounted_within_the_machine(site: Site, volume: str) -> None:
    one = await boot(site, volume)
    outside = site.settings.data_dir / "escaped"
    await site.call("stop", machine=one)
    root = site.settings.broker_dir / "disks/machines" / one
    (root / "data").rmdir()
    (root / "data").symlink_to(f"../../../../../../../..{outside}")
    await site.call("start", machine=one)
    python(site, one, "open('/data/inside', 'w').write('x')")
    assert (place(site, volume) / "inside").read_text() == "x"
    assert not outside.exists()


async def test_a_volume_in_use_is_not_dropped(site: Site, volume: str) -> None:
    one = await boot(site, volume)
    await site.call("suspend", machine=one)
    with pytest.raises(SpaceError) as refused:
        await site.call("drop-volume", volume=volume)
    assert refused.value.code == "volume-in-use"
    assert place(site, volume).is_dir()


async def test_without_its_volume_a_machine_is_not_made(site: Site) -> None:
    with pytest.raises(SpaceError) as refused:
        await boot(site, new_id("vol"))
    assert refused.value.code == "volume-not-found"
    assert await site.call("machines") == []


@pytest.mark.parametrize(
    "path", ["/", "data", "/proc/x", "/sys", "/dev/shm", "/.space/bin", "/a/../b", "/a//b", "/a\nb"]
)
async def test_no_volume_is_mounted_at(site: Site, volume: str, path: str) -> None:
    with pytest.raises(SpaceError) as refused:
        await boot(site, volume, path)
    assert refused.value.code == "invalid-request"


async def test_volumes_outlive_the_broker_and_one_half_made_is_gone(broker: Separate, site: Site, volume: str) -> None:
    machine = await boot(site, volume)
    python(site, machine, "open('/data/note', 'w').write('kept')")
    half = place(site, f".{new_id('vol')}")
    subprocess.run(["btrfs", "subvolume", "create", half], check=True, stdout=subprocess.DEVNULL)
    broker.kill()
    broker.start()
    assert not half.exists()
    assert python(site, machine, "print(open('/data/note').read())") == "kept\n"
    await site.call("make-volume", volume=volume, size_mib=99)
    assert python(site, machine, "print(open('/data/note').read())") == "kept\n", "asked again it stays"

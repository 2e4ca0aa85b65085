"""Machines through the broker on gVisor: disks, limits, images, and what is left of them on the host. No node, no api."""

# ruff: noqa: ASYNC221 - a test has nothing else to do while a program runs

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from space.broker import setup
from space.broker.defaults import Defaults
from space.drivers import processes
from space.errors import SpaceError
from space.model.ids import new_id
from space.model.sandbox import Resources
from tests.brokers import GUEST_PYTHON, Separate, Site, cleared, started, until

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
# In place: whenever it is stopped, a whole number is there. And nothing stops it for a checkpoint, after which a file that
# it has open must still have its name.
COUNTER = """
import itertools, os, time
file = os.open('/count', os.O_WRONLY | os.O_CREAT)
for n in itertools.count():
    os.pwrite(file, b'%09d' % n, 0)
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separate]:
    with started(Separate(tmp_path_factory.mktemp("broker"))) as one:
        yield one


@pytest.fixture
async def site(broker: Separate) -> AsyncIterator[Site]:
    async with cleared(broker) as one:
        yield one


def python(site: Site, machine: str, code: str) -> str:
    with site.peer(machine) as peer:
        done = peer.run(*GUEST_PYTHON, code)
    assert done.exit["code"] == 0, done.stderr
    return done.stdout.decode()


def resident(site: Site) -> list[str]:
    """What machines have on the host beside files."""
    return [stray for stray in site.strays() if not stray.startswith("file ")]


async def test_ten_times_suspended_and_woken_every_file_is_there(site: Site) -> None:
    """L1."""
    machine = await site.boot()
    for cycle in range(10):
        python(site, machine, f"open('/file-{cycle}', 'w').write('{cycle}' * 1000)")
        await site.call("suspend", machine=machine)
        await site.call("wake", machine=machine)
    names = [f"file-{cycle}" for cycle in range(10)]
    assert (
        python(site, machine, "import os; print(*sorted(n for n in os.listdir('/') if n.startswith('file-')))").split()
        == names
    )


async def test_processes_go_on_after_a_wake_and_are_gone_after_a_stop(site: Site) -> None:
    machine = await site.boot()
    with site.peer(machine) as peer:
        peer.start(*GUEST_PYTHON, COUNTER)
        peer.until(
            lambda: peer.run(*GUEST_PYTHON, "import os; print(os.path.getsize('/count') > 0)").stdout == b"True\n",
            "counting",
        )
    await site.call("suspend", machine=machine)
    await site.call("wake", machine=machine)
    before = int(python(site, machine, "print(open('/count').read())"))
    with site.peer(machine) as peer:
        peer.until(lambda: int(peer.run(*GUEST_PYTHON, "print(open('/count').read())").stdout) > before, "it goes on")
    await site.call("stop", machine=machine)
    await site.call("start", machine=machine)
    with site.peer(machine) as peer:
        assert peer.welcome is not None
        assert peer.welcome["commands"] == []
    assert int(python(site, machine, "print(open('/count').read())")) >= before


async def test_a_suspended_machine_has_nothing_on_the_host_but_its_disk_and_image(site: Site) -> None:
    machine = await site.boot()
    seen = await site.call("inspect", machine=machine)
    await site.call("suspend", machine=machine)
    await until(lambda: resident(site) == [], "all else is given back soon after")
    assert processes.identify(seen["pid"]) is None
    assert sorted(path.name for path in site.image(machine).parent.iterdir()) == [machine]
    await site.call("wake", machine=machine)
    await until(lambda: list(site.image(machine).parent.iterdir()) == [], "the image goes once that is answered")


async def test_a_disk_holds_what_was_promised_and_not_much_more(site: Site) -> None:
    machine = await site.boot(disk_mib=64)
    error, written = python(site, machine, FILL).split()
    assert error in {"EDQUOT", "ENOSPC"}
    assert 48 <= int(written) <= 80
    usage = (await site.call("inspect", machine=machine))["usage"]
    assert 48 <= usage["disk_mib"] <= 80
    python(site, machine, "import os; os.unlink('/filler'); open('/small', 'w').write('x')")


async def test_a_full_disk_does_not_keep_a_machine_from_being_suspended(site: Site) -> None:
    """F10: a snapshot needs no room in the guest."""
    machine = await site.boot(disk_mib=32)
    python(site, machine, FILL)
    await site.call("suspend", machine=machine)
    await site.call("wake", machine=machine)
    assert int(python(site, machine, "import os; print(os.stat('/filler').st_size)")) > 16 << 20


async def test_a_full_store_for_images_refuses_the_suspend_and_changes_nothing(site: Site) -> None:
    """F10: found out beforehand, and found out while writing."""
    machine = await site.boot()
    store = site.image(machine).parent
    ballast = "import os\nfd = os.open('/dev/shm/ballast', os.O_CREAT | os.O_WRONLY)\nfor _ in range(100): os.write(fd, os.urandom(1 << 20))"
    for size, told in (("1m", "beforehand"), ("170m", "while writing")):
        if told == "while writing":
            python(site, machine, ballast)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", store], check=True)
        try:
            if told == "while writing":
                subprocess.run(["fallocate", "-l", "80M", store / "other"], check=True)
            with pytest.raises(SpaceError) as caught:
                await site.call("suspend", machine=machine)
            assert caught.value.code == "snapshot-store-full", told
            assert {path.name for path in store.iterdir()} <= {"other"}, told
        finally:
            subprocess.run(["umount", store], check=True)
        assert await site.state(machine) == "running"
        assert python(site, machine, "print('as before')") == "as before\n"
    await site.call("suspend", machine=machine)
    await site.call("wake", machine=machine)
    assert python(site, machine, "print('woken')") == "woken\n"


async def test_a_paused_machine_stays_paused_when_its_suspend_is_refused(site: Site) -> None:
    machine = await site.boot()
    await site.call("pause", machine=machine)
    store = site.image(machine).parent
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", store], check=True)
    try:
        with pytest.raises(SpaceError):
            await site.call("suspend", machine=machine)
    finally:
        subprocess.run(["umount", store], check=True)
    assert await site.state(machine) == "paused"
    await site.call("resume", machine=machine)


async def test_a_machine_that_is_killed_is_found_exited_and_can_be_started_again(site: Site) -> None:
    machine = await site.boot()
    os.kill((await site.call("inspect", machine=machine))["pid"], signal.SIGKILL)
    assert (await site.until(machine, "exited"))["cause"] == "machine-exited"
    await site.call("start", machine=machine)
    assert python(site, machine, "print('again')") == "again\n"


async def test_a_machine_gets_the_processor_time_it_has_and_no_more(broker: Separate, site: Site) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs more processors than the machine may use")
    machine = await site.boot(cpus=0.5)
    spin = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
    before = (await site.call("inspect", machine=machine))["usage"]["cpu_s"]
    began = time.monotonic()
    with site.peer(machine) as peer:
        for command in [peer.start(*GUEST_PYTHON, spin) for _ in range(6)]:
            peer.finish(command, 60)
    took = time.monotonic() - began
    used = (await site.call("inspect", machine=machine))["usage"]["cpu_s"] - before
    allowed = broker.driver().limits(Resources(cpus=0.5)).cpus
    assert 0.5 < used < allowed * took * 1.1 + 0.2


async def test_a_fork_bomb_stays_within_the_machines_share_of_host_tasks(broker: Separate, site: Site) -> None:
    machine = await site.boot(pids=64)
    limit = broker.driver().limits(Resources(pids=64)).pids
    bomb = "import threading, time\nfor _ in range(2000):\n    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n    except Exception: pass"
    with site.peer(machine) as peer:
        peer.start(*GUEST_PYTHON, bomb)
        most = 0
        for _ in range(100):
            usage = (await site.call("inspect", machine=machine)).get("usage", {})
            most = max(most, usage.get("pids", 0))
            peer.step(0.01)
    assert 0 < most <= limit


async def test_machines_of_one_template_do_not_see_each_others_files(site: Site) -> None:
    first, second = await site.boot(), await site.boot()
    python(site, first, "open('/mine', 'w').write('x')")
    assert python(site, second, "import os; print(os.path.exists('/mine'))") == "False\n"
    third = await site.boot()
    assert python(site, third, "import os; print(os.path.exists('/mine'))") == "False\n"


@pytest.mark.parametrize("verbs", [(), ("pause",), ("suspend",), ("stop",), ("pause", "suspend"), ("suspend", "wake")])
async def test_destroy_leaves_nothing_whatever_the_state(site: Site, verbs: tuple[str, ...]) -> None:
    machine = await site.boot()
    for verb in verbs:
        await site.call(verb, machine=machine)
    await site.call("destroy", machine=machine)
    assert site.strays() == []
    kept = [path for path in site.settings.broker_dir.rglob("*") if machine in path.name]
    assert kept == []
    assert [path for path in site.settings.run_dir.rglob("*") if machine in path.name] == []


async def test_a_wake_and_a_destroy_at_once_leave_nothing(site: Site) -> None:
    """L5 at the level of the broker."""
    machine = await site.boot()
    await site.call("suspend", machine=machine)
    woken = asyncio.ensure_future(site.call("wake", machine=machine))
    await until(lambda: bool(list(Path("/run/netns").glob(f"*{machine}"))) or woken.done(), "the wake is under way")
    await site.call("destroy", machine=machine)
    await asyncio.gather(woken, return_exceptions=True)
    assert await site.state(machine) == "absent"
    assert site.strays() == []


async def test_a_boot_that_fails_leaves_nothing(broker: Separate, site: Site) -> None:
    agent = broker.settings.guest_dir
    machine = new_id("sbx")
    site.template = "sha256:" + "0" * 64
    with pytest.raises(SpaceError) as caught:
        await site.boot(machine)
    assert caught.value.code == "not-found"
    site.template = broker.template
    blocker = Path("/run/netns") / f"{broker.settings.instance}-{machine}"
    blocker.mkdir()
    try:
        with pytest.raises(SpaceError):
            await site.boot(machine)
    finally:
        blocker.rmdir()
    assert agent.is_dir()
    await site.call("destroy", machine=machine)
    assert site.strays() == []


async def test_the_same_template_imported_again_is_the_same_and_old_ones_stay_usable(
    broker: Separate, site: Site
) -> None:
    again = await setup.import_template(broker.settings, broker.directory / "root", "tiny", "latest", Defaults())
    assert again.digest == broker.template
    (broker.directory / "root/new").write_text("x")
    try:
        newer = await setup.import_template(broker.settings, broker.directory / "root", "tiny", "latest", Defaults())
    finally:
        (broker.directory / "root/new").unlink()
    listed = await site.call("templates")
    named = {one["digest"]: (one["name"], one["tag"]) for one in listed if "name" in one}
    assert named.pop(newer.digest) == ("tiny", "latest")
    assert [name for name, _ in named.values()] == ["scratch"]
    assert broker.template in {one["digest"] for one in listed}
    old = await site.boot()
    assert python(site, old, "import os; print(os.path.exists('/new'))") == "False\n"
    site.template = newer.digest
    new = await site.boot()
    assert python(site, new, "import os; print(os.path.exists('/new'))") == "True\n"
    again = await setup.import_template(broker.settings, broker.directory / "root", "tiny", "latest", Defaults())
    named = {one.get("name"): one["digest"] for one in await site.call("templates")}
    assert named["tiny"] == again.digest == broker.template


async def test_taken_down_nothing_is_left_but_data_and_brought_up_again_the_disk_is_there(
    broker: Separate, site: Site
) -> None:
    machine = await site.boot()
    suspended, paused = await site.boot(), await site.boot()
    await site.call("pause", machine=paused)
    python(site, machine, "open('/kept', 'w').write('kept')")
    python(site, suspended, "open('/kept', 'w').write('kept, too')")
    await site.call("suspend", machine=suspended)
    with pytest.raises(SpaceError, match="running"):
        await setup.unmount(broker.settings)
    broker.stop()
    await setup.unmount(broker.settings)
    await setup.unmount(broker.settings)
    assert [stray for stray in site.strays("all") if "directory" not in stray] == []
    broker.start()
    for one in (machine, paused):
        seen = await site.call("inspect", machine=one)
        assert (seen["state"], seen["cause"]) == ("exited", "host-lost")
    await site.call("start", machine=machine)
    assert python(site, machine, "print(open('/kept').read())") == "kept\n"
    await site.call("wake", machine=suspended)
    assert python(site, suspended, "print(open('/kept').read())") == "kept, too\n"


async def test_many_machines_at_once_all_come_up(site: Site) -> None:
    machines = await asyncio.gather(*(site.boot() for _ in range(12)))
    for machine in machines:
        assert python(site, machine, "print('up')") == "up\n"
    pids = {seen["pid"] for seen in await site.call("machines")}
    assert len(pids) == 12
    await asyncio.gather(*(site.call("destroy", machine=machine) for machine in machines))
    assert site.strays() == []

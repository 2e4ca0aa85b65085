"""Snapshots, spares, admission and the sweep at the broker. On the fake, so without disks, links and limits."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from space.broker import sweep as sweeping
from space.broker.machines import Machines
from space.drivers.base import Machine
from space.errors import Conflict, HostError, HostFull, InvalidRequest, NotFound
from space.model.ids import new_id
from space.model.sandbox import Resources
from space.testing import FakeDriver
from tests.brokers import DIGEST, RESOURCES, Site, serving, settings_in, until

Place = tuple[Site, Machines]


@contextlib.asynccontextmanager
async def broker(directory: Path, **changes: object) -> AsyncIterator[Place]:
    settings = settings_in(directory / "data", directory / "run", **changes)
    async with serving(settings, {"fake": FakeDriver(directory / "fake")}) as (site, machines):
        yield site, machines
        for machine in await site.call("machines"):
            await site.call("destroy", machine=machine["machine"])
        for one in await site.call("snapshots"):
            await site.call("drop-snapshot", snapshot=one["snapshot"])
        assert kept(site) == []


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with broker(tmp_path) as one:
        yield one


def kept(site: Site) -> list[str]:
    return sorted(path.name for path in (site.settings.broker_dir / "snapshots").iterdir())


async def snapshot(site: Site, machine: str, kind: str = "full") -> str:
    name = new_id("snp")
    await site.call("snapshot", machine=machine, snapshot=name, kind=kind)
    return name


async def boot(site: Site, machine: str | None = None, **changes: Any) -> dict[str, Any]:
    fields = {"template": DIGEST, "driver": "fake", "resources": RESOURCES, "hostname": "guest", **changes}
    return await site.call("boot", machine=machine or new_id("sbx"), **fields)


def says(site: Site, body: str, text: str) -> None:
    with site.peer(body) as peer:
        assert peer.run("/bin/echo", text).stdout == f"{text}\n".encode()


@pytest.mark.parametrize("before", ["running", "paused", "suspended"])
async def test_a_snapshot_leaves_the_machine_as_it_was_and_machines_begin_from_it(place: Place, before: str) -> None:
    site, _ = place
    machine = await site.boot()
    if before != "running":
        await site.call({"paused": "pause", "suspended": "suspend"}[before], machine=machine)
    name = await snapshot(site, machine)
    assert await site.state(machine) == before
    for _ in range(3):
        copy = new_id("sbx")
        answer = await boot(site, copy, snapshot=name)
        assert (answer["restored"], answer["body"]) == (True, copy)
        says(site, copy, "copy")
    if before != "running":
        await site.call({"paused": "resume", "suspended": "wake"}[before], machine=machine)
    says(site, machine, "source")


async def test_of_a_stopped_machine_the_disk_can_be_kept_and_nothing_else(place: Place) -> None:
    site, _ = place
    machine = await site.boot()
    await site.call("stop", machine=machine)
    with pytest.raises(Conflict) as caught:
        await snapshot(site, machine, "full")
    assert caught.value.details["state"] == "stopped"
    name = await snapshot(site, machine, "disk")
    answer = await boot(site, snapshot=name)
    assert answer["restored"] is False
    says(site, answer["body"], "fresh")


async def test_a_snapshot_outlives_its_machine_and_machines_outlive_it(place: Place) -> None:
    site, _ = place
    machine = await site.boot()
    name = await snapshot(site, machine)
    await site.call("destroy", machine=machine)
    copy = new_id("sbx")
    await boot(site, copy, snapshot=name)
    await site.call("drop-snapshot", snapshot=name)
    assert await site.call("snapshots") == []
    says(site, copy, "here")
    with pytest.raises(NotFound):
        await boot(site, snapshot=name)


async def test_snapshots_are_listed_with_what_a_machine_from_them_needs(place: Place) -> None:
    site, _ = place
    machine = await site.boot()
    full, disk = await snapshot(site, machine), await snapshot(site, machine, "disk")
    listed = {one["snapshot"]: one for one in await site.call("snapshots")}
    assert listed.keys() == {full, disk}
    assert listed[full].items() >= {"kind": "full", "template": DIGEST, "driver": "fake", "memory_mib": 256}.items()
    assert listed[full]["bytes"] > listed[disk]["bytes"] == 0


async def test_verbs_about_snapshots_asked_again_find_their_work_done(place: Place) -> None:
    site, _ = place
    machine = await site.boot()
    name = new_id("snp")
    first = await site.call("snapshot", machine=machine, snapshot=name, kind="full")
    again = await site.call("snapshot", machine=machine, snapshot=name, kind="full")
    assert (again["bytes"], again["timings"]) == (first["bytes"], {})
    for kind, of in (("disk", machine), ("full", await site.boot())):
        with pytest.raises(Conflict):
            await site.call("snapshot", machine=of, snapshot=name, kind=kind)
    copy = new_id("sbx")
    assert [(await boot(site, copy, snapshot=name))["restored"] for _ in range(2)] == [True, True]
    with pytest.raises(Conflict):
        await boot(site, copy)
    for _ in range(2):
        await site.call("drop-snapshot", snapshot=name)


async def test_sixteen_machines_from_one_snapshot_at_once_and_a_drop_in_the_middle_waits_for_them(place: Place) -> None:
    site, machines = place
    name = await snapshot(site, await site.boot())
    copies = [new_id("sbx") for _ in range(16)]
    booting = asyncio.gather(*(boot(site, copy, snapshot=name) for copy in copies))
    await until(lambda: set(copies) <= set(machines.entries), "all are under way")
    await site.call("drop-snapshot", snapshot=name)
    assert [answer["restored"] for answer in await booting] == [True] * 16
    for copy in copies:
        says(site, copy, copy)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("template", {"template": "sha256:" + "1" * 64}),
        ("resources.memory_mib", {"resources": {**RESOURCES, "memory_mib": 128}}),
    ],
)
async def test_a_machine_that_does_not_fit_its_snapshot_is_refused_by_field(
    place: Place, field: str, changes: dict[str, Any]
) -> None:
    site, _ = place
    name = await snapshot(site, await site.boot())
    with pytest.raises(InvalidRequest) as caught:
        await boot(site, snapshot=name, **changes)
    assert caught.value.details["field"] == field


async def test_a_snapshot_that_cannot_be_written_leaves_nothing_and_the_machine_runs(place: Place) -> None:
    """F10."""
    site, _ = place
    machine = await site.boot()
    before = await snapshot(site, machine)
    memory = site.settings.broker_dir / "snapshots"
    machines = place[1]

    async def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    driver = machines.driver("fake")
    writing, driver.checkpoint = driver.checkpoint, full  # type: ignore[method-assign]
    try:
        with pytest.raises(HostFull) as caught:
            await snapshot(site, machine)
    finally:
        driver.checkpoint = writing  # type: ignore[method-assign]
    assert caught.value.code == "snapshot-store-full"
    assert [path.name for path in memory.iterdir()] == [before]
    assert await site.state(machine) == "running"
    says(site, machine, "as before")
    await boot(site, snapshot=before)


async def test_a_damaged_snapshot_is_named_not_listed_and_can_be_dropped(place: Place) -> None:
    site, _ = place
    name = await snapshot(site, await site.boot())
    (site.settings.broker_dir / "snapshots" / name / "record.json").write_text("{")
    with pytest.raises(HostError) as caught:
        await boot(site, snapshot=name)
    assert caught.value.code == "snapshot-damaged"
    assert await site.call("snapshots") == []
    await site.call("drop-snapshot", snapshot=name)
    assert kept(site) == []


# --- spares


@pytest.mark.parametrize("state", ["running", "paused"])
async def test_a_claimed_spare_is_the_machine_and_its_body_keeps_its_name(place: Place, state: str) -> None:
    site, machines = place
    spare, machine = new_id("sbx"), new_id("sbx")
    await boot(site, spare, spare=True)
    if state == "paused":
        await site.call("pause", machine=spare)
    assert (await site.call("inspect", machine=spare))["spare"] is True
    pid = (await site.call("inspect", machine=spare))["pid"]
    larger = {**RESOURCES, "cpus": 2.0, "disk_mib": 128, "pids": 300}
    answer = await site.call("claim", machine=machine, spare=spare, resources=larger, hostname="mine")
    assert answer["body"] == spare
    seen = await site.call("inspect", machine=machine)
    assert (seen["state"], seen["body"], seen["spare"], seen["pid"]) == ("running", spare, False, pid)
    assert await site.state(spare) == "absent"
    assert machines.entries[machine].resources == Resources(2.0, 256, 128, 300)
    assert machines.entries[machine].hostname == "mine"
    says(site, spare, "on the body's channel")


async def test_a_claimed_machine_goes_through_its_whole_life(place: Place) -> None:
    site, _ = place
    spare, machine = new_id("sbx"), new_id("sbx")
    await boot(site, spare, spare=True)
    await site.call("claim", machine=machine, spare=spare, resources=RESOURCES, hostname="h")
    for verb, state in (("pause", "paused"), ("suspend", "suspended"), ("wake", "running"), ("stop", "stopped")):
        await site.call(verb, machine=machine)
        assert await site.state(machine) == state
    await site.call("start", machine=machine)
    name = await snapshot(site, machine)
    copy = await boot(site, snapshot=name)
    says(site, copy["body"], "copy")
    os.kill((await site.call("inspect", machine=machine))["pid"], 9)
    assert (await site.until(machine, "exited"))["cause"] == "machine-exited"
    await site.call("destroy", machine=machine)
    assert await site.state(machine) == "absent"


async def test_a_spare_is_claimed_once(place: Place) -> None:
    site, _ = place
    spare = new_id("sbx")
    await boot(site, spare, spare=True)
    takers = [new_id("sbx") for _ in range(8)]
    claims = [site.call("claim", machine=taker, spare=spare, resources=RESOURCES, hostname="h") for taker in takers * 2]
    answers = await asyncio.gather(*claims, return_exceptions=True)
    won = {taker for taker, answer in zip(takers * 2, answers, strict=True) if isinstance(answer, dict)}
    assert len(won) == 1
    assert [one["machine"] for one in await site.call("machines")] == sorted(won)
    for answer in answers:
        assert isinstance(answer, dict | NotFound)


async def test_the_id_of_a_spare_that_was_claimed_makes_no_other_machine_of_its_body(place: Place) -> None:
    site, machines = place
    spare, machine = new_id("sbx"), new_id("sbx")
    await boot(site, spare, spare=True)
    await site.call("claim", machine=machine, spare=spare, resources=RESOURCES, hostname="h")
    before = machines.entries[machine]
    for again in (True, False):
        with pytest.raises(Conflict):
            await boot(site, spare, spare=again)
    await site.call("destroy", machine=spare)
    assert machines.entries == {machine: before}
    says(site, spare, "still there")


async def test_what_is_no_spare_cannot_be_claimed(place: Place) -> None:
    site, _ = place
    somebodys, spare = await site.boot(), new_id("sbx")
    await boot(site, spare, spare=True)
    for machine, claimed, error in (
        (new_id("sbx"), somebodys, "not-a-spare"),
        (new_id("sbx"), new_id("sbx"), "not-found"),
        (somebodys, spare, "conflict"),
    ):
        with pytest.raises((Conflict, NotFound)) as caught:
            await site.call("claim", machine=machine, spare=claimed, resources=RESOURCES, hostname="h")
        assert caught.value.code == error
    other = {**RESOURCES, "memory_mib": 512}
    with pytest.raises(InvalidRequest) as refused:
        await site.call("claim", machine=new_id("sbx"), spare=spare, resources=other, hostname="h")
    assert refused.value.details["field"] == "resources.memory_mib"
    assert (await site.call("inspect", machine=spare))["spare"] is True


async def test_the_end_of_a_spare_that_is_claimed_meanwhile_is_noted_of_the_machine(place: Place) -> None:
    site, machines = place
    spare, machine = new_id("sbx"), new_id("sbx")
    await boot(site, spare, spare=True)
    await site.call("claim", machine=machine, spare=spare, resources=RESOURCES, hostname="h")
    os.kill((await site.call("inspect", machine=machine))["pid"], 9)
    await until(lambda: machines.entries[machine].phase == "exited", "the end is written down")


# --- admission


async def test_spares_do_not_count_but_are_told_of_when_the_host_is_full(tmp_path: Path) -> None:
    async with broker(tmp_path, sandboxes_max=1) as (site, _):
        spares = [new_id("sbx") for _ in range(2)]
        for spare in spares:
            await boot(site, spare, spare=True)
        await site.boot()
        with pytest.raises(HostFull) as caught:
            await site.boot()
        assert (caught.value.code, caught.value.details["spares"]) == ("host-full", 2)
        with pytest.raises(HostFull):
            await site.call("claim", machine=new_id("sbx"), spare=spares[0], resources=RESOURCES, hostname="h")


async def test_a_host_without_memory_left_starts_nothing_more_and_goes_on_with_the_rest(tmp_path: Path) -> None:
    async with broker(tmp_path) as (site, machines):
        running, suspended, stopped = [await site.boot() for _ in range(3)]
        name = await snapshot(site, running)
        await site.call("suspend", machine=suspended)
        await site.call("stop", machine=stopped)
        spare = new_id("sbx")
        await boot(site, spare, spare=True)
        left, machines.admission._settings = (
            machines.admission._settings,
            site.settings.model_copy(update={"memory_reserve_mib": 1 << 30}),
        )
        for asked in (
            site.boot(),
            boot(site, snapshot=name),
            site.call("wake", machine=suspended),
            site.call("start", machine=stopped),
            site.call("claim", machine=new_id("sbx"), spare=spare, resources=RESOURCES, hostname="h"),
        ):
            with pytest.raises(HostFull) as caught:
                await asked
            assert (caught.value.code, caught.value.retryable) == ("host-full", True)
            assert caught.value.details["spares"] == 1
        says(site, running, "still here")
        machines.admission._settings = left
        await site.call("claim", machine=new_id("sbx"), spare=spare, resources=RESOURCES, hostname="h")
        await site.call("wake", machine=suspended)
        await site.call("start", machine=stopped)


# --- the sweep


async def stray_machine(site: Site, driver: FakeDriver) -> str:
    """Something that carries the installation's names and is in no journal."""
    stray = new_id("sbx")
    await driver.prepare(Machine(stray, "h", Resources()))
    channel = site.settings.channels_dir / stray
    channel.mkdir()
    for name in ("in", "out"):
        os.mkfifo(channel / name)
    for name in (stray, f"{stray}.tmp"):
        (site.settings.broker_dir / "snapshots" / name).mkdir()
    return stray


async def test_gc_names_what_belongs_to_nobody_and_then_removes_it(place: Place, tmp_path: Path) -> None:
    """L12."""
    site, _ = place
    machine = await site.boot()
    name = await snapshot(site, machine)
    driver = FakeDriver(tmp_path / "fake")
    stray = await stray_machine(site, driver)
    unfinished = new_id("snp")
    (site.settings.broker_dir / "snapshots" / f"{unfinished}.tmp/memory").mkdir(parents=True)
    wanted = {("process", stray), ("channel", stray), ("image", stray), ("snapshot", unfinished)}
    for dry_run in (True, False):
        found = (await site.call("gc", dry_run=dry_run))["strays"]
        assert {(one["kind"], one["name"]) for one in found} == wanted
        assert {one["removed"] for one in found} == {not dry_run}
    assert (await site.call("gc", dry_run=False))["strays"] == []
    assert kept(site) == [name]
    assert await driver.known() == {machine}
    says(site, machine, "untouched")


async def test_the_sweep_comes_again_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from space.broker import server

    monkeypatch.setattr(server, "SWEEP_EVERY_S", 0.05)
    async with broker(tmp_path) as (site, _):
        driver = FakeDriver(tmp_path / "fake")
        stray = await stray_machine(site, driver)
        channel = site.settings.channels_dir / stray
        await until(lambda: not channel.exists() and kept(site) == [], "swept")
        figures = await site.call("figures")
        assert figures["strays"].keys() >= {"channel", "image"}


async def test_a_sweep_never_touches_what_a_request_is_working_on(place: Place) -> None:
    site, machines = place
    done = asyncio.Event()

    async def sweep_again_and_again() -> list[sweeping.Stray]:
        found: list[sweeping.Stray] = []
        while not done.is_set():
            found += await sweeping.sweep(machines)
            await asyncio.sleep(0)
        return found

    looking = asyncio.ensure_future(sweep_again_and_again())

    async def live() -> None:
        machine = await site.boot()
        name = await snapshot(site, machine)
        await site.call("suspend", machine=machine)
        await site.call("wake", machine=machine)
        spare = new_id("sbx")
        await boot(site, spare, spare=True, snapshot=name)
        await site.call("claim", machine=(claimed := new_id("sbx")), spare=spare, resources=RESOURCES, hostname="h")
        says(site, spare, "lives")
        await site.call("drop-snapshot", snapshot=name)
        for one in (machine, claimed):
            await site.call("destroy", machine=one)

    try:
        await asyncio.gather(*(live() for _ in range(6)))
    finally:
        done.set()
    assert await looking == []


async def test_what_cannot_be_removed_is_told_and_does_not_hold_up_the_rest(place: Place, tmp_path: Path) -> None:
    site, _ = place
    first, second = sorted([new_id("sbx"), new_id("sbx")])
    for stray in (first, second):
        (site.settings.channels_dir / stray).mkdir()
    (site.settings.channels_dir / first / "not ours").touch()
    found = (await site.call("gc", dry_run=False))["strays"]
    assert {(one["name"], one["removed"]) for one in found} == {(first, False), (second, True)}
    shutil.rmtree(site.settings.channels_dir / first)

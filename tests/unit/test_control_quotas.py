"""Quotas: counted where a request is accepted, so that the last place is given away once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection

from space.control import reaper, watcher
from space.model.sandbox import Failure, State
from space.store import sandboxes
from tests.control_host import Host, code, hosting, until

WAIT = {"Prefer": "wait=20"}
SMALL = {"cpus": 1.0, "memory_mib": 100, "disk_mib": 1000}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as host:
        yield host


async def limit(host: Host, **quota: Any) -> None:
    answer = await host.http.patch(f"/v1/projects/{host.project_id}", json={"quota": quota})
    assert answer.is_success, answer.text


async def used(host: Host) -> dict[str, Any]:
    return (await host.http.get("/v1/project")).json()["used"]


async def create(host: Host, **fields: Any) -> httpx.Response:
    return await host.http.post("/v1/sandboxes", json={"template": "base", "resources": SMALL, **fields}, headers=WAIT)


def assert_over(answer: httpx.Response, quota: str) -> dict[str, Any]:
    assert (answer.status_code, code(answer)) == (httpx.codes.TOO_MANY_REQUESTS, "quota-exceeded")
    assert int(answer.headers["retry-after"]) >= 1
    details = answer.json()["error"]["details"]
    assert details["quota"] == quota
    assert details["used"] + details["asked"] > details["limit"]
    return details


@pytest.mark.parametrize(("quota", "most"), [("sandboxes", 2), ("cpus", 2.5), ("memory_mib", 299), ("disk_mib", 2000)])
async def test_a_project_gets_no_more_of_anything_than_its_quota(host: Host, quota: str, most: float) -> None:
    await limit(host, **{quota: most})
    assert [(await create(host)).status_code for _ in range(2)] == [201, 201]
    assert_over(await create(host), quota)
    await limit(host, **{quota: None})
    assert (await create(host)).is_success


@pytest.mark.parametrize("quota", ["sandboxes", "cpus", "memory_mib", "disk_mib"])
async def test_of_many_at_once_exactly_so_many_fit(host: Host, quota: str) -> None:
    sizes = {"sandboxes": 1, **SMALL}
    await limit(host, **{quota: 7 * sizes[quota]})
    answers = await asyncio.gather(*(create(host) for _ in range(20)))
    assert sum(answer.is_success for answer in answers) == 7
    for answer in answers:
        if not answer.is_success:
            assert_over(answer, quota)


async def test_what_has_no_machine_takes_its_disk_alone_and_must_find_room_to_come_back(host: Host) -> None:
    first = (await create(host)).json()["sandbox"]["id"]
    await limit(host, memory_mib=150)
    assert_over(await create(host), "memory_mib")
    for verb, back in (("suspend", "wake"), ("stop", "start")):
        await host.verb(first, verb)
        assert await used(host) == {"sandboxes": 1, "cpus": 0.0, "memory_mib": 0, "disk_mib": 1000}
        second = (await create(host)).json()["sandbox"]["id"]
        for verb_back in {back, "wake"}:
            assert_over(await host.verb(first, verb_back), "memory_mib")
        assert await host.state(first) in {"suspended", "stopped"}
        await host.http.delete(f"/v1/sandboxes/{second}", headers=WAIT)
        assert (await host.verb(first, back)).is_success
    await host.verb(first, "pause")
    assert (await used(host))["memory_mib"] == 100, "a paused machine keeps its memory"
    await limit(host, memory_mib=10)
    assert (await host.verb(first, "resume")).is_success


async def test_forks_count_all_together_or_none_is_made(host: Host) -> None:
    source = (await create(host)).json()["sandbox"]["id"]
    await limit(host, sandboxes=4)
    over = await host.http.post(f"/v1/sandboxes/{source}/fork", json={"count": 4})
    assert assert_over(over, "sandboxes")["asked"] == 4
    assert (await used(host))["sandboxes"] == 1
    assert (await host.verb(source, "pause")).is_success, "nothing holds the source"
    assert len(await host.fork(source, count=3)) == 3
    assert await used(host) == {"sandboxes": 4, "cpus": 4.0, "memory_mib": 400, "disk_mib": 4000}


async def test_snapshots_count_as_disk_until_they_are_dropped(host: Host) -> None:
    source = (await create(host)).json()["sandbox"]["id"]
    host.node.snapshot_bytes = 30 * 1024 * 1024 + 1
    snapshot = await host.snapshot(source)
    assert (await used(host))["disk_mib"] == 1031
    held = host.node.hold("snapshot")
    path = f"/v1/sandboxes/{source}/snapshots"
    making = (await host.http.post(path, json={})).json()
    assert (await used(host))["disk_mib"] == 1031 + 1000 + 100, "while it is made, the most it can take"
    held.set()
    await host.operation(making["operation"]["id"])
    assert (await used(host))["disk_mib"] == 1061
    await limit(host, disk_mib=2160)
    assert assert_over(await host.http.post(path, json={}), "disk_mib")["asked"] == 1100
    await host.http.delete(f"/v1/snapshots/{snapshot}")
    assert (await used(host))["disk_mib"] == 1031
    assert (await host.http.post(path, json={}, headers=WAIT)).is_success


async def test_a_sandbox_that_failed_or_is_deleted_gives_back_what_it_took(host: Host) -> None:
    failed = (await create(host)).json()["sandbox"]["id"]
    host.node.end(failed)
    await watcher.check(host.control, failed)
    assert await host.state(failed) == "failed"
    assert await used(host) == {"sandboxes": 1, "cpus": 0.0, "memory_mib": 0, "disk_mib": 1000}
    await host.http.delete(f"/v1/sandboxes/{failed}", headers=WAIT)
    assert await used(host) == {"sandboxes": 0, "cpus": 0.0, "memory_mib": 0, "disk_mib": 0}


async def test_sandboxes_that_never_came_up_take_nobodys_place_and_go_after_a_while(tmp_path: Path) -> None:
    async with hosting(tmp_path, sandboxes_max=2) as host:
        await limit(host, sandboxes=2)
        host.node.fail("boot", "host-full", 503, times=5)
        for _ in range(5):
            assert not (await create(host)).is_success
        assert (await used(host))["sandboxes"] == 0
        made = [await host.create() for _ in range(2)]
        host.clock.move(3601)
        await reaper.forget_unborn(host.control)

        async def only_those() -> bool:
            items = (await host.http.get("/v1/sandboxes")).json()["items"]
            return {item["id"] for item in items if item["state"] != "deleted"} == set(made)

        await until(only_those, "the others to be deleted")


async def test_a_lower_quota_ends_nothing_and_lets_nothing_new_in(host: Host) -> None:
    sandbox = (await create(host)).json()["sandbox"]["id"]
    await limit(host, sandboxes=0, cpus=0, memory_mib=0, disk_mib=0)
    assert await host.state(sandbox) == "running"
    assert_over(await create(host), "sandboxes")


async def test_a_machine_that_was_lost_sight_of_is_taken_back_whatever_the_quota_is_by_now(host: Host) -> None:
    sandbox = (await create(host)).json()["sandbox"]["id"]

    def lost(connection: Connection) -> None:
        seen = sandboxes.get(connection, sandbox)
        assert seen is not None
        failure = Failure("host-lost", "It was out of sight.", "MachineLost")
        sandboxes.move(connection, seen, state=State.FAILED, ready=False, failure=failure)

    await host.control.store.write(lost)
    await limit(host, memory_mib=0)
    assert_over(await host.verb(sandbox, "start"), "memory_mib")
    await watcher.compare(host.control)

    async def running() -> bool:
        return await host.state(sandbox) == "running"

    await until(running, "the sandbox to be taken back")


async def test_a_new_project_has_the_quota_of_the_settings(tmp_path: Path) -> None:
    async with hosting(tmp_path, project_sandboxes_max=1, project_cpus_max=2.5) as host:
        made = await host.http.post("/v1/projects", json={"name": "team"})
        assert made.json()["quota"] == {"sandboxes": 1, "cpus": 2.5, "memory_mib": None, "disk_mib": None}
        async with host.client(made.json()["key"]) as member:
            assert (await member.post("/v1/sandboxes", json={"template": "base"})).is_success
            assert code(await member.post("/v1/sandboxes", json={"template": "base"})) == "quota-exceeded"
            changed = {"quota": {"sandboxes": 5}}
            refused = await member.patch(f"/v1/projects/{made.json()['id']}", json=changed)
            assert refused.status_code == httpx.codes.FORBIDDEN
            assert (await member.get("/v1/projects")).status_code == httpx.codes.FORBIDDEN
            assert (await member.get("/v1/project")).json()["used"]["sandboxes"] == 1
        assert (await create(host)).is_success, "one project's use is not another's"


async def test_only_the_limits_that_are_named_change(host: Host) -> None:
    await limit(host, sandboxes=3, cpus=4.5)
    await limit(host, sandboxes=None, disk_mib=10)
    shown = (await host.http.get(f"/v1/projects/{host.project_id}")).json()
    assert shown["quota"] == {"sandboxes": None, "cpus": 4.5, "memory_mib": None, "disk_mib": 10}
    (listed,) = (await host.http.get("/v1/projects")).json()["items"]
    assert listed == shown


@pytest.mark.parametrize("quota", [{"sandboxes": -1}, {"cpus": "2"}, {"cpus": float("inf")}, {"gpus": 1}, None])
async def test_a_quota_that_makes_no_sense_is_refused(host: Host, quota: Any) -> None:
    text = '{"quota": {"cpus": Infinity}}' if quota == {"cpus": float("inf")} else None
    path = f"/v1/projects/{host.project_id}"
    answer = await (
        host.http.patch(path, json={"quota": quota}) if text is None else host.http.patch(path, content=text)
    )
    assert answer.status_code in {httpx.codes.UNPROCESSABLE_ENTITY, httpx.codes.BAD_REQUEST}


@pytest.mark.parametrize("project", ["prjaaaaaaaaaaaaaaaa", "x", "self"])
async def test_a_project_that_is_not_there_is_not_found(host: Host, project: str) -> None:
    assert (await host.http.get(f"/v1/projects/{project}")).status_code == httpx.codes.NOT_FOUND
    answer = await host.http.patch(f"/v1/projects/{project}", json={"quota": {}})
    assert answer.status_code == httpx.codes.NOT_FOUND


async def test_forks_need_room_on_the_host_too(tmp_path: Path) -> None:
    async with hosting(tmp_path, sandboxes_max=3) as host:
        source = await host.create()
        full = await host.http.post(f"/v1/sandboxes/{source}/fork", json={"count": 3})
        assert (full.status_code, code(full)) == (httpx.codes.SERVICE_UNAVAILABLE, "host-full")
        assert "retry-after" in full.headers
        assert len(await host.fork(source, count=2)) == 2


async def test_strays_are_found_first_and_removed_when_that_is_wanted(host: Host) -> None:
    sandbox = await host.create()
    host.node.machines["sbxaaaaaaaaaaaaaaaa"] = "running"
    host.node.snapshots["snpaaaaaaaaaaaaaaaa"] = {"kind": "disk", "commands": []}
    gone = await host.create()
    del host.node.machines[gone]
    host.node.strays = [{"kind": "cgroup", "name": "left-over"}]
    names = {("machine", "sbxaaaaaaaaaaaaaaaa"), ("snapshot", "snpaaaaaaaaaaaaaaaa"), ("sandbox-row", gone)}
    looked = (await host.http.post("/v1/gc", json={"dry_run": True})).json()["strays"]
    assert {(stray["kind"], stray["name"]) for stray in looked} == names | {("cgroup", "left-over")}
    assert {stray["removed"] for stray in looked} == {False}
    assert "sbxaaaaaaaaaaaaaaaa" in host.node.machines
    assert host.control.found == {}
    removed = (await host.http.post("/v1/gc", json={})).json()["strays"]
    assert {(stray["kind"], stray["name"]) for stray in removed} == names | {("cgroup", "left-over")}
    assert {stray["removed"] for stray in removed} == {True}
    assert set(host.node.machines) == {sandbox}
    assert await host.state(gone) == "failed"
    assert host.control.found == {"machine": 1, "snapshot": 1, "sandbox-row": 1}
    async with await host.other() as member:
        for answer in (await member.post("/v1/gc", json={}), await member.get("/v1/pool")):
            assert answer.status_code == httpx.codes.FORBIDDEN
    assert (await host.http.get("/v1/pool")).json() == {"memory_mib": 0, "memory_max_mib": 512, "shapes": []}

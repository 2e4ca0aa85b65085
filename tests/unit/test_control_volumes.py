"""Volumes as the api tells of them: names, limits, who mounts them, and what a crash or a failing node leaves."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.control import contents, leftovers, volumes, watcher
from space.errors import Unavailable
from space.model.ids import new_id
from space.model.volume import VolumeState, check_apart, check_path
from space.store import volumes as rows
from tests.control_host import Host, code, hosting
from tests.scripted_node import error

WAIT = {"Prefer": "wait=20"}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as host:
        yield host


async def make(host: Host, name: str = "data", **fields: Any) -> dict[str, Any]:
    answer = await host.http.post("/v1/volumes", json={"name": name, **fields})
    assert answer.status_code == httpx.codes.CREATED, answer.text
    return answer.json()


async def mount(host: Host, *mounts: dict[str, str], **fields: Any) -> httpx.Response:
    body = {"template": "base", "volumes": list(mounts), **fields}
    return await host.http.post("/v1/sandboxes", json=body, headers=WAIT)


async def listed(host: Host) -> list[str]:
    return [one["name"] for one in (await host.http.get("/v1/volumes")).json()["items"]]


async def test_a_volume_is_made_told_of_and_deleted(host: Host) -> None:
    made = await make(host, size_mib=100)
    assert (made["name"], made["size_mib"], made["sandboxes"]) == ("data", 100, 0)
    assert host.node.volumes == {made["id"]: 100}
    assert (await host.http.get("/v1/volumes/data")).json() == made
    assert (await make(host, "other"))["size_mib"] == 4096
    assert await listed(host) == ["other", "data"]
    assert (await host.http.delete("/v1/volumes/data")).status_code == httpx.codes.NO_CONTENT
    assert made["id"] not in host.node.volumes
    assert (await host.http.delete("/v1/volumes/data")).status_code == httpx.codes.NOT_FOUND


async def test_a_name_is_taken_once_and_a_repeated_request_gets_the_first_answer(host: Host) -> None:
    key = {"Idempotency-Key": "once"}
    first = await host.http.post("/v1/volumes", json={"name": "data"}, headers=key)
    again = await host.http.post("/v1/volumes", json={"name": "data"}, headers=key)
    assert first.json() == again.json()
    taken = await host.http.post("/v1/volumes", json={"name": "data"})
    assert (taken.status_code, code(taken)) == (httpx.codes.CONFLICT, "name-taken")


async def test_a_sandbox_mounts_what_it_names_and_the_node_is_told_where(host: Host) -> None:
    made = await make(host)
    answer = await mount(host, {"name": "data", "path": "/data"})
    assert answer.status_code == httpx.codes.CREATED, answer.text
    sandbox = answer.json()["sandbox"]
    assert sandbox["volumes"] == [{"name": "data", "path": "/data"}]
    assert host.node.wanted[sandbox["id"]]["volumes"] == [{"volume": made["id"], "path": "/data"}]
    assert (await host.http.get("/v1/volumes/data")).json()["sandboxes"] == 1


@pytest.mark.parametrize("state", ["running", "suspended", "stopped"])
async def test_a_volume_in_use_is_deleted_only_after_its_sandboxes(host: Host, state: str) -> None:
    await make(host)
    sandbox = (await mount(host, {"name": "data", "path": "/data"})).json()["sandbox"]["id"]
    if state != "running":
        verb = "suspend" if state == "suspended" else "stop"
        await host.http.post(f"/v1/sandboxes/{sandbox}/{verb}", headers=WAIT)
    refused = await host.http.delete("/v1/volumes/data")
    assert (refused.status_code, code(refused)) == (httpx.codes.CONFLICT, "volume-in-use")
    assert sandbox in refused.json()["error"]["message"]
    await host.http.delete(f"/v1/sandboxes/{sandbox}", headers=WAIT)
    assert (await host.http.delete("/v1/volumes/data")).status_code == httpx.codes.NO_CONTENT


@pytest.mark.parametrize(
    ("mounts", "status", "expected"),
    [
        ([("absent", "/data")], 422, "unknown-volume"),
        ([("data", "relative")], 422, "invalid-request"),
        ([("data", "/proc/x")], 422, "invalid-request"),
        ([("data", "/a"), ("data", "/a/b")], 422, "invalid-request"),
        ([("data", "/a"), ("data", "/a")], 422, "invalid-request"),
        ([("data", f"/{number}") for number in range(17)], 422, "invalid-request"),
    ],
    ids=["unknown", "relative", "the-machines", "nested", "twice", "many"],
)
async def test_what_cannot_be_mounted_is_refused(
    host: Host, mounts: list[tuple[str, str]], status: int, expected: str
) -> None:
    await make(host)
    refused = await mount(host, *({"name": name, "path": path} for name, path in mounts))
    assert (refused.status_code, code(refused)) == (status, expected)
    assert host.node.machines == {}


async def test_a_virtual_machine_with_volumes_is_refused(host: Host) -> None:
    await make(host)
    refused = await mount(host, {"name": "data", "path": "/data"}, driver="qemu")
    assert (refused.status_code, code(refused)) == (httpx.codes.CONFLICT, "not-supported")
    taken = await mount(host, {"name": "data", "path": "/data"}, driver="gvisor")
    assert taken.status_code == httpx.codes.CREATED


async def test_forks_and_what_begins_with_memory_have_the_same_volumes_and_what_begins_with_a_disk_its_own(
    host: Host,
) -> None:
    made = await make(host)
    source = (await mount(host, {"name": "data", "path": "/data"})).json()["sandbox"]["id"]
    forked = (await host.http.post(f"/v1/sandboxes/{source}/fork", json={}, headers=WAIT)).json()["sandboxes"][0]
    assert forked["volumes"] == [{"name": "data", "path": "/data"}]
    assert host.node.wanted[forked["id"]]["volumes"] == [{"volume": made["id"], "path": "/data"}]
    kept = {}
    for kind in ("full", "disk"):
        path = f"/v1/sandboxes/{source}/snapshots"
        kept[kind] = (await host.http.post(path, json={"kind": kind}, headers=WAIT)).json()["snapshot"]["id"]
    full = (await mount(host, template=f"snapshot:{kept['full']}")).json()["sandbox"]
    disk = (await mount(host, {"name": "data", "path": "/else"}, template=f"snapshot:{kept['disk']}")).json()["sandbox"]
    assert (full["volumes"][0]["path"], disk["volumes"][0]["path"]) == ("/data", "/else")
    refused = await mount(host, {"name": "data", "path": "/else"}, template=f"snapshot:{kept['full']}")
    assert refused.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    for sandbox in (source, forked["id"], full["id"], disk["id"]):
        await host.http.delete(f"/v1/sandboxes/{sandbox}", headers=WAIT)
    assert (await host.http.delete("/v1/volumes/data")).status_code == httpx.codes.NO_CONTENT
    gone = await mount(host, template=f"snapshot:{kept['full']}")
    assert (gone.status_code, code(gone)) == (httpx.codes.CONFLICT, "volume-gone")


async def test_a_volume_counts_for_the_projects_quota_of_disk(host: Host) -> None:
    project = (await host.http.get("/v1/project")).json()
    await host.http.patch(f"/v1/projects/{project['id']}", json={"quota": {"disk_mib": 1000}})
    await make(host, size_mib=800)
    assert (await host.http.get("/v1/project")).json()["used"]["disk_mib"] == 800
    refused = await host.http.post("/v1/volumes", json={"name": "more", "size_mib": 300})
    assert (refused.status_code, code(refused)) == (httpx.codes.TOO_MANY_REQUESTS, "quota-exceeded")


async def test_a_project_has_so_many_volumes_and_none_is_larger_than_a_disk(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volumes, "VOLUMES_MAX", 1)
    await make(host)
    refused = await host.http.post("/v1/volumes", json={"name": "more"})
    assert (refused.status_code, code(refused)) == (httpx.codes.TOO_MANY_REQUESTS, "volumes-max")
    large = await host.http.post("/v1/volumes", json={"name": "large", "size_mib": host.settings.disk_mib_max + 1})
    assert large.status_code == httpx.codes.UNPROCESSABLE_ENTITY


async def test_a_volume_that_the_host_cannot_make_leaves_nothing(host: Host) -> None:
    host.node.volume_failures = [error(409, "not-supported")]
    refused = await host.http.post("/v1/volumes", json={"name": "data"})
    assert (refused.status_code, code(refused)) == (httpx.codes.CONFLICT, "not-supported")
    await make(host)


async def test_a_deletion_that_fails_is_done_later_and_nobody_sees_the_volume_meanwhile(host: Host) -> None:
    made = await make(host)
    host.node.volume_failures = [error(503, "unavailable")]
    assert (await host.http.delete("/v1/volumes/data")).status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert await listed(host) == []
    assert made["id"] in host.node.volumes
    await volumes.drop_unwanted(host.control)
    assert host.node.volumes == {}
    await make(host)


async def test_what_a_crash_left_of_a_volume_in_the_making_goes_after_a_while(host: Host) -> None:
    project, now = (await host.http.get("/v1/project")).json()["id"], host.control.now()
    half = rows.Volume(new_id("vol"), project, "half", 16, VolumeState.CREATING, now, now)
    old = replace(half, id=new_id("vol"), name="old", updated_at=now - timedelta(minutes=6))
    for one in (half, old):
        host.node.volumes[one.id] = 16
        await host.control.store.write(lambda connection, made=one: rows.add(connection, made))
    await volumes.drop_unwanted(host.control)
    assert set(host.node.volumes) == {half.id}
    busy = await host.http.get("/v1/volumes/half")
    assert (busy.status_code, code(busy)) == (httpx.codes.CONFLICT, "busy")


async def test_volumes_of_nobody_are_found_and_dropped(host: Host) -> None:
    made, stray = await make(host), new_id("vol")
    host.node.volumes |= {stray: 16, "not-an-id": 16}
    looked = await leftovers.clear(host.control, dry_run=True)
    assert {"kind": "volume", "name": stray, "removed": False} in looked
    await watcher.compare(host.control)
    assert set(host.node.volumes) == {made["id"], "not-an-id"}
    assert host.control.found["volume"] == 1


async def test_a_volumes_sandbox_has_a_driver_that_mounts_it_whichever_others_usually_have(tmp_path: Path) -> None:
    async with hosting(tmp_path, driver="qemu") as host:
        made = await make(host)
        assert (await mount(host, {"name": "data", "path": "/data"})).status_code == httpx.codes.CONFLICT
        volume = await volumes.by_id(host.control, host.project_id, made["id"])
        opened = await contents.opened(host.control, volume)
        assert host.node.wanted[opened.id]["driver"] is None


async def test_a_volumes_sandbox_has_few_programs_at_a_time_and_who_waits_for_long_is_told(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = await volumes.by_id(
        host.control, (await host.http.get("/v1/project")).json()["id"], (await make(host))["id"]
    )
    monkeypatch.setattr(contents, "LOOK_S", 0.01)
    async with contextlib.AsyncExitStack() as held:
        for _ in range(contents.LOOKING_MAX):
            await held.enter_async_context(contents.looking(host.control, volume))
        with pytest.raises(Unavailable, match="Ask again later"):
            await held.enter_async_context(contents.looking(host.control, volume))
    async with contents.looking(host.control, volume):
        pass


async def test_another_projects_volumes_are_not_there(host: Host) -> None:
    await make(host)
    key = (await host.http.post("/v1/projects", json={"name": "theirs"})).json()["key"]
    theirs = {"Authorization": f"Bearer {key}"}
    assert (await host.http.get("/v1/volumes", headers=theirs)).json()["items"] == []
    assert (await host.http.get("/v1/volumes/data", headers=theirs)).status_code == httpx.codes.NOT_FOUND
    assert (await host.http.delete("/v1/volumes/data", headers=theirs)).status_code == httpx.codes.NOT_FOUND
    body = {"template": "base", "volumes": [{"name": "data", "path": "/data"}]}
    refused = await host.http.post("/v1/sandboxes", json=body, headers={**theirs, **WAIT})
    assert code(refused) == "unknown-volume"
    assert (await host.http.post("/v1/volumes", json={"name": "data"}, headers=theirs)).status_code == 201


@pytest.mark.parametrize("path", ["/a", "/home/user/data", "/devices", "/process", "/ä b/.hidden"])
def test_a_volume_may_be_at(path: str) -> None:
    assert check_path(path) == path


BAD = ("", "/", "a", "a/b", "/a/", "//a", "/a//b", "/.", "/a/..", "/a\0", "/a\x1b", "/dev", "/run/x", "/.space")


@pytest.mark.parametrize("path", [*BAD, "/" + "a" * 255, "/a" * 17], ids=ascii)
def test_no_volume_is_at(path: str) -> None:
    with pytest.raises(ValueError, match="must"):
        check_path(path)


def test_volumes_lie_apart() -> None:
    check_apart(["/a", "/ab", "/b/a"])
    for paths in (["/a", "/a"], ["/a/b", "/a"], ["/a", "/a-", "/a/b"]):
        with pytest.raises(ValueError, match="apart"):
            check_apart(paths)

"""What the host keeps of templates and builds goes when nobody needs it any more, and not before."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection

from space.control import building, dropping, reaper
from space.control.leftovers import Limits, clear
from space.store import drops, releases
from space.store.tables import template_drops
from tests.control_host import Host, code, hosting, until
from tests.scripted_builds import refusal

FROM_BASE = {"kind": "template", "template": "base"}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "LOOK_S", 0.05)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as host:
        yield host


async def shown(host: Host, template: str) -> dict[str, Any]:
    answer = await host.http.get(f"/v1/templates/{template}")
    return answer.json() if answer.is_success else {"missing": answer.status_code}


async def state(host: Host, build: str) -> str:
    return str((await host.http.get(f"/v1/builds/{build}")).json()["state"])


async def test_the_bytes_of_a_template_go_when_nobody_needs_them_any_more(host: Host) -> None:
    digest = await host.release()
    sandbox = await host.create(template="tool")
    fork = (await host.fork(sandbox))[0]["id"]
    async with await host.other() as other:
        body = {"name": "theirs", "source": FROM_BASE}
        build = (await other.post("/v1/templates/builds", json=body)).json()["id"]

        async def told() -> bool:
            return build in host.node.builds.specs

        await until(told, "the node to be told")
        assert host.node.builds.succeed(build) == digest
        assert (await other.get(f"/v1/builds/{build}", params={"wait_s": 20})).json()["digest"] == digest
        assert (await host.http.delete(f"/v1/templates/{digest}")).json()["deleted_at"] is not None
        for step in (
            lambda: other.delete(f"/v1/templates/{digest}"),
            lambda: host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"}),
            lambda: host.http.delete(f"/v1/sandboxes/{fork}", headers={"Prefer": "wait=20"}),
        ):
            await dropping.drop_unneeded(host.control)
            assert host.node.builds.dropped == []
            assert (await step()).is_success
    await dropping.drop_unneeded(host.control)
    assert host.node.builds.dropped == [digest]
    assert {one.get("digest") for one in host.node.templates} == {host.node.templates[0]["digest"]}


async def test_a_sandbox_of_a_deleted_template_sleeps_and_wakes(host: Host) -> None:
    await host.release()
    sandbox = await host.create(template="tool")
    await host.http.delete("/v1/templates/tool")
    assert (await host.verb(sandbox, "suspend")).is_success
    await dropping.drop_unneeded(host.control)
    assert (await host.verb(sandbox, "wake")).is_success
    assert host.node.builds.dropped == []


async def test_the_last_delete_frees_at_once_and_what_is_in_use_at_the_node_comes_again(host: Host) -> None:
    digest = await host.release()
    host.node.builds.failures["drop-template"] = [refusal(409, "template-in-use", "Conflict")]
    await host.http.delete("/v1/templates/tool")
    assert host.node.builds.calls["drop-template"] == 1
    assert host.node.builds.dropped == []
    await dropping.drop_unneeded(host.control)
    assert host.node.builds.dropped == [digest]


async def test_a_create_and_a_delete_of_its_template_at_once_leave_no_sandbox_without_one(host: Host) -> None:
    for number in range(10):
        digest = await host.release(content=f"content {number}")
        created, deleted = await asyncio.gather(
            host.http.post("/v1/sandboxes", json={"template": digest}), host.http.delete(f"/v1/templates/{digest}")
        )
        assert deleted.is_success
        if created.is_success:
            assert digest not in host.node.builds.dropped
        else:
            assert code(created) == "unknown-template"


async def test_a_publication_waits_for_a_drop_that_is_under_way_and_fails_if_that_took_it(host: Host) -> None:
    build = await host.build()
    digest = "sha256:" + "0" * 64

    def begin(connection: Connection) -> None:
        # As a process does that looked before the build was there.
        assert not drops.interferes(connection, digest, host.clock())
        connection.execute(template_drops.update().values(began_at=host.clock(), ended_at=None))

    await host.control.store.write(begin)
    host.node.templates.append({"digest": digest, "bytes": 1})
    host.node.builds.succeed(build, digest=digest)
    looked = host.node.builds.calls["show"]

    async def looked_again() -> bool:
        return host.node.builds.calls["show"] > looked + 2

    await until(looked_again, "the build to be looked at again")
    assert await state(host, build) == "pending"
    host.node.templates[:] = [one for one in host.node.templates if one["digest"] != digest]
    ended_at = host.clock()
    await host.control.store.write(lambda c: drops.end(c, digest, ended_at))
    ended = await host.built(build)
    assert (ended["state"], ended["failure"]["code"]) == ("failed", "template-lost")
    assert await shown(host, "tool") == {"missing": 404}


async def test_what_nobody_has_released_has_ten_minutes_and_goes_when_nobody_needs_it_all_that_time(host: Host) -> None:
    one, other = ("sha256:" + digit * 64 for digit in "56")
    host.node.templates += [{"digest": one, "bytes": 1}, {"digest": other, "bytes": 1}]
    await dropping.drop_unneeded(host.control)
    host.clock.move(599)
    host.node.templates[:] = [two for two in host.node.templates if two["digest"] != other]
    await dropping.drop_unneeded(host.control)
    assert host.node.builds.dropped == []
    host.node.templates.append({"digest": other, "bytes": 1})
    host.clock.move(2)
    await dropping.drop_unneeded(host.control)
    assert host.node.builds.dropped == [one]


async def test_gc_finds_strays_lost_releases_old_untagged_ones_and_kept_steps(host: Host) -> None:
    lost, old, used = [await host.release(name, name) for name in ("lost", "old", "used")]
    for name in ("old", "used"):
        await host.http.delete(f"/v1/templates/{name}/tags/latest")
    await host.create(template=used)
    host.node.templates[:] = [one for one in host.node.templates if one["digest"] != lost]
    stray = "sha256:" + "5" * 64
    host.node.templates.append({"digest": stray, "bytes": 1})
    host.node.builds.cache.append({"id": "snp1", "kind": "step", "bytes": 10})
    host.clock.move(1000)

    async def collect(**fields: Any) -> set[tuple[str, str, bool]]:
        answer = await host.http.post("/v1/gc", json=fields)
        assert answer.is_success, answer.text
        return {(one["kind"], one["name"], one["removed"]) for one in answer.json()["strays"]}

    asked = {"untagged_s": 900, "cache_age_s": 60}
    expected = {("template", stray), ("release-row", lost), ("untagged-release", old), ("build-cache", "snp1")}
    assert await collect(dry_run=True, **asked) == {(*one, False) for one in expected}
    assert (await shown(host, "lost"))["deleted_at"] is None
    assert host.node.builds.dropped == []
    assert await collect(dry_run=True) == {("template", stray, False), ("release-row", lost, False)}
    assert await collect(**asked) == {(*one, True) for one in {*expected, ("template", old)}}
    assert set(host.node.builds.dropped) == {stray, old}
    assert host.node.builds.cache_asked[-1] == {"max_age_s": 60, "dry_run": False}
    assert await shown(host, "lost") == {"missing": 404}
    assert (await shown(host, used))["deleted_at"] is None
    assert await collect(**asked) == set()


async def test_a_host_that_lists_no_template_at_all_has_not_lost_them(host: Host) -> None:
    await host.release()
    host.node.templates.clear()
    assert await dropping.compare(host.control) == []
    assert (await shown(host, "tool"))["deleted_at"] is None


async def test_old_builds_and_tombstones_are_forgotten(host: Host) -> None:
    await host.release()
    build = (await host.http.get("/v1/builds")).json()["items"][0]["id"]
    going_on = await host.build()
    digest = (await host.http.delete("/v1/templates/tool")).json()["digest"]
    host.clock.move(8 * 24 * 3600)
    host.node.builds.failures["forget"] = [refusal(503, "not-ready", "Unavailable")]
    await dropping.forget_builds(host.control)
    assert await state(host, build) == "succeeded", "the node could not be told"
    await dropping.forget_builds(host.control)
    await reaper.sweep(host.control)
    assert host.node.builds.forgotten == [build]
    assert (await host.http.get(f"/v1/builds/{build}")).status_code == httpx.codes.NOT_FOUND
    assert (await host.http.get(f"/v1/builds/{going_on}")).is_success
    assert await host.control.store.read(lambda c: releases.get(c, host.project_id, digest)) is None


async def test_clear_leaves_the_cache_alone_unless_it_is_asked_to(host: Host) -> None:
    await clear(host.control, dry_run=False)
    await clear(host.control, dry_run=False, limits=Limits(untagged_s=1))
    assert host.node.builds.cache_asked == []

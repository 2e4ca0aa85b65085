"""Snapshots: kept while the sandbox goes on, begun from, and dropped when nobody wants them any more."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.control import reaper, snapshots, watcher
from space.model.ids import new_id
from tests.control_host import Host, code, control_over, hosting, until, working

WAIT = {"Prefer": "wait=20"}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as host:
        yield host


async def shown(host: Host, snapshot: str) -> dict[str, Any]:
    return (await host.http.get(f"/v1/snapshots/{snapshot}")).json()


async def begin_from(host: Host, snapshot: str, **fields: Any) -> httpx.Response:
    body = {"template": f"snapshot:{snapshot}", **fields}
    return await host.http.post("/v1/sandboxes", json=body, headers=WAIT)


async def asked(host: Host, verb: str) -> None:
    async def seen() -> bool:
        return any(called == verb for called, _ in host.node.calls)

    await until(seen, f"the node to be asked to {verb}")


async def test_a_snapshot_is_kept_and_told_of_and_its_sandbox_is_as_before(host: Host) -> None:
    sandbox = await host.create(resources={"memory_mib": 512})
    before = (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()
    path = f"/v1/sandboxes/{sandbox}/snapshots"
    answer = await host.http.post(path, json={"name": "point"}, headers=WAIT)
    assert answer.status_code == httpx.codes.CREATED, answer.text
    made, operation = answer.json()["snapshot"], answer.json()["operation"]
    assert (made["state"], made["kind"], made["name"]) == ("ready", "full", "point")
    assert (made["sandbox_id"], made["bytes"]) == (sandbox, host.node.snapshot_bytes)
    assert (made["template_digest"], made["resources"]) == (before["template_digest"], before["resources"])
    assert (operation["kind"], operation["state"], operation["sandbox_id"]) == ("snapshot", "succeeded", sandbox)
    assert operation["timings"]["checkpoint"] > 0
    after = (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()
    changing = {"operation_id", "updated_at"}
    assert {k: v for k, v in after.items() if k not in changing} == {
        k: v for k, v in before.items() if k not in changing
    }
    assert after["operation_id"] == operation["id"]


@pytest.mark.parametrize(
    ("verb", "kind", "status"),
    [
        ("pause", "full", 201),
        ("suspend", "full", 201),
        ("suspend", "disk", 201),
        ("stop", "disk", 201),
        ("stop", "full", 409),
    ],
)
async def test_what_can_be_kept_depends_on_what_there_is_of_the_sandbox(
    host: Host, verb: str, kind: str, status: int
) -> None:
    sandbox = await host.create()
    await host.verb(sandbox, verb)
    state = await host.state(sandbox)
    answer = await host.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={"kind": kind}, headers=WAIT)
    assert answer.status_code == status, answer.text
    assert await host.state(sandbox) == state
    if status == httpx.codes.CONFLICT:
        assert code(answer) == "wrong-state"
        assert answer.json()["error"]["details"]["state"] == "stopped"


async def test_while_it_is_kept_commands_go_on_and_other_verbs_are_busy(host: Host) -> None:
    """L7"""
    sandbox = await host.create()
    held = host.node.hold("snapshot")
    path = f"/v1/sandboxes/{sandbox}/snapshots"
    first = (await host.http.post(path, json={})).json()
    assert await host.state(sandbox) == "running"
    assert (await host.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["true"]})).is_success
    for refused in (
        await host.http.post(path, json={}),
        await host.http.post(f"/v1/sandboxes/{sandbox}/fork", json={}),
        *[await host.http.post(f"/v1/sandboxes/{sandbox}/{verb}") for verb in ("pause", "suspend", "stop")],
    ):
        assert refused.status_code == httpx.codes.CONFLICT
        assert code(refused) == "busy"
        assert refused.json()["error"]["details"]["operation_id"] == first["operation"]["id"]
        assert int(refused.headers["retry-after"]) >= 1
    assert (await host.verb(sandbox, "wake")).is_success, "it runs already"
    held.set()
    assert (await host.operation(first["operation"]["id"]))["state"] == "succeeded"
    assert (await host.verb(sandbox, "pause")).is_success


async def test_delete_of_the_sandbox_waits_until_its_snapshot_is_kept_and_that_outlives_it(host: Host) -> None:
    sandbox = await host.create()
    held = host.node.hold("snapshot")
    made = (await host.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})).json()
    await asked(host, "snapshot")
    deleting = asyncio.create_task(host.http.delete(f"/v1/sandboxes/{sandbox}", headers=WAIT))

    async def is_deleting() -> bool:
        return await host.state(sandbox) == "deleting"

    await until(is_deleting, "the delete to be recorded")
    held.set()
    assert (await deleting).is_success
    assert host.node.calls[-1] == ("destroy", sandbox)
    assert host.node.overlaps == []
    assert (await shown(host, made["snapshot"]["id"]))["state"] == "ready"
    child = await begin_from(host, made["snapshot"]["id"])
    assert child.status_code == httpx.codes.CREATED, child.text


async def test_a_snapshot_that_fails_says_why_and_the_sandbox_goes_on(host: Host) -> None:
    sandbox = await host.create()
    host.node.fail("snapshot", "snapshot-store-full", 503)
    host.node.failures["snapshot"][0] = _full()
    answer = await host.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={}, headers=WAIT)
    assert (answer.status_code, code(answer)) == (httpx.codes.SERVICE_UNAVAILABLE, "snapshot-store-full")
    failed = (await host.http.get("/v1/snapshots")).json()["items"][0]
    assert (failed["state"], failed["failure"]["code"], failed["bytes"]) == ("failed", "snapshot-store-full", 0)
    assert await host.state(sandbox) == "running"
    await snapshots.drop_unwanted(host.control)
    assert host.node.dropped == [failed["id"]], "what a failed one has left is dropped"
    refused = await begin_from(host, failed["id"])
    assert (refused.status_code, code(refused)) == (httpx.codes.UNPROCESSABLE_ENTITY, "unknown-snapshot")


def _full() -> Any:
    from aiohttp import web

    body = {"error": {"code": "snapshot-store-full", "message": "Full.", "kind": "HostFull", "details": {}}}
    return web.json_response(body, status=503)


async def test_a_machine_that_dies_while_it_is_kept_ends_operation_and_sandbox_alike(host: Host) -> None:
    sandbox = await host.create()
    held = host.node.hold("snapshot")
    path = f"/v1/sandboxes/{sandbox}/snapshots"
    waiting = asyncio.create_task(host.http.post(path, json={}, headers=WAIT))
    await asked(host, "snapshot")
    host.node.end(sandbox, "oom-killed")
    await watcher.check(host.control, sandbox)
    assert await host.state(sandbox) == "running", "the operation decides"
    held.set()
    assert (await waiting).is_error
    after = (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()
    assert (after["state"], after["failure"]["code"]) == ("failed", "oom-killed")
    assert (await host.http.get("/v1/snapshots")).json()["items"][0]["state"] == "failed"


async def test_a_machine_that_dies_just_after_it_was_kept_is_noticed_when_its_operation_has_let_go(host: Host) -> None:
    sandbox = await host.create()
    held = host.node.hold("snapshot")
    made = (await host.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})).json()
    await asked(host, "snapshot")
    await watcher.check(host.control, sandbox)
    held.set()
    assert (await host.operation(made["operation"]["id"]))["state"] == "succeeded"
    host.node.machines[sandbox] = "exited"
    assert await host.state(sandbox) == "running"
    await watcher.check_unsettled(host.control)
    assert await host.state(sandbox) == "failed"
    assert host.control.unsettled == set()


async def test_a_sandbox_from_a_snapshot_is_the_snapshots_and_what_is_named_is_its_own(host: Host) -> None:
    source = await host.create(resources={"cpus": 2.0, "memory_mib": 512, "disk_mib": 2048, "io_weight": 7})
    snapshot = await host.snapshot(source)
    answer = await begin_from(host, snapshot, resources={"memory_mib": 768}, env={"A": "b"}, name="again")
    assert answer.status_code == httpx.codes.CREATED, answer.text
    made = answer.json()["sandbox"]
    wanted = {"cpus": 2.0, "memory_mib": 768, "disk_mib": 2048, "pids": 1024, "io_weight": 7}
    assert made["resources"] == wanted
    assert made["template"] == f"snapshot:{snapshot}"
    assert made["forked_from"] is None
    told = host.node.wanted[made["id"]]
    assert (told["snapshot"], told["env"], told["hostname"]) == (snapshot, {"A": "b"}, "again")
    assert told["template_defaults"] == host.node.templates[0]["defaults"]


async def test_commands_that_ran_in_the_snapshot_can_be_asked_for_in_what_begins_from_it(host: Host) -> None:
    source = await host.create()
    path = f"/v1/sandboxes/{source}/commands"
    first, second = [(await host.http.post(path, json={"argv": ["x"]})).json()["command"]["id"] for _ in range(2)]
    host.node.commands[first]["state"] = "running"
    child = (await begin_from(host, await host.snapshot(source))).json()["sandbox"]["id"]
    (inherited,) = (await host.http.get(f"/v1/sandboxes/{child}/commands")).json()["items"]
    assert inherited["id"] not in {first, second}
    assert (inherited["forked_from"], inherited["sandbox_id"]) == (first, child)
    assert (await host.http.get(f"/v1/commands/{inherited['id']}")).json()["state"] == "running"
    attach = (await host.http.post(f"/v1/commands/{inherited['id']}/access")).json()
    assert inherited["id"] in attach["url"]


@pytest.mark.parametrize(
    ("fields", "kind", "status", "problem"),
    [
        ({"driver": "qemu"}, "full", 409, "wrong-driver"),
        ({"driver": "qemu"}, "disk", 409, "wrong-driver"),
        ({"driver": "gvisor"}, "full", 201, None),
        ({"driver": "gvisor"}, "disk", 201, None),
        ({"resources": {"disk_mib": 1024}}, "full", 422, "invalid-request"),
        ({"resources": {"disk_mib": 8192}}, "full", 201, None),
        ({"resources": {"memory_mib": 512}}, "full", 422, "invalid-request"),
        ({"resources": {"memory_mib": 512}}, "disk", 201, None),
        ({"resources": {"memory_mib": 2048}}, "full", 201, None),
    ],
)
async def test_what_a_snapshot_fixes_cannot_be_asked_for_otherwise(
    host: Host, fields: dict[str, Any], kind: str, status: int, problem: str | None
) -> None:
    snapshot = await host.snapshot(await host.create(resources={"disk_mib": 2048}), kind=kind)
    answer = await begin_from(host, snapshot, **fields)
    assert answer.status_code == status, answer.text
    if problem is not None:
        assert code(answer) == problem


async def test_there_is_nothing_to_begin_from_in_what_is_gone_foreign_malformed_or_not_done(host: Host) -> None:
    sandbox = await host.create()
    snapshot = await host.snapshot(sandbox)
    async with await host.other() as other:
        body = {"template": f"snapshot:{snapshot}"}
        foreign = await other.post("/v1/sandboxes", json=body)
        assert (await other.get(f"/v1/snapshots/{snapshot}")).status_code == httpx.codes.NOT_FOUND
        assert (await other.delete(f"/v1/snapshots/{snapshot}")).status_code == httpx.codes.NOT_FOUND
    await host.http.delete(f"/v1/snapshots/{snapshot}")
    answers = [foreign, await begin_from(host, snapshot)]
    answers += [await begin_from(host, text) for text in (new_id("snp"), "", "x", "snp'; --", sandbox)]
    for answer in answers:
        assert (answer.status_code, code(answer)) == (httpx.codes.UNPROCESSABLE_ENTITY, "unknown-snapshot")
    held = host.node.hold("snapshot")
    making = (await host.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})).json()
    early = await begin_from(host, making["snapshot"]["id"])
    assert (early.status_code, code(early)) == (httpx.codes.CONFLICT, "busy")
    assert "retry-after" in early.headers
    held.set()
    await host.operation(making["operation"]["id"])
    assert (await begin_from(host, making["snapshot"]["id"])).is_success


async def test_a_deleted_snapshot_is_a_tombstone_and_deleting_it_again_changes_nothing(host: Host) -> None:
    snapshot = await host.snapshot(await host.create())
    for _ in range(3):
        answer = await host.http.delete(f"/v1/snapshots/{snapshot}")
        assert (answer.status_code, answer.json()["state"]) == (httpx.codes.OK, "deleted")
    assert host.node.dropped == [snapshot]
    assert (await host.http.get("/v1/snapshots")).json()["items"] == []
    listed = (await host.http.get("/v1/snapshots", params={"state": "deleted"})).json()["items"]
    assert [item["id"] for item in listed] == [snapshot]
    host.clock.move(25 * 3600)
    await reaper.sweep(host.control)
    assert (await host.http.get(f"/v1/snapshots/{snapshot}")).status_code == httpx.codes.NOT_FOUND


async def test_the_bytes_of_a_deleted_snapshot_stay_until_whoever_is_beginning_from_it_has(host: Host) -> None:
    snapshot = await host.snapshot(await host.create())
    held = host.node.hold("boot")
    beginning = asyncio.create_task(begin_from(host, snapshot))

    async def begun() -> bool:
        return sum(verb == "boot" for verb, _ in host.node.calls) == 2

    await until(begun, "the second boot to be asked for")
    assert (await host.http.delete(f"/v1/snapshots/{snapshot}")).json()["state"] == "deleted"
    await snapshots.drop_unwanted(host.control)
    assert host.node.dropped == []
    held.set()
    assert (await beginning).is_success
    await snapshots.drop_unwanted(host.control)
    assert host.node.dropped == [snapshot]


async def test_a_snapshot_that_is_deleted_while_it_is_made_is_dropped_when_it_is_done(host: Host) -> None:
    sandbox = await host.create()
    held = host.node.hold("snapshot")
    made = (await host.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})).json()
    await asked(host, "snapshot")
    assert (await host.http.delete(f"/v1/snapshots/{made['snapshot']['id']}")).json()["state"] == "deleted"
    assert host.node.dropped == []
    held.set()
    await host.operation(made["operation"]["id"])
    await snapshots.drop_unwanted(host.control)
    assert host.node.snapshots == {}
    assert (await shown(host, made["snapshot"]["id"]))["state"] == "deleted"


async def test_a_node_that_cannot_drop_now_is_asked_again(host: Host) -> None:
    snapshot = await host.snapshot(await host.create())
    host.node.fail("drop-snapshot", "unavailable", 503)
    assert (await host.http.delete(f"/v1/snapshots/{snapshot}")).is_success
    assert set(host.node.snapshots) == {snapshot}
    await snapshots.drop_unwanted(host.control)
    assert host.node.snapshots == {}


async def test_one_idempotency_key_makes_one_snapshot(host: Host) -> None:
    """L10"""
    sandbox = await host.create()
    path, headers = f"/v1/sandboxes/{sandbox}/snapshots", {"Idempotency-Key": "k", **WAIT}
    answers = await asyncio.gather(*(host.http.post(path, json={"name": "a"}, headers=headers) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {httpx.codes.CREATED}, [a.text for a in answers]
    assert len({answer.json()["snapshot"]["id"] for answer in answers}) == 1
    assert len(host.node.snapshots) == 1
    other = await host.http.post(path, json={"name": "b"}, headers=headers)
    assert code(other) == "idempotency-key-reused"


@pytest.mark.parametrize("verb", ["pause", "suspend", "stop"])
async def test_a_verb_sent_again_with_its_idempotency_key_is_the_first_one_again(host: Host, verb: str) -> None:
    """L10"""
    sandbox = await host.create()
    first, second = [await host.verb(sandbox, verb, **{"Idempotency-Key": "k"}) for _ in range(2)]
    assert second.status_code == httpx.codes.OK, second.text
    assert second.json()["operation"] == first.json()["operation"]
    assert (await host.verb(sandbox, verb)).status_code == httpx.codes.CONFLICT


async def test_a_verb_that_joined_another_request_is_that_one_also_when_it_is_sent_again(host: Host) -> None:
    """L10"""
    sandbox = await host.create()
    held = host.node.hold("suspend")
    path = f"/v1/sandboxes/{sandbox}/suspend"
    began = (await host.http.post(path)).json()["operation"]["id"]
    for _ in range(2):
        joined = await host.http.post(path, headers={"Idempotency-Key": "k"})
        assert joined.json()["operation"]["id"] == began
    held.set()
    await host.operation(began)
    again = await host.http.post(path, headers={"Idempotency-Key": "k"})
    assert again.json()["operation"]["id"] == began


async def test_lists_are_filtered_by_sandbox_name_and_state_and_paged(host: Host) -> None:
    one, two = await host.create(), await host.create()
    made = [await host.snapshot(one, name="a"), await host.snapshot(one, name="b"), await host.snapshot(two, name="a")]

    async def listed(**params: Any) -> list[str]:
        return [item["id"] for item in (await host.http.get("/v1/snapshots", params=params)).json()["items"]]

    assert await listed() == made[::-1]
    assert await listed(sandbox_id=one) == [made[1], made[0]]
    assert await listed(name="a") == [made[2], made[0]]
    assert await listed(state="creating") == []
    page = (await host.http.get("/v1/snapshots", params={"limit": 2})).json()
    rest = (await host.http.get("/v1/snapshots", params={"limit": 2, "cursor": page["next_cursor"]})).json()
    assert [item["id"] for item in [*page["items"], *rest["items"]]] == made[::-1]


async def test_an_interrupted_snapshot_is_carried_on_by_the_next_process(tmp_path: Path) -> None:
    """L12"""
    async with hosting(tmp_path, runner=False) as host:
        async with working(host.control):
            sandbox = await host.create()
            held = host.node.hold("snapshot")
            made = (await host.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})).json()
            await asked(host, "snapshot")
        held.set()
        async with control_over(host.settings, host.clock) as following, working(following):
            assert (await host.operation(made["operation"]["id"]))["state"] == "succeeded"
            assert (await shown(host, made["snapshot"]["id"]))["state"] == "ready"
        assert set(host.node.snapshots) == {made["snapshot"]["id"]}


async def test_a_project_has_so_many_snapshots_and_room_again_when_one_is_gone(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOTS_MAX", 2)
    sandbox = await host.create()
    first, _ = [await host.snapshot(sandbox) for _ in range(2)]
    refused = await host.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})
    assert (refused.status_code, code(refused)) == (httpx.codes.TOO_MANY_REQUESTS, "snapshots-max")
    assert await host.state(sandbox) == "running"
    await host.fork(sandbox)
    await host.http.delete(f"/v1/snapshots/{first}")
    await host.snapshot(sandbox)


async def test_node_and_store_agree_on_snapshots_again(host: Host) -> None:
    """L12"""
    kept, lost = [await host.snapshot(await host.create()) for _ in range(2)]
    stray = new_id("snp")
    host.node.snapshots[stray] = host.node.snapshots.pop(lost)
    host.node.snapshots["warm-one-of-the-node"] = host.node.snapshots[stray]
    looked = await snapshots.compare(host.control, dry_run=True)
    assert set(looked) == {("snapshot", stray), ("snapshot-row", lost)}
    assert host.node.dropped == []
    await watcher.compare(host.control)
    assert set(host.node.snapshots) == {kept, "warm-one-of-the-node"}
    assert (await shown(host, lost))["failure"]["code"] == "snapshot-lost"
    assert (await shown(host, kept))["state"] == "ready"
    assert host.control.found == {"snapshot": 1, "snapshot-row": 1}
    await watcher.compare(host.control)
    assert host.control.found == {"snapshot": 1, "snapshot-row": 1}


async def test_a_snapshot_that_is_done_while_node_and_store_are_compared_is_not_lost(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L12"""
    sandbox, made = await host.create(), list[str]()
    listed_by_node = host.control.node.snapshots

    async def listed_just_before() -> list[dict[str, Any]]:
        listed = await listed_by_node()
        if not made:
            made.append(await host.snapshot(sandbox))
        return listed

    monkeypatch.setattr(host.control.node, "snapshots", listed_just_before)
    assert await snapshots.compare(host.control) == []
    assert (await shown(host, made[0]))["state"] == "ready"
    assert set(host.node.snapshots) == set(made)

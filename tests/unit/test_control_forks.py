"""Forks: the source is copied once and goes on; each fork comes up, or does not, by itself."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.control import forks, leases, snapshots, watcher
from space.model.snapshot import SnapshotState
from space.store import snapshots as rows
from tests.control_host import Host, code, control_over, hosting, until, working

WAIT = {"Prefer": "wait=20"}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as host:
        yield host


async def ask(host: Host, source: str, **fields: Any) -> dict[str, Any]:
    answer = await host.http.post(f"/v1/sandboxes/{source}/fork", json=fields)
    assert answer.status_code == httpx.codes.ACCEPTED, answer.text
    return answer.json()


async def boots(host: Host, at_least: int) -> None:
    async def asked() -> bool:
        return sum(verb == "boot" for verb, _ in host.node.calls) >= at_least

    await until(asked, f"{at_least} boots to be asked for")


async def test_forks_are_the_sources_but_for_identity_and_what_is_named(host: Host) -> None:
    """L15"""
    source = await host.create(
        name="origin", metadata={"a": "1"}, env={"A": "1"}, timeout_s=100, resources={"memory_mib": 300}
    )
    host.clock.move(50)
    made = await host.fork(source, count=3, metadata={"b": "2"})
    original = (await host.http.get(f"/v1/sandboxes/{source}")).json()
    assert original["state"] == "running"
    assert len({fork["id"] for fork in made} | {source}) == 4
    for fork in made:
        for field in ("template", "template_digest", "driver", "resources", "timeout_s", "on_timeout"):
            assert fork[field] == original[field], field
        assert (fork["state"], fork["ready"], fork["name"]) == ("running", True, None)
        assert (fork["forked_from"], fork["metadata"]) == (source, {"b": "2"})
        assert fork["deadline_at"] > original["deadline_at"], "its time begins afresh"
        told = host.node.wanted[fork["id"]]
        assert (told["env"], told["hostname"]) == ({"A": "1"}, fork["id"])
    assert len({host.node.wanted[fork["id"]]["snapshot"] for fork in made}) == 1, "copied once"


@pytest.mark.parametrize("verb", ["pause", "suspend"])
async def test_a_source_without_a_running_machine_is_forked_and_stays_so(host: Host, verb: str) -> None:
    source = await host.create()
    await host.verb(source, verb)
    state = await host.state(source)
    assert [fork["state"] for fork in await host.fork(source, count=2)] == ["running", "running"]
    assert await host.state(source) == state


async def test_what_has_no_memory_cannot_be_forked(host: Host) -> None:
    source = await host.create()
    await host.verb(source, "stop")
    refused = await host.http.post(f"/v1/sandboxes/{source}/fork", json={})
    assert (refused.status_code, code(refused)) == (httpx.codes.CONFLICT, "wrong-state")
    assert len((await host.http.get("/v1/sandboxes")).json()["items"]) == 1, "nothing of it was recorded"


@pytest.mark.parametrize("count", [0, 65, 1.5, "2"])
async def test_the_number_of_forks_is_from_1_to_64(host: Host, count: Any) -> None:
    source = await host.create()
    refused = await host.http.post(f"/v1/sandboxes/{source}/fork", json={"count": count})
    assert refused.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert refused.json()["error"]["details"]["field"] == "count"


async def test_the_source_is_free_as_soon_as_it_is_copied(host: Host) -> None:
    source = await host.create()
    copied, booted = host.node.hold("snapshot"), host.node.hold("boot")
    made = await ask(host, source, count=2)
    assert code(await host.verb(source, "pause")) == "busy"
    copied.set()
    await boots(host, 2)
    paused = await host.verb(source, "pause")
    assert paused.is_success, paused.text
    assert {await host.state(fork["id"]) for fork in made["sandboxes"]} == {"creating"}
    deleted = await host.http.delete(f"/v1/sandboxes/{source}", headers=WAIT)
    assert deleted.is_success, "it does not wait for what came from it"
    booted.set()
    assert (await host.operation(made["operation"]["id"]))["state"] == "succeeded"
    assert {await host.state(fork["id"]) for fork in made["sandboxes"]} == {"running"}


async def test_only_a_few_come_up_at_a_time(host: Host) -> None:
    source = await host.create()
    held = host.node.hold("boot")
    made = await ask(host, source, count=10)
    await boots(host, 1 + forks.AT_ONCE)
    coming = [fork["id"] for fork in made["sandboxes"] if host.node.in_flight[fork["id"]]]
    assert len(coming) == forks.AT_ONCE
    held.set()
    assert (await host.operation(made["operation"]["id"]))["state"] == "succeeded"


async def test_more_forks_than_seats_do_not_wait_for_one_another_for_ever(tmp_path: Path) -> None:
    async with hosting(tmp_path, runner=False) as host:
        host.control.leases._free = 2
        async with working(host.control):
            sources = [await host.create() for _ in range(6)]
            answers = [await ask(host, source, count=4) for source in sources]
            ends = await asyncio.gather(*(host.operation(made["operation"]["id"]) for made in answers))
            assert {end["state"] for end in ends} == {"succeeded"}

            async def given_back() -> bool:
                return host.control.leases.free == 2

            await until(given_back, "all seats to be given back")


async def test_a_fork_that_fails_is_named_and_touches_no_other(host: Host) -> None:
    source = await host.create()
    host.node.fail("boot", "start-failed", 500)
    answer = await host.http.post(f"/v1/sandboxes/{source}/fork", json={"count": 3}, headers=WAIT)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (httpx.codes.INTERNAL_SERVER_ERROR, "start-failed")
    ((failed, why),) = error["details"]["forks"].items()
    assert why == "start-failed"
    assert failed in error["message"]
    listed = (await host.http.get("/v1/sandboxes")).json()["items"]
    states = {item["id"]: item["state"] for item in listed if item["forked_from"] == source}
    assert sorted(states.values()) == ["failed", "running", "running"]
    assert states[failed] == "failed"
    assert failed not in host.node.machines
    await until(lambda: _dropped(host), "the copy to be dropped all the same")
    again = await host.verb(failed, "start")
    assert code(again) == "disk-lost", "what it was to begin from is gone"


async def test_forks_that_fail_for_different_reasons_are_incomplete(host: Host) -> None:
    source = await host.create()
    host.node.fail("boot", "start-failed", 500)
    host.node.fail("boot", "image-damaged", 500)
    made = await ask(host, source, count=3)
    ended = await host.operation(made["operation"]["id"])
    assert ended["error"]["code"] == "fork-incomplete"
    assert sorted(ended["error"]["details"]["forks"].values()) == ["image-damaged", "start-failed"]


async def test_a_source_that_cannot_be_copied_fails_them_all_and_goes_on(host: Host) -> None:
    source = await host.create()
    host.node.fail("snapshot", "checkpoint-failed", 500)
    answer = await host.http.post(f"/v1/sandboxes/{source}/fork", json={"count": 2}, headers=WAIT)
    assert code(answer) == "checkpoint-failed"
    listed = (await host.http.get("/v1/sandboxes")).json()["items"]
    made = [item for item in listed if item["forked_from"] == source]
    assert {(fork["state"], fork["failure"]["code"]) for fork in made} == {("failed", "checkpoint-failed")}
    assert await host.state(source) == "running"
    assert (await host.verb(source, "pause")).is_success
    assert sum(verb == "boot" for verb, _ in host.node.calls) == 1


async def test_a_fork_deleted_before_its_turn_never_comes_up(host: Host) -> None:
    source = await host.create()
    copied = host.node.hold("snapshot")
    made = await ask(host, source, count=2)
    unwanted, wanted = (fork["id"] for fork in made["sandboxes"])
    assert (await host.http.delete(f"/v1/sandboxes/{unwanted}", headers=WAIT)).is_success
    copied.set()
    ended = await host.operation(made["operation"]["id"])
    assert ended["error"]["details"]["forks"] == {unwanted: "cancelled"}
    assert host.node.booted[unwanted] == 0
    assert await host.state(wanted) == "running"


async def test_a_source_deleted_while_it_is_copied_still_gives_its_forks(host: Host) -> None:
    source = await host.create()
    copied = host.node.hold("snapshot")
    made = await ask(host, source, count=2)

    async def asked() -> bool:
        return host.node.calls[-1][0] == "snapshot"

    await until(asked, "the copy to be asked for")
    deleting = asyncio.create_task(host.http.delete(f"/v1/sandboxes/{source}", headers=WAIT))

    async def is_deleting() -> bool:
        return await host.state(source) == "deleting"

    await until(is_deleting, "the delete to be recorded")
    copied.set()
    assert (await deleting).is_success
    assert host.node.overlaps == []
    assert (await host.operation(made["operation"]["id"]))["state"] == "succeeded"
    assert set(host.node.machines) == {fork["id"] for fork in made["sandboxes"]}


async def test_a_fork_nobody_has_begun_is_cancelled_by_the_deletion_of_its_source(tmp_path: Path) -> None:
    async with hosting(tmp_path, runner=False) as host:
        async with working(host.control):
            source = await host.create()
        for _ in range(leases.SEATS):
            host.control.leases.take()
        made = await ask(host, source, count=2)
        await host.http.delete(f"/v1/sandboxes/{source}")
        assert (await host.operation(made["operation"]["id"]))["state"] == "cancelled"
        for fork in made["sandboxes"]:
            shown = (await host.http.get(f"/v1/sandboxes/{fork['id']}")).json()
            assert (shown["state"], shown["failure"]["code"]) == ("failed", "cancelled")
        await snapshots.drop_unwanted(host.control)
        assert await host.control.store.read(rows.kept) == {}


@pytest.mark.parametrize("phase", ["snapshot", "boot"])
async def test_a_fork_that_was_cut_short_is_carried_on_by_the_next_process(tmp_path: Path, phase: str) -> None:
    """L12"""
    async with hosting(tmp_path, runner=False) as host:
        async with working(host.control):
            source = await host.create()
            held = host.node.hold(phase)
            made = await ask(host, source, count=6)

            async def asked() -> bool:
                return host.node.calls[-1][0] == phase

            await until(asked, f"the {phase} to be asked for")
        held.set()
        async with control_over(host.settings, host.clock) as following, working(following):
            assert (await host.operation(made["operation"]["id"]))["state"] == "succeeded"
        assert set(host.node.machines) == {source, *(fork["id"] for fork in made["sandboxes"])}
        assert max(host.node.booted.values()) == 1
        await snapshots.drop_unwanted(host.control)
        await until(lambda: _dropped(host), "the copy to be dropped")


async def test_the_copy_of_a_fork_is_nobodys_to_see_or_use(host: Host) -> None:
    source = await host.create()
    held = host.node.hold("boot")
    made = await ask(host, source, count=1)
    await boots(host, 2)
    (copy,) = host.node.snapshots
    assert (await host.http.get("/v1/snapshots")).json()["items"] == []
    assert (await host.http.get(f"/v1/snapshots/{copy}")).status_code == httpx.codes.NOT_FOUND
    refused = await host.http.post("/v1/sandboxes", json={"template": f"snapshot:{copy}"})
    assert code(refused) == "unknown-snapshot"
    await watcher.compare(host.control)
    assert set(host.node.snapshots) == {copy}, "it is in use"
    held.set()
    await host.operation(made["operation"]["id"])

    await until(lambda: _dropped(host), "the copy to be dropped")

    async def recorded() -> bool:
        kept = await host.control.store.read(lambda connection: rows.get(connection, copy))
        assert kept is not None
        return (kept.state, kept.dropped) == (SnapshotState.DELETED, True)

    await until(recorded, "that to be recorded")


async def test_commands_go_on_in_each_fork_under_an_id_of_its_own(host: Host) -> None:
    source = await host.create()
    path = f"/v1/sandboxes/{source}/commands"
    command = (await host.http.post(path, json={"argv": ["x"]})).json()["command"]["id"]
    host.node.commands[command]["state"] = "running"
    ids = set()
    for fork in await host.fork(source, count=3):
        (inherited,) = (await host.http.get(f"/v1/sandboxes/{fork['id']}/commands")).json()["items"]
        assert inherited["forked_from"] == command
        ids.add((await host.http.get(f"/v1/commands/{inherited['id']}")).json()["id"])
    assert len(ids) == 3
    assert command not in ids


async def test_the_operation_tells_how_long_copying_and_coming_up_took(host: Host) -> None:
    source = await host.create()
    answer = await host.http.post(f"/v1/sandboxes/{source}/fork", json={"count": 2}, headers=WAIT)
    timings = answer.json()["operation"]["timings"]
    assert {"checkpoint", "snapshot", "forks", "fork-longest", "queued", "total"} <= set(timings)
    assert timings["queued"] + timings["snapshot"] + timings["forks"] == pytest.approx(timings["total"])


async def test_one_idempotency_key_makes_one_set_of_forks(host: Host) -> None:
    """L10"""
    source = await host.create()
    headers = {"Idempotency-Key": "k", **WAIT}
    path = f"/v1/sandboxes/{source}/fork"
    answers = await asyncio.gather(*(host.http.post(path, json={"count": 2}, headers=headers) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {httpx.codes.CREATED}, [a.text for a in answers]
    assert len({tuple(fork["id"] for fork in answer.json()["sandboxes"]) for answer in answers}) == 1
    assert len(host.node.machines) == 3


async def _dropped(host: Host) -> bool:
    """The copy goes after the fork has been answered, and that is noted then."""
    return host.node.snapshots == {} and await host.control.store.read(rows.kept) == {}

"""What happens by itself: deadlines, machines that end, and the comparison of node and store."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.control import reaper, watcher
from tests.control_host import Host, control_over, hosting, until, working


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """A control plane whose runner works; a test calls the reaper's steps itself."""
    async with hosting(tmp_path) as host:
        yield host


async def comes_to(host: Host, sandbox: str, state: str) -> dict[str, Any]:
    async def there() -> bool:
        return await host.state(sandbox) == state

    await until(there, f"{sandbox} to be {state}")
    answer = await host.http.get(f"/v1/sandboxes/{sandbox}")
    return answer.json() if answer.is_success else {}


@pytest.mark.parametrize(
    ("on_timeout", "state"), [("delete", "not-found"), ("suspend", "suspended"), ("stop", "stopped")]
)
async def test_at_its_deadline_a_sandbox_does_what_it_was_told(host: Host, on_timeout: str, state: str) -> None:
    sandbox = await host.create(timeout_s=100, on_timeout=on_timeout)
    host.clock.move(99)
    await reaper.end_due(host.control)
    assert await host.state(sandbox) == "running"
    host.clock.move(2)
    await reaper.end_due(host.control)
    await comes_to(host, sandbox, state)


async def test_a_paused_sandbox_has_its_deadline_too(host: Host) -> None:
    sandbox = await host.create(timeout_s=100, on_timeout="suspend")
    await host.verb(sandbox, "pause")
    host.clock.move(101)
    await reaper.end_due(host.control)
    await comes_to(host, sandbox, "suspended")


async def test_a_deadline_that_was_acted_on_in_vain_is_tried_again_but_not_at_once(host: Host) -> None:
    sandbox = await host.create(timeout_s=100, on_timeout="suspend")
    host.node.fail("suspend", "open-deleted-file", 409)
    host.clock.move(101)
    await reaper.end_due(host.control)
    await comes_to(host, sandbox, "running")
    for _ in range(3):
        await reaper.end_due(host.control)
    assert host.node.calls.count(("suspend", sandbox)) == 1
    host.clock.move(31)
    await reaper.end_due(host.control)
    await comes_to(host, sandbox, "suspended")


async def test_a_failed_sandbox_that_was_to_be_deleted_is_deleted_at_its_deadline(host: Host) -> None:
    host.node.fail("boot", "host-full", 503, times=2)
    for on_timeout in ("delete", "stop"):
        await host.http.post(
            "/v1/sandboxes",
            json={"template": "base", "timeout_s": 100, "on_timeout": on_timeout, "name": on_timeout},
            headers={"Prefer": "wait=20"},
        )
    host.clock.move(101)
    await reaper.end_due(host.control)

    async def one_left() -> bool:
        return [s["name"] for s in (await host.http.get("/v1/sandboxes")).json()["items"]] == ["stop"]

    await until(one_left, "the one to be deleted")


async def test_the_deadline_stands_still_while_suspended_and_begins_again_at_wake(host: Host) -> None:
    sandbox = await host.create(timeout_s=100)
    suspended = (await host.verb(sandbox, "suspend")).json()["sandbox"]
    assert suspended["deadline_at"] is None
    host.clock.move(1000)
    await reaper.end_due(host.control)
    woken = (await host.verb(sandbox, "wake")).json()["sandbox"]
    assert woken["deadline_at"] is not None
    await reaper.end_due(host.control)
    assert await host.state(sandbox) == "running"


async def test_pause_neither_stops_nor_renews_a_deadline(host: Host) -> None:
    sandbox = await host.create(timeout_s=100)
    first = (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()["deadline_at"]
    await host.verb(sandbox, "pause")
    resumed = (await host.verb(sandbox, "resume")).json()["sandbox"]
    assert resumed["deadline_at"] == first


@pytest.mark.parametrize(("on_timeout", "state"), [("suspend", "suspended"), ("stop", "stopped")])
async def test_a_deadline_renewed_as_it_fires_is_met_or_holds_and_a_later_one_counts_from_the_next_start(
    host: Host, on_timeout: str, state: str
) -> None:
    """L8: never early, never immortal."""
    held = met = 0
    for round_ in range(24):
        sandbox = await host.create(timeout_s=100, on_timeout=on_timeout)
        host.clock.move(101)

        async def renew(sandbox: str = sandbox, after: int = round_ % 8) -> httpx.Response:
            for _ in range(after):
                await asyncio.sleep(0)
            return await host.http.patch(f"/v1/sandboxes/{sandbox}", json={"timeout_s": 1000})

        renewed, _ = await asyncio.gather(renew(), reaper.end_due(host.control))
        assert renewed.is_success
        if renewed.json()["state"] == "running":
            held += 1
            await reaper.end_due(host.control)
            assert await host.state(sandbox) == "running", "a renewal that was taken holds"
        else:
            met += 1
            await comes_to(host, sandbox, state)
            woken = (await host.verb(sandbox, "wake")).json()["sandbox"]
            assert woken["deadline_at"] is not None
        host.clock.move(999)
        await reaper.end_due(host.control)
        assert await host.state(sandbox) == "running", "never early"
        host.clock.move(2)
        await reaper.end_due(host.control)
        await comes_to(host, sandbox, state)
        await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})
    assert held
    assert held + met == 24


async def test_a_deadline_that_passes_while_the_sandbox_is_copied_is_met_after_that(host: Host) -> None:
    sandbox = await host.create(timeout_s=100, on_timeout="suspend")
    held = host.node.hold("snapshot")
    made = (await host.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})).json()
    host.clock.move(101)
    await reaper.end_due(host.control)
    assert await host.state(sandbox) == "running"
    held.set()
    assert (await host.operation(made["operation"]["id"]))["state"] == "succeeded"
    await reaper.end_due(host.control)
    await comes_to(host, sandbox, "suspended")


async def test_no_deadline_means_never(host: Host) -> None:
    never, no_longer = await host.create(), await host.create(timeout_s=100)
    await host.http.patch(f"/v1/sandboxes/{no_longer}", json={"timeout_s": None})
    host.clock.move(10 * 365 * 24 * 3600)
    await reaper.end_due(host.control)
    assert (await host.state(never), await host.state(no_longer)) == ("running", "running")


async def test_a_deadline_renewed_as_it_fires_is_either_kept_or_refused_never_both(host: Host) -> None:
    """L8"""
    kept = refused = 0
    for round_ in range(40):
        sandbox = await host.create(timeout_s=100)
        host.clock.move(101)

        async def renew(sandbox: str = sandbox, after: int = round_ % 8) -> httpx.Response:
            for _ in range(after):
                await asyncio.sleep(0)
            return await host.http.patch(f"/v1/sandboxes/{sandbox}", json={"timeout_s": 1000})

        renewed, _ = await asyncio.gather(renew(), reaper.end_due(host.control))
        if renewed.is_success:
            kept += 1
            await reaper.end_due(host.control)
            assert await host.state(sandbox) == "running"
            await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})
        else:
            refused += 1
            await comes_to(host, sandbox, "not-found")
    assert kept + refused == 40
    assert kept


async def test_a_renewal_while_an_operation_runs_is_not_lost(host: Host) -> None:
    """L8"""
    sandbox = await host.create(timeout_s=100)
    held = host.node.hold("pause")
    pausing = asyncio.create_task(host.verb(sandbox, "pause"))
    await comes_to(host, sandbox, "pausing")
    renewed = (await host.http.patch(f"/v1/sandboxes/{sandbox}", json={"timeout_s": 5000})).json()["deadline_at"]
    held.set()
    assert (await pausing).json()["sandbox"]["deadline_at"] == renewed


async def test_deadlines_are_kept_across_a_restart(tmp_path: Path) -> None:
    """L8"""
    async with hosting(tmp_path) as host:
        sandbox = await host.create(timeout_s=100, on_timeout="stop")
        await host.http.patch(f"/v1/sandboxes/{sandbox}", json={"timeout_s": 300})
        async with control_over(host.settings, host.clock) as restarted, working(restarted):
            host.clock.move(200)
            await reaper.end_due(restarted)
            assert await host.state(sandbox) == "running"
            host.clock.move(101)
            await reaper.end_due(restarted)
            await comes_to(host, sandbox, "stopped")


async def test_a_machine_of_no_sandbox_is_destroyed(host: Host) -> None:
    """L12"""
    mine = await host.create()
    host.node.machines["sbxaaaaaaaaaaaaaaaa"] = "running"
    host.node.machines["not-one-of-ours"] = "running"
    host.node.machines["sbxbbbbbbbbbbbbbbbb"] = "running"
    host.node.spares.add("sbxbbbbbbbbbbbbbbbb")
    await watcher.compare(host.control)
    assert set(host.node.machines) == {mine, "not-one-of-ours", "sbxbbbbbbbbbbbbbbbb"}, "a spare is the node's own"


@pytest.mark.parametrize("machine", ["running", "stopped", "exited"])
async def test_what_a_failed_create_left_at_the_node_is_destroyed_and_the_sandbox_can_still_be_started(
    host: Host, machine: str
) -> None:
    host.node.fail("boot", "host-lost", 500)
    host.node.fail("destroy", "host-error", 500)
    answer = await host.http.post("/v1/sandboxes", json={"template": "base"}, headers={"Prefer": "wait=20"})
    sandbox = answer.json()["error"]["details"]["sandbox_id"]
    host.node.machines[sandbox] = machine
    await watcher.compare(host.control)
    assert host.node.machines == {}
    assert await host.state(sandbox) == "failed"
    assert (await host.verb(sandbox, "start")).is_success
    await watcher.compare(host.control)
    assert host.node.machines == {sandbox: "running"}
    assert await host.state(sandbox) == "running"


async def test_a_machine_of_a_deleted_sandbox_is_destroyed(host: Host) -> None:
    sandbox = await host.create()
    await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})
    host.node.machines[sandbox] = "running"
    await watcher.compare(host.control)
    assert host.node.machines == {}


@pytest.mark.parametrize(
    ("verb", "machine", "cause", "code"),
    [
        (None, "exited", "oom-killed", "oom-killed"),
        (None, "exited", "something-new", "machine-exited"),
        (None, "absent", None, "machine-exited"),
        (None, "stopped", None, "machine-exited"),
        ("pause", "exited", None, "machine-exited"),
        ("suspend", "absent", None, "disk-lost"),
        ("stop", "absent", None, "disk-lost"),
    ],
)
async def test_a_sandbox_whose_machine_is_gone_is_failed_with_the_cause(
    host: Host, verb: str | None, machine: str, cause: str | None, code: str
) -> None:
    sandbox = await host.create()
    if verb is not None:
        await host.verb(sandbox, verb)
    host.node.machines[sandbox] = machine
    if machine == "absent":
        del host.node.machines[sandbox]
    if cause is not None:
        host.node.causes[sandbox] = cause
    await watcher.compare(host.control)
    shown = (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()
    assert (shown["state"], shown["ready"], shown["failure"]["code"]) == ("failed", False, code)


async def test_a_sandbox_between_two_states_is_left_to_its_operation(host: Host) -> None:
    sandbox = await host.create()
    held = host.node.hold("suspend")
    suspending = asyncio.create_task(host.verb(sandbox, "suspend"))
    await comes_to(host, sandbox, "suspending")
    host.node.machines[sandbox] = "exited"
    await watcher.compare(host.control)
    assert await host.state(sandbox) == "suspending"
    held.set()
    assert (await suspending).is_error
    assert await host.state(sandbox) == "failed"


async def test_an_exit_is_told_by_the_node_and_seen_at_once(tmp_path: Path) -> None:
    async with hosting(tmp_path, reaper=True) as host:
        sandbox = await host.create()

        async def listening() -> bool:
            return host.node.listeners == 1

        await until(listening, "the reaper to listen")
        host.node.end(sandbox, "oom-killed")
        shown = await comes_to(host, sandbox, "failed")
        assert shown["failure"]["code"] == "oom-killed"
        assert f"{shown['resources']['memory_mib']} MiB" in shown["failure"]["message"]


async def test_news_of_an_exit_that_comes_after_a_restart_of_the_machine_is_not_believed(tmp_path: Path) -> None:
    async with hosting(tmp_path, reaper=True) as host:
        sandbox, witness = await host.create(), await host.create()

        async def listening() -> bool:
            return host.node.listeners == 1

        await until(listening, "the reaper to listen")
        host.node.tell({"machine": sandbox, "event": "exited", "cause": "machine-exited"})
        host.node.end(witness)
        await comes_to(host, witness, "failed")
        assert await host.state(sandbox) == "running"


async def test_readiness_follows_the_guest(tmp_path: Path) -> None:
    async with hosting(tmp_path, reaper=True) as host:
        sandbox = await host.create()

        async def listening() -> bool:
            return host.node.listeners == 1

        await until(listening, "the reaper to listen")

        async def ready() -> bool:
            return (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()["ready"]

        async def not_ready() -> bool:
            return not await ready()

        host.node.ready = False
        host.node.tell({"machine": sandbox, "event": "guest-lost"})
        await until(not_ready, "the sandbox to be not ready")
        host.node.ready = True
        await watcher.compare(host.control)
        assert await ready()


async def test_the_node_gets_the_signing_key_whenever_it_comes_up(tmp_path: Path) -> None:
    async with hosting(tmp_path, reaper=True) as host:

        async def has_key() -> bool:
            return host.node.token_key == host.control.signer.public_pem

        await until(has_key, "the node to have the key")


async def test_a_deletion_that_failed_is_taken_up_again_until_it_is_done(host: Host) -> None:
    sandbox = await host.create()
    host.node.fail("destroy", "host-error", 500)
    answer = await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})
    assert answer.is_error
    assert await host.state(sandbox) == "failed"
    for verb in ("wake", "start"):
        refused = await host.verb(sandbox, verb)
        assert refused.status_code == httpx.codes.CONFLICT, "an accepted delete cannot be undone"
    await reaper.delete_again(host.control)
    await comes_to(host, sandbox, "not-found")
    assert host.node.machines == {}


async def test_tombstones_are_kept_for_a_day_for_their_operations(host: Host) -> None:
    sandbox = await host.create()
    await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})

    async def listed() -> int:
        return len((await host.http.get("/v1/operations", params={"sandbox_id": sandbox})).json()["items"])

    host.clock.move(23 * 3600)
    await reaper.sweep(host.control)
    assert await listed() == 2
    host.clock.move(2 * 3600)
    await reaper.sweep(host.control)
    assert await listed() == 0


async def test_commands_are_kept_for_a_day_and_as_long_as_the_node_has_them(host: Host) -> None:
    sandbox = await host.create()
    path = f"/v1/sandboxes/{sandbox}/commands"
    going_on, forgotten = [(await host.http.post(path, json={"argv": ["x"]})).json()["command"]["id"] for _ in range(2)]

    async def listed() -> set[str]:
        return {item["id"] for item in (await host.http.get(path)).json()["items"]}

    del host.node.commands[forgotten]
    await reaper.sweep_commands(host.control)
    assert await listed() == {going_on, forgotten}
    host.clock.move(25 * 3600)
    await reaper.sweep_commands(host.control)
    assert await listed() == {going_on}


async def test_names_of_no_template_do_not_become_calls_of_the_node(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    ask = host.control.node.templates

    async def counted() -> list[dict[str, Any]]:
        nonlocal asked
        asked += 1
        return await ask()

    monkeypatch.setattr(host.control.node, "templates", counted)
    unknown = [host.http.post("/v1/sandboxes", json={"template": f"unknown{n}"}) for n in range(30)]
    answers = await asyncio.gather(*unknown)
    assert {answer.status_code for answer in answers} == {httpx.codes.UNPROCESSABLE_ENTITY}
    assert 1 <= asked <= 3


async def test_new_templates_of_the_node_are_found_at_their_first_use(host: Host) -> None:
    await host.create()
    digest = "sha256:" + "cd" * 32
    host.node.templates = [*host.node.templates, {**host.node.templates[0], "name": "fresh", "digest": digest}]
    answer = await host.http.post("/v1/sandboxes", json={"template": "fresh"})
    assert answer.json()["sandbox"]["template_digest"] == digest
    host.node.templates = host.node.templates[:1]
    from space.control import templates

    await templates.synchronise(host.control)
    gone = await host.http.post("/v1/sandboxes", json={"template": "fresh"})
    assert gone.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    listed = (await host.http.get("/v1/templates")).json()["items"]
    assert [(item["name"], item["tag"]) for item in listed] == [("base", "latest")]

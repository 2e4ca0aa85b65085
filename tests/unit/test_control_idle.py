"""Idleness, and waking on request."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.control import idle, reaper
from tests.control_host import Host, code, hosting, until


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """A control plane whose runner works; a test calls the steps of the reaper itself."""
    async with hosting(tmp_path) as host:
        yield host


async def comes_to(host: Host, sandbox: str, state: str) -> None:
    async def there() -> bool:
        return await host.state(sandbox) == state

    await until(there, f"{sandbox} to be {state}")


async def last_operation(host: Host, sandbox: str) -> dict[str, Any]:
    answer = await host.http.get("/v1/operations", params={"sandbox_id": sandbox, "limit": 1})
    return await host.operation(answer.json()["items"][0]["id"])


@pytest.mark.parametrize(
    ("on_idle", "state"),
    [("pause", "paused"), ("suspend", "suspended"), ("stop", "stopped"), ("delete", "not-found")],
)
async def test_an_idle_sandbox_does_what_it_was_told_and_not_before(host: Host, on_idle: str, state: str) -> None:
    sandbox = await host.create(idle_timeout_s=100, on_idle=on_idle)
    host.clock.move(98)
    await idle.end_idle(host.control)
    assert await host.state(sandbox) == "running"
    host.clock.move(2)
    await idle.end_idle(host.control)
    await comes_to(host, sandbox, state)


async def test_a_silent_command_that_runs_is_not_idleness(host: Host) -> None:
    sandbox = await host.create(idle_timeout_s=5)
    host.node.busy[sandbox] = 1
    for _ in range(5):
        host.clock.move(600)
        await idle.end_idle(host.control)
    assert await host.state(sandbox) == "running"
    host.node.busy[sandbox] = 0
    host.node.active_at[sandbox] = host.clock().timestamp()
    await idle.end_idle(host.control)
    assert await host.state(sandbox) == "running", "it counts from the command's end"
    host.clock.move(5)
    await idle.end_idle(host.control)
    await comes_to(host, sandbox, "suspended")


async def test_neither_what_is_paused_nor_what_has_no_idle_timeout_goes_idle(host: Host) -> None:
    paused, never = await host.create(idle_timeout_s=5), await host.create()
    await host.verb(paused, "pause")
    host.clock.move(600)
    await idle.end_idle(host.control)
    assert (await host.state(paused), await host.state(never)) == ("paused", "running")
    await host.http.patch(f"/v1/sandboxes/{never}", json={"idle_timeout_s": 5})
    host.clock.move(6)
    await idle.end_idle(host.control)
    await comes_to(host, never, "suspended")


async def test_an_idle_timeout_that_is_taken_away_does_not_fire(host: Host) -> None:
    sandbox = await host.create(idle_timeout_s=5)
    await host.http.patch(f"/v1/sandboxes/{sandbox}", json={"idle_timeout_s": None})
    host.clock.move(600)
    await idle.end_idle(host.control)
    assert await host.state(sandbox) == "running"


async def test_the_node_is_asked_once_for_all_and_only_if_somebody_may_be_idle(host: Host) -> None:
    await host.create()
    await idle.end_idle(host.control)
    assert host.node.asked_for_activity == 0
    for _ in range(5):
        await host.create(idle_timeout_s=100)
    await idle.end_idle(host.control)
    assert host.node.asked_for_activity == 1


@pytest.mark.parametrize("on_idle", ["pause", "suspend", "stop", "delete"])
async def test_a_command_that_has_just_begun_wins(host: Host, on_idle: str) -> None:
    sandbox = await host.create(idle_timeout_s=5, on_idle=on_idle)
    held = host.node.hold("destroy" if on_idle == "delete" else on_idle)
    host.clock.move(6)
    await idle.end_idle(host.control)
    host.node.busy[sandbox] = 1
    held.set()
    operation = await last_operation(host, sandbox)
    assert (operation["kind"], operation["state"]) == (on_idle, "cancelled")
    assert operation["error"]["code"] == "not-idle"
    shown = (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()
    assert (shown["state"], shown["ready"], shown["failure"]) == ("running", True, None)
    assert host.node.machines[sandbox] == "running"
    assert (await host.verb(sandbox, "pause")).is_success


async def test_a_refusal_of_the_node_is_not_asked_for_again_at_once(host: Host) -> None:
    sandbox = await host.create(idle_timeout_s=5)
    host.clock.move(6)
    host.node.fail("suspend", "not-idle", 409)
    await idle.end_idle(host.control)
    assert (await last_operation(host, sandbox))["state"] == "cancelled"
    for _ in range(10):
        await idle.end_idle(host.control)
    assert sum(verb == "suspend" for verb, _ in host.node.calls) == 1
    host.clock.move(5)
    await idle.end_idle(host.control)
    await comes_to(host, sandbox, "suspended")


async def test_what_is_asked_for_is_done_also_if_the_sandbox_is_not_idle(host: Host) -> None:
    sandbox = await host.create(idle_timeout_s=5)
    host.node.busy[sandbox] = 1
    assert (await host.verb(sandbox, "suspend")).is_success
    assert host.node.machines[sandbox] == "suspended"


async def test_asking_for_what_is_only_done_to_idle_ones_does_not_join_that(host: Host) -> None:
    sandbox = await host.create(idle_timeout_s=5)
    held = host.node.hold("suspend")
    host.clock.move(6)
    await idle.end_idle(host.control)
    assert code(await host.verb(sandbox, "suspend")) == "busy"
    deleting = asyncio.create_task(host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"}))
    await comes_to(host, sandbox, "deleting")
    host.node.busy[sandbox] = 1
    held.set()
    assert (await deleting).is_success, "what somebody asks for is done"
    assert await host.state(sandbox) == "not-found"


async def test_what_is_being_copied_is_not_idle(host: Host) -> None:
    sandbox = await host.create(idle_timeout_s=5, on_idle="delete")
    held = host.node.hold("snapshot")
    made = (await host.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})).json()
    host.clock.move(6)
    await idle.end_idle(host.control)
    assert await host.state(sandbox) == "running"
    held.set()
    assert (await host.operation(made["operation"]["id"]))["state"] == "succeeded"
    host.clock.move(6)
    await idle.end_idle(host.control)
    await comes_to(host, sandbox, "not-found")


async def test_an_idle_sandbox_is_suspended_within_two_seconds(tmp_path: Path) -> None:
    async with hosting(tmp_path, reaper=True) as host:
        sandbox = await host.create(idle_timeout_s=60)
        host.clock.move(60)
        began = asyncio.get_running_loop().time()
        await comes_to(host, sandbox, "suspended")
        assert asyncio.get_running_loop().time() - began < 10
        assert reaper.IDLE_EVERY_S <= 0.5


def requests(host: Host, sandbox: str) -> list[Any]:
    path = f"/v1/sandboxes/{sandbox}"
    return [
        lambda: host.http.post(f"{path}/exec", json={"argv": ["true"]}),
        lambda: host.http.post(f"{path}/commands", json={"argv": ["true"]}),
        lambda: host.http.get(f"{path}/files", params={"path": "x"}),
        lambda: host.http.put(f"{path}/files", params={"path": "x"}, content=b"x"),
    ]


@pytest.mark.parametrize(("verb", "wakes_by"), [("pause", "resume"), ("suspend", "wake"), ("stop", "start")])
async def test_a_request_wakes_a_sandbox_that_rests_and_many_share_one_waking(
    host: Host, verb: str, wakes_by: str
) -> None:
    sandbox = await host.create(wake_on_request=True)
    await host.verb(sandbox, verb)
    answers = await asyncio.gather(*(ask() for ask in requests(host, sandbox) * 4))
    assert [answer.text for answer in answers if not answer.is_success] == []
    assert sum(called == wakes_by for called, _ in host.node.calls) == 1


@pytest.mark.parametrize(("verb", "passing"), [("pause", "pausing"), ("suspend", "suspending"), ("stop", "stopping")])
async def test_a_request_to_a_sandbox_that_is_falling_asleep_wakes_it_when_it_has(
    host: Host, verb: str, passing: str
) -> None:
    sandbox = await host.create(wake_on_request=True)
    held = host.node.hold(verb)
    falling = asyncio.create_task(host.verb(sandbox, verb))
    await comes_to(host, sandbox, passing)
    asking = [asyncio.create_task(ask()) for ask in requests(host, sandbox)]
    held.set()
    answers = await asyncio.gather(*asking)
    assert [answer.text for answer in answers if not answer.is_success] == []
    assert (await falling).is_success
    assert await host.state(sandbox) == "running"


async def test_a_machine_that_fell_asleep_behind_a_request_is_woken_and_asked_again(host: Host) -> None:
    for ask in range(3):
        sandbox = await host.create(wake_on_request=True)
        assert (await host.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["true"]})).is_success
        known = host.control.running.get(sandbox, host.control.store.generation)
        await host.verb(sandbox, "suspend")
        assert known is not None
        # As if it had been looked up a moment before the suspend was recorded.
        host.control.running.remember(known, host.control.store.generation)
        answer = await requests(host, sandbox)[ask]()
        assert answer.is_success, answer.text
        assert await host.state(sandbox) == "running"


async def test_without_wake_on_request_the_state_is_told(host: Host) -> None:
    sandbox = await host.create()
    await host.verb(sandbox, "suspend")
    for ask in requests(host, sandbox):
        refused = await ask()
        assert (refused.status_code, code(refused)) == (httpx.codes.CONFLICT, "wrong-state")
    assert await host.state(sandbox) == "suspended"


async def test_a_waking_that_fails_is_told_to_who_asked(host: Host) -> None:
    sandbox = await host.create(wake_on_request=True)
    await host.verb(sandbox, "suspend")
    host.node.fail("wake", "image-damaged", 500)
    answer = await requests(host, sandbox)[0]()
    assert (answer.status_code, code(answer)) == (httpx.codes.INTERNAL_SERVER_ERROR, "image-damaged")


async def test_a_suspended_sandbox_that_is_being_copied_is_woken_after_that(host: Host) -> None:
    sandbox = await host.create(wake_on_request=True)
    await host.verb(sandbox, "suspend")
    held = host.node.hold("snapshot")
    await host.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})
    asking = asyncio.create_task(requests(host, sandbox)[0]())

    async def copying() -> bool:
        return host.node.calls[-1][0] == "snapshot"

    await until(copying, "the copy to be asked for")
    assert await host.state(sandbox) == "suspended"
    held.set()
    assert (await asking).is_success
    assert host.node.overlaps == []

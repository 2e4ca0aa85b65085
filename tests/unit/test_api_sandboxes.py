"""Sandboxes over HTTP, on a scripted node."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from space import error_wire
from space.errors import Conflict, HostError, HostFull, MachineLost, SpaceError
from space.sdk._sync.operations import failure as failure_of
from space.sdk.errors import from_answer
from space.sdk.types import Operation
from tests.control_host import Host, code, hosting, until


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as host:
        yield host


async def test_create_answers_at_once_with_a_sandbox_and_an_operation(host: Host) -> None:
    held = host.node.hold("boot")
    answer = await host.http.post("/v1/sandboxes", json={"template": "base"})
    assert answer.status_code == httpx.codes.ACCEPTED
    body = answer.json()
    assert body["sandbox"]["state"] == "creating"
    assert body["sandbox"]["ready"] is False
    assert body["operation"]["kind"] == "create"
    assert answer.headers["location"] == f"/v1/operations/{body['operation']['id']}"
    held.set()
    operation = (await host.http.get(f"/v1/operations/{body['operation']['id']}?wait_s=20")).json()
    assert operation["state"] == "succeeded"
    assert {"boot", "queued", "total"} <= set(operation["timings"])


async def test_create_with_prefer_wait_answers_201_when_it_runs_and_is_ready(host: Host) -> None:
    answer = await host.http.post("/v1/sandboxes", json={"template": "base"}, headers={"Prefer": "wait=20"})
    assert answer.status_code == httpx.codes.CREATED
    sandbox = answer.json()["sandbox"]
    assert (sandbox["state"], sandbox["ready"]) == ("running", True)
    assert sandbox["template_digest"].startswith("sha256:")
    assert answer.headers["preference-applied"] == "wait=20"


async def test_prefer_wait_gives_up_with_202_after_its_seconds(host: Host) -> None:
    held = host.node.hold("boot")
    answer = await host.http.post("/v1/sandboxes", json={"template": "base"}, headers={"Prefer": "wait=0.05"})
    assert answer.status_code == httpx.codes.ACCEPTED
    assert answer.json()["operation"]["state"] == "running"
    held.set()


async def test_the_node_is_told_everything_it_needs(host: Host) -> None:
    resources = {"cpus": 2.0, "memory_mib": 512, "disk_mib": 2048, "pids": 100, "io_weight": 300}
    env = {"A": "line\nbreak", "B": "$HOME"}
    sandbox = await host.create(resources=resources, env=env, name="worker")
    wanted = host.node.wanted[sandbox]
    assert wanted["resources"] == resources
    assert wanted["env"] == env
    assert wanted["hostname"] == "worker"
    assert wanted["template_digest"] == host.node.templates[0]["digest"]
    assert wanted["template_defaults"] == host.node.templates[0]["defaults"]
    shown = (await host.http.get(f"/v1/sandboxes/{sandbox}")).text
    assert "HOME" not in shown, "an environment is not shown again"


async def test_every_verb_leads_where_the_states_say(host: Host) -> None:
    sandbox = await host.create()
    for verb, state in (
        ("pause", "paused"),
        ("resume", "running"),
        ("suspend", "suspended"),
        ("wake", "running"),
        ("pause", "paused"),
        ("suspend", "suspended"),
        ("wake", "running"),
        ("stop", "stopped"),
        ("start", "running"),
        ("pause", "paused"),
        ("wake", "running"),
        ("stop", "stopped"),
        ("wake", "running"),
    ):
        answer = await host.verb(sandbox, verb)
        assert answer.status_code == httpx.codes.OK, answer.text
        assert answer.json()["sandbox"]["state"] == state, verb
        assert answer.json()["sandbox"]["ready"] is (state == "running")
        assert answer.json()["operation"]["kind"] == verb


async def test_waking_a_running_one_succeeds_at_once_and_a_deleted_one_is_not_found(host: Host) -> None:
    """L3"""
    sandbox = await host.create()
    calls = len(host.node.calls)
    answer = await host.http.post(f"/v1/sandboxes/{sandbox}/wake")
    assert answer.json()["operation"]["state"] == "succeeded"
    assert len(host.node.calls) == calls
    await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})
    gone = await host.verb(sandbox, "wake")
    assert gone.status_code == httpx.codes.NOT_FOUND
    assert code(gone) == "not-found"


async def test_waking_twice_at_once_is_one_operation(host: Host) -> None:
    """L3"""
    sandbox = await host.create()
    await host.verb(sandbox, "suspend")
    held = host.node.hold("wake")
    first, second = [(await host.http.post(f"/v1/sandboxes/{sandbox}/wake")).json() for _ in range(2)]
    assert first["operation"]["id"] == second["operation"]["id"]
    held.set()
    operation = (await host.http.get(f"/v1/operations/{first['operation']['id']}?wait_s=20")).json()
    assert operation["state"] == "succeeded"
    assert [call for call, _ in host.node.calls].count("wake") == 1


async def test_another_verb_meanwhile_is_a_conflict_with_state_and_retry_after(host: Host) -> None:
    """L7"""
    sandbox = await host.create()
    held = host.node.hold("suspend")
    await host.http.post(f"/v1/sandboxes/{sandbox}/suspend")
    refused = await host.http.post(f"/v1/sandboxes/{sandbox}/pause")
    assert refused.status_code == httpx.codes.CONFLICT
    assert code(refused) == "busy"
    assert refused.json()["error"]["details"]["state"] == "suspending"
    assert int(refused.headers["retry-after"]) >= 1
    held.set()


async def test_a_wrong_state_names_the_state_and_asks_for_no_retry(host: Host) -> None:
    sandbox = await host.create()
    refused = await host.verb(sandbox, "resume")
    assert refused.status_code == httpx.codes.CONFLICT
    assert code(refused) == "wrong-state"
    assert refused.json()["error"]["details"]["state"] == "running"
    assert "retry-after" not in refused.headers


async def test_delete_wins_over_a_wake_that_runs(host: Host) -> None:
    """L5"""
    sandbox = await host.create()
    await host.verb(sandbox, "suspend")
    held = host.node.hold("wake")
    wake = (await host.http.post(f"/v1/sandboxes/{sandbox}/wake")).json()["operation"]
    deleted = (await host.http.delete(f"/v1/sandboxes/{sandbox}")).json()["operation"]
    assert await host.state(sandbox) == "deleting"
    held.set()
    done = (await host.http.get(f"/v1/operations/{deleted['id']}?wait_s=20")).json()
    assert done["state"] == "succeeded"
    assert (await host.http.get(f"/v1/operations/{wake['id']}")).json()["state"] == "cancelled"
    assert host.node.machines == {}
    assert host.node.overlaps == [], "the machine was destroyed while another call held it"
    assert await host.state(sandbox) == "not-found"


async def test_a_delete_that_waits_answers_200_and_again_404(host: Host) -> None:
    sandbox = await host.create()
    answer = await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})
    assert answer.status_code == httpx.codes.OK
    assert answer.json()["sandbox"]["state"] == "deleted"
    again = await host.http.delete(f"/v1/sandboxes/{sandbox}")
    assert again.status_code == httpx.codes.NOT_FOUND


async def test_a_failed_create_that_was_waited_for_is_an_error_with_its_code(host: Host) -> None:
    host.node.fail("boot", "host-full", 503)
    answer = await host.http.post("/v1/sandboxes", json={"template": "base"}, headers={"Prefer": "wait=20"})
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert code(answer) == "host-full"
    sandbox = answer.json()["error"]["details"]["sandbox_id"]
    shown = (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()
    assert shown["state"] == "failed"
    assert shown["failure"]["code"] == "host-full"
    assert ("destroy", sandbox) in host.node.calls, "nothing of a failed create may stay"


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (HostFull("No.", code="disk-store-full"), 503),
        (HostFull("No.", code="links-full"), 503),
        (Conflict("No.", code="not-supported"), 409),
        (HostError("No.", code="start-failed"), 500),
    ],
    ids=lambda value: str(getattr(value, "code", value)),
)
async def test_a_failure_that_was_waited_for_has_the_status_of_its_class(
    host: Host, failure: SpaceError, status: int
) -> None:
    wire = error_wire.answer(failure, "req")
    host.node.failures["boot"] = [web.json_response(wire, status=error_wire.status_of(failure))]
    answer = await host.http.post("/v1/sandboxes", json={"template": "base"}, headers={"Prefer": "wait=20"})
    assert (answer.status_code, code(answer)) == (status, failure.code)
    assert ("retry-after" in answer.headers) == failure.retryable
    waited = from_answer(status, answer.content)
    operation = (await host.http.get(f"/v1/operations/{waited.details['operation_id']}")).json()
    assert operation["error"]["kind"] == type(failure).__name__
    polled = failure_of(Operation.parse(operation))
    assert (type(waited), waited.code) == (type(polled), polled.code) == (type(failure), failure.code)


async def test_a_failed_suspend_leaves_the_sandbox_running(host: Host) -> None:
    """F10"""
    sandbox = await host.create()
    host.node.fail("suspend", "disk-full", 507)
    answer = await host.verb(sandbox, "suspend")
    assert answer.is_error
    assert code(answer) == "disk-full"
    shown = (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()
    assert (shown["state"], shown["ready"], shown["failure"]) == ("running", True, None)
    assert (await host.verb(sandbox, "suspend")).is_success


async def test_a_failed_wake_leaves_the_sandbox_suspended(host: Host) -> None:
    sandbox = await host.create()
    await host.verb(sandbox, "suspend")
    host.node.fail("wake", "host-error", 500)
    assert (await host.verb(sandbox, "wake")).is_error
    assert await host.state(sandbox) == "suspended"
    assert (await host.verb(sandbox, "wake")).is_success


async def test_a_machine_that_is_gone_after_a_failure_makes_the_sandbox_failed_with_its_cause(host: Host) -> None:
    sandbox = await host.create()
    host.node.fail("pause", "machine-lost", 503)
    host.node.machines[sandbox] = "exited"
    host.node.causes[sandbox] = "oom-killed"
    assert (await host.verb(sandbox, "pause")).is_error
    shown = (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()
    assert shown["state"] == "failed"
    assert shown["failure"]["code"] == "oom-killed"
    started = await host.verb(sandbox, "start")
    assert started.is_success, started.text
    assert started.json()["sandbox"]["failure"] is None


async def test_twenty_parallel_creates_with_one_idempotency_key_make_one_sandbox(host: Host) -> None:
    """L10"""
    headers = {"Idempotency-Key": "once", "Prefer": "wait=20"}
    answers = await asyncio.gather(
        *(host.http.post("/v1/sandboxes", json={"template": "base"}, headers=headers) for _ in range(20))
    )
    assert {answer.status_code for answer in answers} == {httpx.codes.CREATED}
    assert len({answer.json()["sandbox"]["id"] for answer in answers}) == 1
    assert len({answer.json()["operation"]["id"] for answer in answers}) == 1
    assert sum(host.node.booted.values()) == 1
    changed = await host.http.post("/v1/sandboxes", json={"template": "base", "name": "x"}, headers=headers)
    assert changed.status_code == httpx.codes.CONFLICT
    assert code(changed) == "idempotency-key-reused"


async def test_the_same_idempotency_key_in_another_project_is_another_request(host: Host) -> None:
    headers = {"Idempotency-Key": "once"}
    async with await host.other() as other:
        mine = await host.http.post("/v1/sandboxes", json={"template": "base"}, headers=headers)
        theirs = await other.post("/v1/sandboxes", json={"template": "base"}, headers=headers)
    assert mine.json()["sandbox"]["id"] != theirs.json()["sandbox"]["id"]


async def test_an_idempotency_key_is_forgotten_after_a_day(host: Host) -> None:
    headers = {"Idempotency-Key": "once"}
    first = await host.http.post("/v1/sandboxes", json={"template": "base"}, headers=headers)
    host.clock.move(25 * 3600)
    second = await host.http.post("/v1/sandboxes", json={"template": "base"}, headers=headers)
    assert first.json()["sandbox"]["id"] != second.json()["sandbox"]["id"]


async def test_lists_page_through_everything_once_newest_first(host: Host) -> None:
    made = [await host.create(metadata={"n": str(n)}) for n in range(7)]
    seen: list[str] = []
    cursor: str | None = None
    while True:
        params = {"limit": "3", **({"cursor": cursor} if cursor else {})}
        body = (await host.http.get("/v1/sandboxes", params=params)).json()
        seen += [item["id"] for item in body["items"]]
        cursor = body["next_cursor"]
        if cursor is None:
            break
    assert seen == made[::-1]


async def test_lists_filter_by_state_and_metadata(host: Host) -> None:
    a = await host.create(metadata={"for": "a", 'odd".key': "x y"})
    b = await host.create(metadata={"for": "b"})
    await host.verb(b, "pause")

    async def listed(**params: str) -> list[str]:
        body = (await host.http.get("/v1/sandboxes", params=params)).json()
        return [item["id"] for item in body["items"]]

    assert await listed(**{"metadata.for": "a"}) == [a]
    assert await listed(**{'metadata.odd".key': "x y"}) == [a]
    assert await listed(**{"metadata.for": "a", 'metadata.odd".key': "other"}) == []
    assert await listed(state="paused") == [b]
    assert await listed(state="running") == [a]


async def test_patch_changes_only_what_it_names(host: Host) -> None:
    sandbox = await host.create(name="before", metadata={"a": "1"})
    changed = await host.http.patch(f"/v1/sandboxes/{sandbox}", json={"metadata": {"b": "2"}, "timeout_s": 60})
    assert changed.status_code == httpx.codes.OK, changed.text
    body = changed.json()
    assert body["name"] == "before"
    assert body["metadata"] == {"b": "2"}
    assert body["timeout_s"] == 60
    assert body["deadline_at"] is not None
    found = (await host.http.get("/v1/sandboxes", params={"metadata.b": "2"})).json()["items"]
    assert [item["id"] for item in found] == [sandbox]
    assert (await host.http.get("/v1/sandboxes", params={"metadata.a": "1"})).json()["items"] == []
    unnamed = await host.http.patch(f"/v1/sandboxes/{sandbox}", json={"name": None, "timeout_s": None})
    assert unnamed.json()["name"] is None
    assert unnamed.json()["deadline_at"] is None


async def test_a_host_that_is_full_is_a_503_that_says_so(tmp_path: Path) -> None:
    async with hosting(tmp_path, sandboxes_max=1) as host:
        first = await host.create()
        refused = await host.http.post("/v1/sandboxes", json={"template": "base"})
        assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert code(refused) == "host-full"
        assert "retry-after" in refused.headers
        await host.http.delete(f"/v1/sandboxes/{first}", headers={"Prefer": "wait=20"})
        await host.create()


async def test_access_gives_a_token_that_the_node_can_verify_for_that_sandbox_alone(host: Host) -> None:
    import jwt
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    sandbox = await host.create()
    access = (await host.http.post(f"/v1/sandboxes/{sandbox}/access")).json()
    assert access["url"] == host.settings.data_plane_url
    key = load_pem_public_key(host.control.signer.public_pem)
    claims = jwt.decode(access["token"], key, algorithms=["EdDSA"])  # type: ignore[arg-type]
    assert (claims["sub"], claims["scope"]) == (sandbox, "sandbox")
    assert 3500 < claims["exp"] - host.clock().timestamp() <= 3600


async def test_metrics_show_usage_now_and_before(host: Host) -> None:
    from space.control.reaper import sample_usage

    sandbox = await host.create()
    await sample_usage(host.control)
    body = (await host.http.get(f"/v1/sandboxes/{sandbox}/metrics")).json()
    assert body["now"]["memory_mib"] == 40
    assert [taken["pids"] for taken in body["history"]] == [3]
    await host.verb(sandbox, "suspend")
    assert (await host.http.get(f"/v1/sandboxes/{sandbox}/metrics")).json()["now"] is None


async def test_operations_are_listed_by_sandbox_and_state(host: Host) -> None:
    a, b = await host.create(), await host.create()
    await host.verb(a, "pause")
    listed = (await host.http.get("/v1/operations", params={"sandbox_id": a})).json()["items"]
    assert [o["kind"] for o in listed] == ["pause", "create"]
    assert (await host.http.get("/v1/operations", params={"state": "failed"})).json()["items"] == []
    assert len((await host.http.get("/v1/operations")).json()["items"]) == 3
    assert b in {o["sandbox_id"] for o in (await host.http.get("/v1/operations")).json()["items"]}


async def test_a_request_wakes_a_sandbox_that_asked_for_it(host: Host) -> None:
    lazy = await host.create(wake_on_request=True)
    strict = await host.create()
    for sandbox in (lazy, strict):
        await host.verb(sandbox, "suspend")
    woken = await host.http.post(f"/v1/sandboxes/{lazy}/exec", json={"argv": ["true"]})
    assert woken.status_code == httpx.codes.OK, woken.text
    assert await host.state(lazy) == "running"
    refused = await host.http.post(f"/v1/sandboxes/{strict}/exec", json={"argv": ["true"]})
    assert refused.status_code == httpx.codes.CONFLICT
    assert refused.json()["error"]["details"]["state"] == "suspended"


async def test_a_node_that_restarts_meanwhile_only_delays_an_operation(host: Host) -> None:
    host.node.fail("boot", "unavailable", 503, times=2)
    sandbox = await host.create()
    assert host.node.booted[sandbox] == 1
    assert [verb for verb, _ in host.node.calls] == ["boot"] * 3


@pytest.mark.parametrize(("code_", "calls"), [("guest-unresponsive", 3), ("protocol-violation", 1)])
async def test_a_guest_that_was_too_slow_is_greeted_again_and_a_broken_one_is_not(
    host: Host, code_: str, calls: int
) -> None:
    wire = error_wire.answer(MachineLost("No.", code=code_), "req")
    host.node.failures["boot"] = [web.json_response(wire, status=503) for _ in range(2)]
    answer = await host.http.post("/v1/sandboxes", json={"template": "base"}, headers={"Prefer": "wait=20"})
    assert answer.status_code == (httpx.codes.CREATED if calls == 3 else httpx.codes.SERVICE_UNAVAILABLE)
    assert [verb for verb, _ in host.node.calls].count("boot") == calls


async def test_burst_of_creates_beyond_the_seats_all_succeed(host: Host) -> None:
    answers = await asyncio.gather(
        *(host.http.post("/v1/sandboxes", json={"template": "base"}, headers={"Prefer": "wait=20"}) for _ in range(60))
    )
    assert {answer.status_code for answer in answers} == {httpx.codes.CREATED}

    async def quiet() -> bool:
        return host.control.leases.free == 32

    await until(quiet, "every seat given back")


@pytest.mark.parametrize("driver", ["firecracker", "gvisor"])
async def test_a_driver_that_no_host_has_is_refused_before_anything_is_recorded(host: Host, driver: str) -> None:
    host.node.drivers = ("qemu",)
    answer = await host.http.post("/v1/sandboxes", json={"template": "base", "driver": driver})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["code"], error["details"]) == ("no-such-driver", {"field": "driver", "drivers": ["qemu"]})
    assert "qemu" in error["message"]
    assert (await host.http.get("/v1/sandboxes")).json()["items"] == []
    assert host.node.calls == []


async def test_a_driver_that_is_named_reaches_the_node(host: Host) -> None:
    sandbox = await host.create(driver="qemu")
    assert host.node.wanted[sandbox]["driver"] == "qemu"
    assert (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()["driver"] == "qemu"


async def test_a_sandbox_that_names_no_driver_is_shown_with_the_one_that_the_host_chose(host: Host) -> None:
    host.node.templates = [{**one, "driver": None, "tag": "free"} for one in host.node.templates]
    host.node.drivers = ("firecracker", "gvisor")
    sandbox = await host.create(template="base:free")
    assert host.node.wanted[sandbox]["driver"] is None
    assert (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()["driver"] == "firecracker"

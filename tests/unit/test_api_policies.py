"""Policies over HTTP: which one holds, that a change holds when it is answered, and that nobody sees another's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.control import attachments, policies
from space.egress.http_api import BODY_BYTES_MAX
from space.errors import SpaceError
from tests.control_host import Host, code, control_over, hosting, until, working
from tests.gateway_host import GatewayHost, gateway_at

API = {"rules": [{"name": "api", "hosts": ["api.example"], "methods": ["GET"], "paths": ["/v1/**"]}]}
WEB = {"rules": [{"hosts": ["*.web.example"]}]}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path, package_registries=("packages.example",)) as host:
        yield host


@pytest.fixture
async def gateway(host: Host) -> AsyncIterator[GatewayHost]:
    async with gateway_at(host.settings.gateway_socket) as gateway:
        yield gateway


@asynccontextmanager
async def following(host: Host) -> AsyncIterator[None]:
    """Let the api follow the gateway, as its reaper does."""

    async def forever() -> None:
        while True:
            with suppress(SpaceError):  # as the reaper goes on
                await attachments.follow(host.control)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(forever())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def put(host: Host, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await host.http.put(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


async def of(host: Host, sandbox: str) -> dict[str, Any]:
    return (await host.http.get(f"/v1/sandboxes/{sandbox}/policy")).json()


async def check(on: Host, sandbox: str, **asked: Any) -> dict[str, Any]:
    answer = await on.http.post(f"/v1/sandboxes/{sandbox}/policy/check", json=asked)
    assert answer.is_success, answer.text
    return answer.json()


# --- which one holds


async def test_without_anything_said_nothing_may_leave(host: Host, gateway: GatewayHost) -> None:
    sandbox = await host.create()
    assert gateway.knows(sandbox)
    assert not gateway.allows(sandbox, "api.example")
    found = await of(host, sandbox)
    assert (found["source"], found["document"], found["policy"]) == ("installation", "none", None)
    assert found["effective"] == {"rules": [], "networks": []}


async def test_a_sandboxes_own_policy_comes_before_its_templates_its_projects_and_the_installations(
    host: Host, gateway: GatewayHost
) -> None:
    host.node.templates.append({**host.node.templates[0], "name": "with", "digest": "sha256:" + "cd" * 32})
    host.node.templates[-1]["defaults"] = {"env": {}, "workdir": "/", "user": "user", "policy": WEB}
    own = await host.create(template="with", policy=API)
    templates = await host.create(template="with")
    projects = await host.create()
    assert (await of(host, own))["source"] == "sandbox"
    assert (await of(host, templates))["source"] == "template"
    assert gateway.allows(templates, "a.web.example")
    assert "policy" not in host.node.wanted[templates]["template_defaults"]
    await put(host, "/v1/project/policy", {"policy": "public-internet"})
    assert (await of(host, projects))["source"] == "project"
    assert gateway.allows(projects, "anything.example")
    assert not gateway.allows(own, "anything.example")
    assert not gateway.allows(templates, "anything.example")
    await put(host, f"/v1/sandboxes/{own}/policy", {"policy": None})
    assert (await of(host, own))["source"] == "template"
    assert gateway.allows(own, "a.web.example")


async def test_a_preset_stands_for_what_the_installation_says(host: Host, gateway: GatewayHost) -> None:
    sandbox = await host.create(policy="package-registries")
    assert gateway.allows(sandbox, "packages.example")
    assert not gateway.allows(sandbox, "other.example")
    assert (await of(host, sandbox))["effective"]["rules"][0]["hosts"] == ["packages.example"]


async def test_registries_that_set_up_has_found_are_read_from_its_file(tmp_path: Path) -> None:
    async with hosting(tmp_path) as host, gateway_at(host.settings.gateway_socket) as gateway:
        refused = await host.http.post("/v1/sandboxes", json={"template": "base", "policy": "package-registries"})
        assert code(refused) == "invalid-request"
        assert "package_registries" in refused.text
        host.settings.registries_file.write_text("one.example\n127.0.0.1\nnot a host\ntwo.example:8443\n")
        sandbox = await host.create(policy="package-registries")
        assert gateway.allows(sandbox, "one.example")
        assert gateway.allows(sandbox, "two.example", port=8443)


async def test_a_build_and_its_template_have_policies_of_their_own(host: Host, gateway: GatewayHost) -> None:
    build = await host.build(policy=API, defaults={"policy": WEB, "env": {"A": "b"}})
    machine = attachments.machine_of(build)
    assert host.node.builds.specs[build]["machine"] == machine
    assert "policy" not in host.node.builds.specs[build]["defaults"]
    assert gateway.allows(machine, "api.example", path="/v1/x")
    host.node.builds.succeed(build, "content")
    assert (await host.built(build))["state"] == "succeeded"
    assert not gateway.knows(machine)
    sandbox = await host.create(template="tool")
    assert (await of(host, sandbox))["source"] == "template"
    assert gateway.allows(sandbox, "a.web.example")
    shown = (await host.http.get("/v1/templates/tool")).json()
    assert shown["defaults"]["policy"] == WEB
    wrong = {"name": "x", "source": {"kind": "template", "template": "base"}, "defaults": {"policy": "nobodys"}}
    refused = await host.http.post("/v1/templates/builds", json=wrong)
    assert (code(refused), refused.json()["error"]["details"]["field"]) == ("unknown-policy", "defaults.policy")


async def test_what_begins_from_a_sandbox_has_its_templates_policy_and_a_fork_its_own(
    host: Host, gateway: GatewayHost
) -> None:
    source = await host.create(policy=API)
    [fork] = await host.fork(source)
    assert gateway.allows(fork["id"], "api.example", path="/v1/x")
    snapshot = await host.snapshot(source)
    fresh = await host.create(template=f"snapshot:{snapshot}")
    assert (await of(host, fresh))["source"] == "installation"
    assert not gateway.allows(fresh, "api.example", path="/v1/x")


# --- named ones


async def test_a_change_of_a_named_policy_holds_for_every_sandbox_that_follows_it_when_it_is_answered(
    host: Host, gateway: GatewayHost
) -> None:
    made = await host.http.post("/v1/policies", json={"name": "web", "document": WEB})
    assert (made.status_code, made.json()["generation"]) == (httpx.codes.CREATED, 1)
    followers = [await host.create(policy="web") for _ in range(3)]
    await put(host, "/v1/project/policy", {"policy": "web"})
    followers.append(await host.create())
    other = await host.create(policy=WEB)
    assert all(gateway.allows(one, "a.web.example") for one in followers)
    changed = await put(host, "/v1/policies/web", {"document": API})
    assert changed["generation"] == 2
    assert all(gateway.allows(one, "api.example", path="/v1/x") for one in followers)
    assert not any(gateway.allows(one, "a.web.example") for one in followers)
    assert gateway.allows(other, "a.web.example")
    generations = [(await of(host, one))["generation"] for one in followers]
    assert all(number > 1 for number in generations)
    assert [gateway.attachments.of(one).generation for one in followers] == generations


async def test_a_policy_that_somebody_follows_cannot_be_deleted(host: Host, gateway: GatewayHost) -> None:
    await put(host, "/v1/policies/web", {"document": WEB})
    sandbox = await host.create(policy="web")
    refused = await host.http.delete("/v1/policies/web")
    assert (code(refused), refused.json()["error"]["details"]["sandboxes"]) == ("policy-in-use", [sandbox])
    await put(host, f"/v1/sandboxes/{sandbox}/policy", {"policy": "none"})
    assert (await host.http.delete("/v1/policies/web")).status_code == httpx.codes.NO_CONTENT
    assert code(await host.http.get("/v1/policies/web")) == "not-found"
    assert code(await host.http.delete("/v1/policies/web")) == "not-found"
    assert gateway.knows(sandbox)


async def test_names_are_taken_once_presets_are_not_names_and_repeating_a_request_makes_one(host: Host) -> None:
    body, headers = {"name": "web", "document": WEB}, {"Idempotency-Key": "k"}
    first = await host.http.post("/v1/policies", json=body, headers=headers)
    again = await host.http.post("/v1/policies", json=body, headers=headers)
    assert first.json() == again.json()
    assert code(await host.http.post("/v1/policies", json=body)) == "name-taken"
    assert code(await host.http.post("/v1/policies", json={**body, "name": "none"})) == "invalid-request"
    assert code(await host.http.put("/v1/policies/no%20name", json={"document": WEB})) == "invalid-request"
    listed = (await host.http.get("/v1/policies")).json()["items"]
    assert [one["name"] for one in listed] == ["web"]


async def test_a_project_has_so_many_policies_and_no_more(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "POLICIES_MAX", 2)
    for name in ("a", "b"):
        await put(host, f"/v1/policies/{name}", {"document": WEB})
    assert code(await host.http.post("/v1/policies", json={"name": "c", "document": WEB})) == "policies-max"


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"preset": "all"}, "preset"),
        ({"rules": [{"hosts": []}]}, "rules[0].hosts"),
        ({"rules": [{"hosts": ["10.0.0.1"]}]}, "rules[0].hosts[0]"),
        ({"rules": [{"hosts": ["a.example"], "paths": ["//x"]}]}, "rules[0].paths[0]"),
        ({"networks": [{"networks": ["10.0.0.0/33"]}]}, "networks[0].networks[0]"),
        ({"rulez": []}, ""),
        ({"rules": "x" * 200_000}, ""),
    ],
)
async def test_what_is_wrong_with_a_document_is_named(host: Host, document: dict[str, Any], field: str) -> None:
    for answer, at in (
        (await host.http.put("/v1/policies/x", json={"document": document}), "document"),
        (await host.http.post("/v1/sandboxes", json={"template": "base", "policy": document}), "policy"),
        (await host.http.put("/v1/project/policy", json={"policy": document}), "policy"),
    ):
        assert code(answer) == "invalid-request"
        assert answer.json()["error"]["details"]["field"] == (f"{at}.{field}" if field else at)


async def test_a_policy_that_is_not_there_is_refused_by_name(host: Host) -> None:
    sandbox = await host.create()
    for answer in (
        await host.http.post("/v1/sandboxes", json={"template": "base", "policy": "nobodys"}),
        await host.http.put("/v1/project/policy", json={"policy": "nobodys"}),
        await host.http.put(f"/v1/sandboxes/{sandbox}/policy", json={"policy": "nobodys"}),
    ):
        assert code(answer) == "unknown-policy"


# --- asking


async def test_check_says_which_rule_decides_and_why_the_others_do_not(host: Host) -> None:
    sandbox = await host.create(policy=API)
    allowed = await check(host, sandbox, host="API.example.", method="GET", path="/v1/things?x=1")
    assert (allowed["allowed"], allowed["rule"], allowed["source"]) == (True, "api", "sandbox")
    denied = await check(host, sandbox, host="api.example", method="POST", path="/v1/things")
    assert (denied["allowed"], denied["rule"], denied["reason"]) == (False, None, "default-deny")
    assert [rule["matches"] for rule in denied["rules"]] == [False]
    assert "POST" in denied["rules"][0]["why"]
    plain = await check(host, sandbox, host="api.example", path="/v1/", scheme="http")
    assert plain["allowed"] is True
    address = await check(host, sandbox, host="93.184.216.34")
    assert (address["allowed"], address["rules"]) == (False, [])


async def test_suggest_proposes_rules_from_what_was_denied_to_that_sandbox(host: Host, gateway: GatewayHost) -> None:
    sandbox, other = await host.create(), await host.create()
    denied = {"decision": "deny", "reason": "default-deny", "port": 443, "method": "GET"}
    for path in ("/simple/a", "/simple/b"):
        await gateway.record(sandbox, host="packages.example", path=path, **denied)
    await gateway.record(other, host="elsewhere.example", path="/", **denied)
    found = (await host.http.get(f"/v1/sandboxes/{sandbox}/policy/suggest")).json()
    assert [rule["hosts"] for rule in found["rules"]] == [["packages.example"]]
    await put(host, f"/v1/sandboxes/{sandbox}/policy", {"policy": found})
    assert gateway.allows(sandbox, "packages.example", path="/simple/a")


async def test_records_are_the_projects_own_filtered_paged_and_there_when_the_sandbox_is_not(
    host: Host, gateway: GatewayHost
) -> None:
    sandbox, other = await host.create(), await host.other()
    for number in range(5):
        decision = "deny" if number % 2 else "allow"
        await gateway.record(sandbox, host="api.example", path=f"/{number}", decision=decision, secrets=["key"])

    async def read(client: httpx.AsyncClient, path: str, **params: Any) -> list[dict[str, Any]]:
        answer = await client.get(path, params=params)
        assert answer.is_success, answer.text
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        return [httpx.Response(200, text=line).json() for line in answer.text.splitlines()]

    path = f"/v1/sandboxes/{sandbox}/egress"
    every = await read(host.http, path)
    assert [record["path"] for record in every] == ["/0", "/1", "/2", "/3", "/4"]
    assert [record["path"] for record in await read(host.http, path, limit=2)] == ["/3", "/4"]
    assert [r["path"] for r in await read(host.http, path, after=every[0]["n"], limit=2)] == ["/1", "/2"]
    assert [r["path"] for r in await read(host.http, path, before=every[2]["n"])] == ["/0", "/1"]
    assert len(await read(host.http, path, decision="deny")) == 2
    assert await read(host.http, path, host="other.example") == []
    assert len(await read(host.http, path, host="API.example.")) == 5
    assert len(await read(host.http, path, secret="key")) == 5
    assert await read(other, "/v1/egress") == await read(other, "/v1/egress", sandbox=sandbox) == []
    await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})
    assert len(await read(host.http, "/v1/egress", sandbox=sandbox)) == 5
    assert code(await host.http.get(path)) == "not-found"
    events = await host.http.get("/v1/egress", params={"limit": 1}, headers={"Accept": "text/event-stream"})
    assert events.text.startswith(f"id: {every[-1]['n']}\nevent: record\ndata: {{")


async def test_nobody_sees_or_changes_another_projects_policies(host: Host, gateway: GatewayHost) -> None:
    await put(host, "/v1/policies/web", {"document": WEB})
    sandbox, other = await host.create(policy="web"), await host.other()
    one = f"/v1/sandboxes/{sandbox}"
    unknown = "/v1/sandboxes/sbxaaaaaaaaaaaaaaaa"
    for method, path, body in (
        ("GET", "/policy", None),
        ("PUT", "/policy", {"policy": None}),
        ("POST", "/policy/check", {"host": "a.web.example"}),
        ("GET", "/policy/suggest", None),
        ("GET", "/egress", None),
    ):
        theirs = await other.request(method, one + path, json=body)
        nobodys = await other.request(method, unknown + path, json=body)
        assert theirs.status_code == httpx.codes.NOT_FOUND
        assert theirs.json()["error"]["message"] == nobodys.json()["error"]["message"]
    for method, body in (("GET", None), ("DELETE", None)):
        theirs = await other.request(method, "/v1/policies/web", json=body)
        nobodys = await other.request(method, "/v1/policies/none-such", json=body)
        assert theirs.status_code == nobodys.status_code == httpx.codes.NOT_FOUND
        assert theirs.json()["error"]["message"] == nobodys.json()["error"]["message"]
    await other.put("/v1/policies/web", json={"document": {"preset": "public-internet"}})
    assert not gateway.allows(sandbox, "anything.example")
    refused = await other.post("/v1/sandboxes", json={"template": "base", "policy": "web"})
    assert refused.status_code == httpx.codes.ACCEPTED
    assert (await host.http.get("/v1/policies/web")).json()["document"] == WEB


# --- the gateway comes and goes


async def test_a_sandbox_is_known_before_it_runs_and_forgotten_once_its_machine_is_gone(
    host: Host, gateway: GatewayHost
) -> None:
    held = host.node.hold("boot")
    made = (await host.http.post("/v1/sandboxes", json={"template": "base"})).json()["sandbox"]["id"]

    async def known() -> bool:
        return gateway.knows(made)

    await until(known, "the gateway to know of the sandbox while its machine boots")
    held.set()
    for verb, there in (("pause", True), ("suspend", False), ("wake", True), ("stop", False), ("start", True)):

        async def settled(of: str = verb) -> bool:
            return (await host.verb(made, of)).is_success

        await until(settled, verb)
        assert gateway.knows(made) is there, verb
    await host.http.delete(f"/v1/sandboxes/{made}", headers={"Prefer": "wait=20"})
    assert not gateway.knows(made)


async def test_what_did_not_come_up_is_forgotten(host: Host, gateway: GatewayHost) -> None:
    host.node.fail("boot", "out-of-luck", 500)
    held = host.node.hold("boot")
    made = (await host.http.post("/v1/sandboxes", json={"template": "base"})).json()

    async def known() -> bool:
        return gateway.knows(made["sandbox"]["id"])

    await until(known, "the gateway to know of it")
    held.set()
    assert (await host.operation(made["operation"]["id"]))["state"] == "failed"
    assert not gateway.knows(made["sandbox"]["id"])


async def test_a_change_while_the_gateway_is_away_is_answered_503_and_holds_as_soon_as_it_is_back(host: Host) -> None:
    async with following(host):
        async with gateway_at(host.settings.gateway_socket) as gateway:
            sandbox = await host.create(policy=WEB)
            assert gateway.allows(sandbox, "a.web.example")
        refused = await host.http.put(f"/v1/sandboxes/{sandbox}/policy", json={"policy": API})
        assert (refused.status_code, code(refused)) == (503, "gateway-unavailable")
        assert (await of(host, sandbox))["document"] == API
        async with gateway_at(host.settings.gateway_socket) as back:

            async def told() -> bool:
                return back.allows(sandbox, "api.example", path="/v1/x")

            await until(told, "the gateway that is back to be told")
            assert not back.allows(sandbox, "a.web.example")


async def test_sandboxes_come_up_without_the_gateway_and_it_is_told_of_them_when_it_is_there(host: Host) -> None:
    sandbox = await host.create(policy=WEB)
    gone = await host.create(policy=WEB)
    await host.http.delete(f"/v1/sandboxes/{gone}", headers={"Prefer": "wait=20"})
    async with following(host), gateway_at(host.settings.gateway_socket) as gateway:

        async def told() -> bool:
            return gateway.knows(sandbox)

        await until(told, "the gateway to be told")
        assert not gateway.knows(gone)


async def test_after_a_restart_of_the_api_the_gateway_knows_exactly_what_there_is(tmp_path: Path) -> None:
    async with hosting(tmp_path, reaper=True) as host, gateway_at(host.settings.gateway_socket) as gateway:
        sandbox, build = await host.create(policy=WEB), await host.build(policy=API)
        suspended = await host.create(policy=WEB)
        await host.verb(suspended, "suspend")
        await gateway.attachments.put("sbxstray", gateway.attachments.of(sandbox))
        async with AsyncExitStack() as stack:
            fresh = await stack.enter_async_context(control_over(host.settings, host.clock))
            await stack.enter_async_context(working(fresh, reaper=True))

            async def exact() -> bool:
                return not gateway.knows("sbxstray")

            await until(exact, "the gateway to forget what nobody has")
            assert gateway.allows(sandbox, "a.web.example")
            assert gateway.allows(attachments.machine_of(build), "api.example", path="/v1/x")
            assert not gateway.knows(suspended)


async def test_one_sandbox_that_the_gateway_does_not_take_keeps_the_others_from_nothing(
    host: Host, gateway: GatewayHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = await host.create(), await host.create()
    for sandbox in (bad, good):
        await put(host, f"/v1/sandboxes/{sandbox}/policy", {"policy": "public-internet"})
    await gateway.attachments.keep([])
    much = "x" * BODY_BYTES_MAX
    rendered = attachments._rendered
    monkeypatch.setattr(
        attachments, "_rendered", lambda *told: rendered(*told) | ({"more": much} if told[2].machine == bad else {})
    )
    await attachments.tell_everything(host.control)
    assert (gateway.knows(bad), gateway.knows(good)) == (False, True)


async def test_one_sandbox_that_the_gateway_takes_long_for_keeps_no_other_from_being_told(
    host: Host, gateway: GatewayHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = await host.create(), await host.create()
    await gateway.attachments.keep([])
    put_one = host.control.gateway.put

    async def take_long(sandbox: str, attachment: dict[str, Any]) -> None:
        await put_one(sandbox, attachment)
        if sandbox == slow:
            raise host.control.gateway.lost()

    monkeypatch.setattr(host.control.gateway, "put", take_long)
    host.control.telling.again.clear()
    await attachments.tell_everything(host.control)
    assert host.control.telling.again.is_set()
    assert gateway.knows(slow)
    assert gateway.knows(other)


async def test_many_changes_of_one_sandbox_at_once_end_with_the_last_one_at_the_gateway(
    host: Host, gateway: GatewayHost
) -> None:
    sandbox = await host.create()
    documents = [{"rules": [{"hosts": [f"h{number}.example"]}]} for number in range(12)]
    await asyncio.gather(
        *(put(host, f"/v1/sandboxes/{sandbox}/policy", {"policy": document}) for document in documents),
        *(attachments.tell_everything(host.control) for _ in range(3)),
    )
    found = await of(host, sandbox)
    last = found["document"]["rules"][0]["hosts"][0]
    assert [n for n in range(12) if gateway.allows(sandbox, f"h{n}.example")] == [int(last[1:].split(".")[0])]
    assert gateway.attachments.of(sandbox).generation == found["generation"] == 13

"""Secrets and grants: values go in, reach the gateway, and are found nowhere else; keys that get lost lose nothing."""

import asyncio
import base64
import io
import json
import logging
import stat
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from space import logs
from space.control import attachments, grants, secrets, values
from space.control.keyring import KeyStore
from space.control.reaper import sweep
from space.errors import HostError
from space.model.grant import GRANTS_MAX, PLACEHOLDER
from tests.control_host import Host, code, control_over, hosting, until
from tests.gateway_host import GatewayHost, gateway_at

VALUE = "sk-live-4f9c1d7e2b8a6053-of-nobody-else"
OTHER = "sk-live-00c0ffee00c0ffee-the-next-one"
HOSTS = {"hosts": ["api.example"]}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as host:
        yield host


@pytest.fixture
async def gateway(host: Host) -> AsyncIterator[GatewayHost]:
    async with gateway_at(host.settings.gateway_socket) as gateway:
        yield gateway


async def keep(host: Host, name: str = "key", value: Any = VALUE, **fields: Any) -> dict[str, Any]:
    answer = await host.http.put(f"/v1/secrets/{name}", json={"value": value, **fields})
    assert answer.is_success, answer.text
    return answer.json()


async def grant(host: Host, sandbox: str, secret: str = "key", **terms: Any) -> dict[str, Any]:
    answer = await host.http.post(f"/v1/sandboxes/{sandbox}/grants", json={"secret": secret, **HOSTS, **terms})
    assert answer.status_code == httpx.codes.CREATED, answer.text
    return answer.json()


def key_file(host: Host) -> Path:
    return host.settings.api_dir / "secrets.key"


def forms(value: str) -> list[bytes]:
    """A value as it is and in the forms that it may be written in."""
    raw = value.encode()
    return [raw, base64.b64encode(raw), base64.b64encode(b"x:" + raw)[4:-4], quote(value).encode(), raw.hex().encode()]


def found_in(data: bytes, value: str) -> list[bytes]:
    return [form for form in forms(value) if form in data]


def kept_in(directory: Path) -> bytes:
    return b"\0".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())


# --- nowhere but at the gateway


async def test_a_value_reaches_the_gateway_and_is_in_no_answer_no_file_no_log_and_no_figure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logged = io.StringIO()
    logs.configure("debug", logged)
    logging.getLogger().setLevel(logging.DEBUG)
    try:
        async with hosting(tmp_path) as host, gateway_at(host.settings.gateway_socket) as gateway:
            said = [
                await host.http.put("/v1/secrets/key", json={"value": VALUE}),
                await host.http.post(
                    "/v1/secrets",
                    json={"name": "pair", "kind": "basic", "value": {"username": "u", "password": VALUE}},
                    headers={"Idempotency-Key": "once"},
                ),
                await host.http.post("/v1/secrets", json={"name": "key", "value": VALUE}),
                await host.http.post("/v1/secrets", json={"name": "bad\n", "value": VALUE, VALUE: VALUE}),
                await host.http.post("/v1/secrets", json={"name": "bad", "value": [VALUE]}),
                await host.http.post("/v1/secrets", json={"name": "bad", "value": {"value": VALUE, "more": VALUE}}),
                await host.http.post("/v1/secrets", json={"name": "bad", "value": VALUE + "\n"}),
                await host.http.put("/v1/secrets/key", json={"kind": "basic", "value": {"username": VALUE}}),
            ]
            body = {"template": "base", "grants": [{"secret": "key", **HOSTS, "env": "KEY"}]}
            said.append(await host.http.post("/v1/sandboxes", json=body, headers={"Prefer": "wait=20"}))
            sandbox = said[-1].json()["sandbox"]["id"]
            await grant(host, sandbox, "pair", placement="basic")
            assert gateway.values(sandbox)["key"] == {"value": VALUE}
            assert gateway.values(sandbox)["pair"] == {"username": "u", "password": VALUE}
            await gateway.record(sandbox, host="api.example", secrets=["key"], decision="allow")
            one = f"/v1/sandboxes/{sandbox}"
            paths = ["/v1/secrets", "/v1/secrets/key", one, f"{one}/grants", f"{one}/policy", f"{one}/egress"]
            said += [await host.http.get(path) for path in [*paths, "/v1/operations", "/metrics", "/v1/project"]]
            said.append(await host.http.post("/v1/secret-keys/rotate"))
            said.append(await host.http.delete("/v1/secrets/pair"))
            told = json.dumps([host.node.wanted, host.node.passed], default=str).encode()
            for answer in said:
                assert answer.status_code < 500, answer.text
                assert found_in(answer.content, VALUE) == [], answer.request.url
            assert found_in(told, VALUE) == []
            # While it runs: what SQLite has not yet moved to its main file is looked through, too.
            assert found_in(kept_in(host.settings.data_dir), VALUE) == []
            assert found_in(kept_in(gateway.directory), VALUE) == []
            everything = repr(vars(host.control)) + repr(await host.control.store.read(lambda c: _rows(c, host)))
            assert found_in(everything.encode(), VALUE) == []
    finally:
        logging.getLogger().setLevel(logging.WARNING)
    out, err = capfd.readouterr()
    assert "gateway" in logged.getvalue() or "request" in logged.getvalue()
    assert found_in((logged.getvalue() + out + err).encode(), VALUE) == []


def _rows(connection: Any, host: Host) -> Any:
    from space.store import secrets as rows

    return rows.page(connection, host.project_id, after=None, limit=99)


async def test_no_error_on_the_way_of_a_value_has_it_in_its_text_or_its_causes(host: Host) -> None:
    await keep(host)
    row = await host.control.store.read(lambda c: _rows(c, host))
    keys = await host.control.key_store.opening()
    other = KeyStore(host.settings.api_dir / "other.key")
    wrong = await other.sealing(make=True)
    for broken in (wrong, keys):
        sealed = row[0].sealed if broken is wrong else row[0].sealed[:-1] + b"\0"
        with pytest.raises(HostError) as failed:
            broken.open(keys.first if broken is keys else wrong.first, sealed, "x")
        text = "".join(traceback.format_exception(failed.value, chain=True))
        assert found_in(text.encode(), VALUE) == []
    assert found_in(repr([keys, row, secrets.NewSecret("n", "text", {"value": VALUE})]).encode(), VALUE) == []


async def test_the_same_request_makes_one_secret_and_another_value_under_its_key_is_refused(host: Host) -> None:
    body, headers = {"name": "key", "value": VALUE}, {"Idempotency-Key": "once"}
    first = await host.http.post("/v1/secrets", json=body, headers=headers)
    again = await host.http.post("/v1/secrets", json=body, headers=headers)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    other = await host.http.post("/v1/secrets", json={**body, "value": OTHER}, headers=headers)
    assert code(other) == "idempotency-key-reused"
    assert code(await host.http.post("/v1/secrets", json=body)) == "name-taken"


# --- values and kinds


async def test_the_next_value_holds_for_every_sandbox_it_is_granted_to_when_that_is_answered(
    host: Host, gateway: GatewayHost
) -> None:
    made = await host.http.put("/v1/secrets/key", json={"value": VALUE})
    assert (made.status_code, made.json()["version"]) == (201, 1)
    sandboxes = [await host.create(grants=[{"secret": "key", **HOSTS}]) for _ in range(3)]
    asleep = await host.create(grants=[{"secret": "key", **HOSTS}])
    await host.verb(asleep, "suspend")
    changed = await host.http.put("/v1/secrets/key", json={"value": OTHER})
    assert (changed.status_code, changed.json()["version"], changed.json()["grants"]) == (200, 2, 4)
    for sandbox in sandboxes:
        assert gateway.values(sandbox) == {"key": {"value": OTHER}}
    assert not gateway.knows(asleep)
    await host.verb(asleep, "wake")
    assert gateway.values(asleep) == {"key": {"value": OTHER}}
    await host.http.delete(f"/v1/sandboxes/{asleep}", headers={"Prefer": "wait=20"})
    assert (await host.http.get("/v1/secrets/key")).json()["grants"] == 3


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("basic", {"username": "u", "password": VALUE}),
        ("aws", {"access_key_id": "AKIA1", "secret_access_key": VALUE}),
        ("aws", {"access_key_id": "AKIA1", "secret_access_key": VALUE, "session_token": OTHER}),
    ],
)
async def test_other_kinds_have_their_fields_and_a_secret_keeps_its_kind(
    host: Host, gateway: GatewayHost, kind: str, value: dict[str, str]
) -> None:
    await keep(host, value=value, kind=kind)
    placement = {"basic": "basic", "aws": "aws-sigv4"}[kind]
    sandbox = await host.create(grants=[{"secret": "key", **HOSTS, "placement": placement}])
    assert gateway.values(sandbox) == {"key": value}
    refused = await host.http.put("/v1/secrets/key", json={"value": VALUE})
    assert (code(refused), refused.json()["error"]["details"]["kind"]) == ("wrong-secret-kind", kind)
    wrong = await host.http.post(f"/v1/sandboxes/{sandbox}/grants", json={"secret": "key", **HOSTS})
    assert (code(wrong), wrong.json()["error"]["details"]["field"]) == ("invalid-request", "grant.placement")


@pytest.mark.parametrize(
    "value", ["", "a\nb", " a", "ü", "x" * 8193, "x" * 70_000, {"value": 1}, {}, None, ["a"], {"username": "u"}]
)
async def test_what_cannot_be_a_value_is_refused(host: Host, value: Any) -> None:
    refused = await host.http.put("/v1/secrets/key", json={"value": value})
    assert (refused.status_code, code(refused)) == (422, "invalid-request")
    assert refused.json()["error"]["details"]["field"] == "value"
    assert code(await host.http.get("/v1/secrets/key")) == "not-found"


# --- grants


async def test_a_grant_with_env_puts_its_placeholder_into_the_environment_and_nothing_else(
    host: Host, gateway: GatewayHost
) -> None:
    await keep(host)
    sandbox = await host.create(env={"A": "b"}, grants=[{"secret": "key", **HOSTS, "env": "API_KEY"}])
    environment = host.node.wanted[sandbox]["env"]
    assert environment["A"] == "b"
    assert PLACEHOLDER.fullmatch(environment["API_KEY"])
    [held] = gateway.attachments.of(sandbox).grants
    assert held.placeholder == environment["API_KEY"]
    [listed] = (await host.http.get(f"/v1/sandboxes/{sandbox}/grants")).json()["items"]
    assert (listed["placeholder"], listed["env"]) == (environment["API_KEY"], "API_KEY")
    twice = {"template": "base", "env": {"API_KEY": "x"}, "grants": [{"secret": "key", **HOSTS, "env": "API_KEY"}]}
    refused = await host.http.post("/v1/sandboxes", json=twice)
    assert refused.json()["error"]["details"]["field"] == "grants[0].env"


async def test_a_revoked_grant_is_gone_at_the_gateway_when_that_is_answered(host: Host, gateway: GatewayHost) -> None:
    await keep(host)
    sandbox = await host.create()
    made = await grant(host, sandbox)
    assert gateway.values(sandbox) == {"key": {"value": VALUE}}
    path = f"/v1/sandboxes/{sandbox}/grants/{made['id']}"
    assert (await host.http.delete(path)).status_code == httpx.codes.NO_CONTENT
    assert gateway.values(sandbox) == {}
    assert code(await host.http.delete(path)) == "not-found"
    assert (await host.http.get(f"/v1/sandboxes/{sandbox}/grants")).json()["items"] == []


async def test_deleting_a_secret_revokes_all_its_grants(host: Host, gateway: GatewayHost) -> None:
    await keep(host)
    sandboxes = [await host.create(grants=[{"secret": "key", **HOSTS}]) for _ in range(2)]
    assert (await host.http.delete("/v1/secrets/key")).status_code == httpx.codes.NO_CONTENT
    assert [gateway.values(sandbox) for sandbox in sandboxes] == [{}, {}]
    assert code(await host.http.delete("/v1/secrets/key")) == "not-found"
    refused = await host.http.post("/v1/sandboxes", json={"template": "base", "grants": [{"secret": "key", **HOSTS}]})
    assert (code(refused), refused.json()["error"]["details"]["field"]) == ("unknown-secret", "grants[0].secret")


async def test_a_grant_ends_by_itself_at_its_time_and_is_swept_a_day_later(host: Host, gateway: GatewayHost) -> None:
    await keep(host)
    sandbox = await host.create()
    made = await grant(host, sandbox, expires_in_s=60)
    [held] = gateway.attachments.of(sandbox).grants
    assert held.expires_at is not None
    assert not held.expired(held.expires_at - 1)
    assert held.expired(held.expires_at)
    host.clock.move(61)
    assert (await host.http.get(f"/v1/sandboxes/{sandbox}/grants")).json()["items"] == []
    await attachments.tell_everything(host.control)
    assert gateway.values(sandbox) == {}
    host.clock.move(25 * 3600)
    await sweep(host.control)
    assert code(await host.http.delete(f"/v1/sandboxes/{sandbox}/grants/{made['id']}")) == "not-found"


async def test_forks_have_their_sources_grants_with_its_placeholders_and_each_is_revoked_alone(
    host: Host, gateway: GatewayHost
) -> None:
    await keep(host)
    source = await host.create(grants=[{"secret": "key", **HOSTS, "env": "API_KEY"}])
    placeholder = host.node.wanted[source]["env"]["API_KEY"]
    first, second = [fork["id"] for fork in await host.fork(source, count=2, env={"OWN": "x"})]
    for fork in (first, second):
        assert gateway.values(fork) == {"key": {"value": VALUE}}
        assert gateway.attachments.of(fork).grants[0].placeholder == placeholder
        assert host.node.wanted[fork]["env"] == {"OWN": "x", "API_KEY": placeholder}
    [listed] = (await host.http.get(f"/v1/sandboxes/{first}/grants")).json()["items"]
    await host.http.delete(f"/v1/sandboxes/{first}/grants/{listed['id']}")
    assert gateway.values(first) == {}
    assert gateway.values(second) == gateway.values(source) == {"key": {"value": VALUE}}


async def test_the_same_grant_asked_for_twice_is_one(host: Host, gateway: GatewayHost) -> None:
    await keep(host)
    sandbox = await host.create()
    path, headers = f"/v1/sandboxes/{sandbox}/grants", {"Idempotency-Key": "once"}
    answers = [await host.http.post(path, json={"secret": "key", **HOSTS}, headers=headers) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert len(gateway.attachments.of(sandbox).grants) == 1


@pytest.mark.parametrize(
    ("terms", "field"),
    [
        ({"hosts": ["*"]}, "hosts[0]"),
        ({"hosts": ["1.2.3.4"]}, "hosts[0]"),
        ({"placement": "header"}, "name"),
        ({"placement": "header", "name": "host"}, "name"),
        ({"template": "none"}, "template"),
        ({"paths": ["x"]}, "paths[0]"),
        ({"methods": ["G T"]}, "methods[0]"),
    ],
)
async def test_what_is_wrong_with_a_grant_is_named(host: Host, terms: dict[str, Any], field: str) -> None:
    await keep(host)
    sandbox = await host.create()
    wrong = {"secret": "key", **HOSTS, **terms}
    alone = await host.http.post(f"/v1/sandboxes/{sandbox}/grants", json=wrong)
    made = await host.http.post("/v1/sandboxes", json={"template": "base", "grants": [wrong]})
    assert alone.json()["error"]["details"]["field"] == f"grant.{field}"
    assert made.json()["error"]["details"]["field"] == f"grants[0].{field}"


# --- limits and projects


async def test_there_are_so_many_secrets_and_grants_and_no_more(
    host: Host, gateway: GatewayHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "SECRETS_MAX", 1)
    monkeypatch.setattr(grants, "GRANTS_MAX", 2)
    await keep(host)
    assert code(await host.http.put("/v1/secrets/two", json={"value": VALUE})) == "secrets-max"
    await keep(host, value=OTHER)
    sandbox = await host.create(grants=[{"secret": "key", **HOSTS}])
    await grant(host, sandbox)
    refused = await host.http.post(f"/v1/sandboxes/{sandbox}/grants", json={"secret": "key", **HOSTS})
    assert code(refused) == "grants-max"
    assert len(gateway.attachments.of(sandbox).grants) == 2
    many = {"template": "base", "grants": [{"secret": "key", **HOSTS}] * (GRANTS_MAX + 1)}
    assert code(await host.http.post("/v1/sandboxes", json=many)) == "invalid-request"


async def test_nobody_sees_uses_or_changes_another_projects_secrets_and_grants(
    host: Host, gateway: GatewayHost
) -> None:
    await keep(host)
    sandbox, other = await host.create(grants=[{"secret": "key", **HOSTS}]), await host.other()
    [held] = gateway.attachments.of(sandbox).grants
    unknown = "sbxaaaaaaaaaaaaaaaa"
    for method, path, body in (
        ("GET", "/v1/secrets/{}", None),
        ("DELETE", "/v1/secrets/{}", None),
        ("GET", "/v1/sandboxes/{}/grants", None),
        ("POST", "/v1/sandboxes/{}/grants", {"secret": "key", **HOSTS}),
        ("DELETE", "/v1/sandboxes/{}/grants/" + held.id, None),
    ):
        name = "key" if "secrets" in path else sandbox
        theirs = await other.request(method, path.format(name), json=body)
        nobodys = await other.request(method, path.format("none" if "secrets" in path else unknown), json=body)
        assert theirs.status_code == nobodys.status_code == httpx.codes.NOT_FOUND
        assert theirs.json()["error"]["message"] == nobodys.json()["error"]["message"]
    assert (await other.get("/v1/secrets")).json()["items"] == []
    refused = await other.post("/v1/sandboxes", json={"template": "base", "grants": [{"secret": "key", **HOSTS}]})
    assert code(refused) == "unknown-secret"
    assert (await other.put("/v1/secrets/key", json={"value": OTHER})).status_code == httpx.codes.CREATED
    assert gateway.values(sandbox) == {"key": {"value": VALUE}}
    assert code(await other.post("/v1/secret-keys/rotate")) == "forbidden"


# --- keys


async def test_the_key_file_is_its_owners_alone_and_one_that_is_not_is_refused(host: Host) -> None:
    await keep(host)
    assert stat.S_IMODE(key_file(host).stat().st_mode) == 0o600
    key_file(host).chmod(0o640)
    async with control_over(host.settings, host.clock) as fresh:
        with pytest.raises(HostError, match="chmod 600") as refused:
            await fresh.key_store.opening()
    assert refused.value.code == "secrets-key-unreadable"


async def test_with_its_key_file_lost_nothing_is_lost_and_no_new_key_is_made(host: Host, gateway: GatewayHost) -> None:
    await keep(host)
    sandbox = await host.create(grants=[{"secret": "key", **HOSTS}])
    text = key_file(host).read_bytes()
    key_file(host).unlink()
    for answer in (
        await host.http.put("/v1/secrets/key", json={"value": OTHER}),
        await host.http.put("/v1/secrets/two", json={"value": OTHER}),
        await host.http.post("/v1/secret-keys/rotate"),
    ):
        assert (answer.status_code, code(answer)) == (500, "secrets-key-missing")
        assert "secrets.key" in answer.text
    assert not key_file(host).exists()
    async with control_over(host.settings, host.clock) as fresh:
        # The api was restarted meanwhile: sandboxes go on without, and no request goes out with anything.
        await attachments.tell_everything(fresh)
        assert gateway.knows(sandbox)
        assert gateway.values(sandbox) == {}
        key_file(host).write_bytes(text)
        key_file(host).chmod(0o600)
        await attachments.tell_everything(fresh)
    assert gateway.values(sandbox) == {"key": {"value": VALUE}}
    assert (await keep(host, value=OTHER))["version"] == 2


async def test_with_another_key_of_the_same_name_or_a_damaged_file_the_error_says_so(
    host: Host, gateway: GatewayHost
) -> None:
    await keep(host)
    sandbox = await host.create()
    text = key_file(host).read_text()
    name = text.partition(":")[0]
    body = {"secret": "key", **HOSTS}
    for written, expected in (
        (f"{name}:{base64.b64encode(b'x' * 32).decode()}\n", "secrets-key-wrong"),
        (f"other:{base64.b64encode(b'x' * 32).decode()}\n", "secrets-key-missing"),
        ("nonsense\n", "secrets-key-unreadable"),
        (text + text, "secrets-key-unreadable"),
        ("", "secrets-key-unreadable"),
    ):
        key_file(host).write_text(written)
        object.__setattr__(host.control, "key_store", KeyStore(key_file(host)))
        answer = await host.http.post(f"/v1/sandboxes/{sandbox}/grants", json=body)
        assert (answer.status_code, code(answer)) == (500, expected), written
        assert found_in(answer.content, VALUE) == []
    key_file(host).write_text(text)
    object.__setattr__(host.control, "key_store", KeyStore(key_file(host)))
    await grant(host, sandbox)
    assert gateway.values(sandbox) == {"key": {"value": VALUE}}


async def test_a_sealed_value_can_be_opened_only_as_what_it_was_sealed_as(host: Host) -> None:
    for name in ("one", "two"):
        await keep(host, name)
    first, second = await host.control.store.read(lambda c: _rows(c, host))
    keys = await host.control.key_store.opening()
    assert values.opened(keys, first) == {"value": VALUE}
    from dataclasses import replace

    for moved in (
        replace(second, sealed=first.sealed),
        replace(first, version=2),
        replace(first, project_id="prjaaaaaaaaaaaaaaaa"),
        replace(first, sealed=first.sealed[:-1] + bytes([first.sealed[-1] ^ 1])),
        replace(first, sealed=b""),
    ):
        with pytest.raises(HostError) as refused:
            values.opened(keys, moved)
        assert refused.value.code == "secrets-key-wrong"


async def test_after_a_rotation_everything_is_sealed_with_the_new_key_and_still_the_same(
    host: Host, gateway: GatewayHost
) -> None:
    names = [f"s{number}" for number in range(7)]
    for name in names:
        await keep(host, name, value=f"{VALUE}-{name}")
    before = {row.name: (row.key_id, row.sealed, row.version) for row in await _all(host)}
    done = (await host.http.post("/v1/secret-keys/rotate")).json()
    assert (done["sealed"], done["failed"]) == (7, 0)
    after = {row.name: (row.key_id, row.sealed, row.version) for row in await _all(host)}
    assert {key for key, _, _ in after.values()} == {done["key_id"]}
    assert all(before[name][1] != after[name][1] and before[name][2] == after[name][2] for name in names)
    sandbox = await host.create(grants=[{"secret": name, "hosts": [f"{name}.example"]} for name in names])
    assert gateway.values(sandbox) == {name: {"value": f"{VALUE}-{name}"} for name in names}
    old = before["s0"][0]
    assert old in key_file(host).read_text()
    await host.http.post("/v1/secret-keys/rotate")
    assert old not in key_file(host).read_text()
    assert stat.S_IMODE(key_file(host).stat().st_mode) == 0o600
    async with control_over(host.settings, host.clock) as fresh:
        await attachments.tell_everything(fresh)
    assert gateway.values(sandbox)["s0"] == {"value": f"{VALUE}-s0"}


async def _all(host: Host) -> list[Any]:
    return list(await host.control.store.read(lambda c: _rows(c, host)))


async def test_another_process_opens_and_seals_with_the_key_that_came_first_meanwhile(
    host: Host, gateway: GatewayHost
) -> None:
    await keep(host)
    async with control_over(host.settings, host.clock) as second:
        await second.key_store.opening()
        rotated = (await host.http.post("/v1/secret-keys/rotate")).json()
        wanted = secrets.NewSecret("two", "text", {"value": OTHER})
        made = await secrets.request_secret(second, host.project_id, wanted)
        assert made.secret.key_id == rotated["key_id"]
        sandbox = await host.create(grants=[{"secret": "key", **HOSTS}])
        await gateway.attachments.keep([])
        await attachments.tell_everything(second)
        assert gateway.values(sandbox) == {"key": {"value": VALUE}}


async def test_a_rotation_leaves_out_what_cannot_be_opened_and_says_how_many(host: Host) -> None:
    await keep(host, "good")
    await keep(host, "bad")
    from space.store import secrets as rows

    bad = await host.control.store.read(lambda c: rows.get(c, host.project_id, "bad"))
    assert bad is not None
    await host.control.store.write(lambda c: rows.change(c, bad, sealed=b"damaged"))
    done = (await host.http.post("/v1/secret-keys/rotate")).json()
    assert (done["sealed"], done["failed"]) == (1, 1)
    kept = {row.name: row.sealed for row in await _all(host)}
    assert kept["bad"] == b"damaged"


async def test_a_command_tells_the_keys_instead_of_a_file(tmp_path: Path) -> None:
    keys, script = tmp_path / "keys", tmp_path / "tell"
    first, second = (f"{name}:{base64.b64encode(name.encode() * 16).decode()}\n" for name in ("k1", "k2"))
    keys.write_text(first)
    script.write_text(f"#!/bin/sh\necho complaint of {VALUE} >&2\ncat {keys}\n")
    script.chmod(0o755)
    async with (
        hosting(tmp_path / "host", secrets_key_command=f"{script} --now") as host,
        gateway_at(host.settings.gateway_socket) as gateway,
    ):
        await keep(host)
        sandbox = await host.create(grants=[{"secret": "key", **HOSTS}])
        assert gateway.values(sandbox) == {"key": {"value": VALUE}}
        assert not key_file(host).exists()
        keys.write_text(second + first)
        done = (await host.http.post("/v1/secret-keys/rotate")).json()
        assert (done["key_id"], done["sealed"]) == ("k2", 1)


@pytest.mark.parametrize(
    ("script", "says"), [("exit 3", "status 3"), ("echo nonsense", "gives no keys"), ("yes", "wrote too much")]
)
async def test_a_command_that_tells_no_keys_is_an_operators_error(tmp_path: Path, script: str, says: str) -> None:
    program = tmp_path / "tell"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with pytest.raises(HostError, match=says) as refused:
        await KeyStore(tmp_path / "none", str(program)).opening()
    assert refused.value.code == "secrets-key-unreadable"
    with pytest.raises(HostError, match="cannot be run"):
        await KeyStore(tmp_path / "none", str(tmp_path / "absent")).opening()


async def test_two_who_keep_the_first_secret_at_once_use_one_key(host: Host) -> None:
    await asyncio.gather(*(keep(host, f"s{number}") for number in range(6)))
    assert len({row.key_id for row in await _all(host)}) == 1
    assert len(key_file(host).read_text().splitlines()) == 1


async def test_a_wake_waits_for_the_gateway_to_know_its_secrets(host: Host, gateway: GatewayHost) -> None:
    await keep(host)
    sandbox = await host.create(grants=[{"secret": "key", **HOSTS}])
    await host.verb(sandbox, "stop")

    async def asleep() -> bool:
        return not gateway.knows(sandbox)

    await until(asleep)
    await host.verb(sandbox, "start")
    assert gateway.values(sandbox) == {"key": {"value": VALUE}}

"""Who may do what: keys, projects, and the wall between them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from space.api.access import Access
from space.api.routes import ROUTES
from tests.control_host import Host, code, control_over, hosting
from tests.gateway_host import gateway_at

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    """One for the tests that are refused everything."""
    async with hosting(tmp_path_factory.mktemp("host")) as host:
        yield host


@pytest_asyncio.fixture(loop_scope="module")
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as host:
        yield host


PROTECTED = [(row.method, row.path) for row in ROUTES if row.access is not Access.PUBLIC]


@pytest.mark.parametrize(("method", "path"), PROTECTED)
async def test_every_path_that_is_not_public_needs_a_key(shared: Host, method: str, path: str) -> None:
    for authorization in (
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer sk_" + "A" * 43,
        "Basic abc",
        f"bearer{shared.key}",
        "x y z",
    ):
        headers = {} if authorization is None else {"Authorization": authorization}
        async with shared.client(None) as nobody:
            answer = await nobody.request(method, path.replace("{", "").replace("}", ""), headers=headers)
        assert answer.status_code == httpx.codes.UNAUTHORIZED
        assert code(answer) == "unauthenticated"
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_public_are_only_the_paths_that_tell_nothing() -> None:
    public = {row.path for row in ROUTES if row.access is Access.PUBLIC}
    assert public == {"/healthz", "/readyz", "/openapi.json", "/docs"}


async def test_a_body_that_does_not_come_is_given_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("space.api.access.BODY_TIMEOUT_S", 0.05)

    async def stalled() -> AsyncIterator[bytes]:
        yield b'{"template"'
        await asyncio.Event().wait()

    answer = await host.http.post("/v1/sandboxes", content=stalled())
    assert answer.status_code == httpx.codes.REQUEST_TIMEOUT
    assert code(answer) == "body-timeout"


async def test_an_unauthenticated_body_is_never_read(host: Host) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 65536
            yield b"x" * 65536

    async with host.client(None) as nobody:
        answer = await nobody.post("/v1/sandboxes", content=endless())
    assert answer.status_code == httpx.codes.UNAUTHORIZED
    assert read == 0


async def test_a_members_key_cannot_make_projects_or_admins(host: Host) -> None:
    async with await host.other() as member:
        refused = await member.post("/v1/projects", json={"name": "third"})
        assert refused.status_code == httpx.codes.FORBIDDEN
        assert code(refused) == "forbidden"
        assert (await member.post("/v1/keys", json={"role": "admin"})).status_code == httpx.codes.FORBIDDEN
        assert (await member.post("/v1/keys", json={"role": "owner"})).status_code == httpx.codes.UNPROCESSABLE_ENTITY
        assert (await member.get("/metrics")).status_code == httpx.codes.FORBIDDEN
        made = await member.post("/v1/keys", json={"name": "second"})
        assert made.json()["role"] == "member"


async def test_a_key_is_shown_once_and_not_kept_in_the_clear(host: Host) -> None:
    made = (await host.http.post("/v1/keys", json={"name": "worker"})).json()
    assert made["key"].startswith("sk_")
    assert len(made["key"]) == 46
    listed = await host.http.get("/v1/keys")
    assert made["key"] not in listed.text
    assert made["id"] in listed.text
    everything = b"".join(file.read_bytes() for file in host.settings.api_dir.iterdir())
    assert made["key"].encode() not in everything
    assert host.key.encode() not in everything


async def test_a_revoked_key_is_refused_at_once(host: Host) -> None:
    for _ in range(5):
        made = (await host.http.post("/v1/keys", json={})).json()
        async with host.client(made["key"]) as fresh:
            assert (await fresh.get("/v1/sandboxes")).is_success
            revoked = await host.http.delete(f"/v1/keys/{made['id']}")
            assert revoked.status_code == httpx.codes.NO_CONTENT
            assert (await fresh.get("/v1/sandboxes")).status_code == httpx.codes.UNAUTHORIZED
        again = await host.http.delete(f"/v1/keys/{made['id']}")
        assert again.status_code == httpx.codes.NOT_FOUND
        assert made["id"] not in (await host.http.get("/v1/keys")).text


async def test_a_key_revoked_while_it_is_looked_up_is_not_remembered(host: Host) -> None:
    made = (await host.http.post("/v1/keys", json={})).json()
    async with host.client(made["key"]) as fresh:
        asking = [asyncio.ensure_future(fresh.get("/v1/sandboxes")) for _ in range(10)]
        await host.http.delete(f"/v1/keys/{made['id']}")
        await asyncio.gather(*asking)
        assert (await fresh.get("/v1/sandboxes")).status_code == httpx.codes.UNAUTHORIZED


async def test_a_key_revoked_by_another_process_is_refused_within_a_second(host: Host) -> None:
    made = (await host.http.post("/v1/keys", json={})).json()
    async with host.client(made["key"]) as fresh, control_over(host.settings, host.clock) as elsewhere:
        assert (await fresh.get("/v1/sandboxes")).is_success
        from space.control import projects

        await projects.revoke_key(elsewhere, host.project_id, made["id"])
        ends = asyncio.get_running_loop().time() + 10
        while (await fresh.get("/v1/sandboxes")).is_success:
            assert asyncio.get_running_loop().time() < ends
            await asyncio.sleep(0.02)


async def test_the_use_of_a_key_is_noted_to_the_minute(host: Host) -> None:
    await host.http.get("/v1/sandboxes")
    await host.control.keyring.note_used()
    before = (await host.http.get("/v1/keys")).json()["items"][0]["last_used_at"]
    assert before is not None
    await host.control.keyring.note_used()
    assert (await host.http.get("/v1/keys")).json()["items"][0]["last_used_at"] == before
    host.clock.move(61)
    await host.http.get("/v1/sandboxes")
    await host.control.keyring.note_used()
    assert (await host.http.get("/v1/keys")).json()["items"][0]["last_used_at"] != before


async def test_projects_have_names_of_their_own(host: Host) -> None:
    made = await host.http.post("/v1/projects", json={"name": "team"})
    assert made.status_code == httpx.codes.CREATED
    async with host.client(made.json()["key"]) as member:
        own = (await member.get("/v1/project")).json()
        assert own == {name: value for name, value in made.json().items() if name != "key"}
    taken = await host.http.post("/v1/projects", json={"name": "team"})
    assert taken.status_code == httpx.codes.CONFLICT
    assert code(taken) == "name-taken"


async def test_creating_a_key_or_project_again_with_the_same_idempotency_key_makes_no_second(host: Host) -> None:
    """L10"""
    for path, body in (("/v1/keys", {"name": "one"}), ("/v1/projects", {"name": "one"})):
        headers = {"Idempotency-Key": f"make-{path}"}
        answers = await asyncio.gather(*(host.http.post(path, json=body, headers=headers) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {httpx.codes.CREATED}, [a.text for a in answers]
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert sum(answer.json()["key"] is not None for answer in answers) == 1, "the key is shown once"
        other = await host.http.post(path, json={"name": "two"}, headers=headers)
        assert code(other) == "idempotency-key-reused"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def theirs(shared: Host) -> dict[str, str]:
    sandbox = await shared.create()
    operation = (await shared.http.get("/v1/operations")).json()["items"][0]["id"]
    command = (await shared.http.post(f"/v1/sandboxes/{sandbox}/commands", json={"argv": ["true"]})).json()
    key = (await shared.http.get("/v1/keys")).json()["items"][0]["id"]
    made = await shared.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={}, headers={"Prefer": "wait=20"})
    snapshot = made.json()["snapshot"]["id"]
    webhook = await shared.http.post("/v1/webhooks", json={"url": "https://receiver.example/"})
    digest = await shared.release("theirs", "theirs", tag="of-theirs")
    await shared.http.put("/v1/secrets/theirs", json={"value": "theirs"})
    await shared.http.put("/v1/policies/theirs", json={"document": {"preset": "none"}})
    async with gateway_at(shared.settings.gateway_socket):
        granted = await shared.http.post(
            f"/v1/sandboxes/{sandbox}/grants", json={"secret": "theirs", "hosts": ["a.example"]}
        )
    return {
        "template": digest,
        "name": "theirs",
        "tag": "of-theirs",
        "build_id": await shared.build("theirs"),
        "upload_id": await shared.upload(),
        "sandbox_id": sandbox,
        "operation_id": operation,
        "command_id": command["command"]["id"],
        "key_id": key,
        "snapshot_id": snapshot,
        "webhook_id": webhook.json()["id"],
        "grant_id": granted.json()["id"],
        "context_id": "ctx-of-theirs",
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(shared: Host) -> AsyncIterator[httpx.AsyncClient]:
    """A key of another project."""
    async with await shared.other() as other:
        yield other


# What makes a thing of the caller's own where there is none of the name.
MAKES = {("PUT", "/v1/policies/{name}"), ("PUT", "/v1/secrets/{name}")}
OWNED = [
    (row.method, row.path)
    for row in ROUTES
    if row.access is Access.MEMBER and "{" in row.path and (row.method, row.path) not in MAKES
]
# What is named in words may be anybody's word: another project has none of this name.
UNKNOWN = {"operation_id": "op" + "a" * 16, "template": "sha256:" + "a" * 64, "name": "nobodys", "tag": "none"}


# What a body must have to be looked at.
BODIES: dict[str, dict[str, Any]] = {
    "exec": {"argv": ["true"]},
    "execute": {"code": "1"},
    "commands": {"argv": ["true"]},
    "policy": {"policy": None},
    "check": {"host": "a.example"},
    "grants": {"secret": "theirs", "hosts": ["a.example"]},
}


@pytest.mark.parametrize(("method", "path"), OWNED)
async def test_another_projects_ids_look_exactly_like_unknown_ones(
    shared: Host, other: httpx.AsyncClient, theirs: dict[str, str], method: str, path: str
) -> None:
    unknown = {name: value[:3] + "a" * (len(value) - 3) for name, value in theirs.items()} | UNKNOWN
    body = BODIES.get(path.rpartition("/")[2], {})
    if path.endswith("{tag}"):
        body = {"digest": theirs["template"]}
    builds = shared.node.builds
    calls = (list(shared.node.calls), list(shared.node.passed), len(builds.warmed), len(builds.uploads))
    shapes = []
    for ids in (theirs, unknown):
        answer = await other.request(method, path.format(port=8000, **ids), json=body)
        error = answer.json()["error"]
        error.pop("request_id")
        shapes.append((answer.status_code, error, sorted(answer.headers)))
    assert shapes[0] == shapes[1]
    assert shapes[0][0] == httpx.codes.NOT_FOUND
    heard = (shared.node.calls, shared.node.passed, len(builds.warmed), len(builds.uploads))
    assert heard == calls, "the node heard of it"


async def test_lists_show_only_ones_own(other: httpx.AsyncClient, theirs: dict[str, str]) -> None:
    for path in (
        "/v1/sandboxes",
        "/v1/operations",
        "/v1/keys",
        "/v1/snapshots",
        "/v1/templates",
        "/v1/templates?untagged=true",
        "/v1/templates/audit",
        "/v1/builds",
        "/v1/policies",
        "/v1/secrets",
    ):
        answer = await other.get(path)
        assert answer.is_success
        text = answer.text
        for value in theirs.values():
            assert value not in text
    filtered = await other.get("/v1/operations", params={"sandbox_id": theirs["sandbox_id"]})
    assert filtered.json()["items"] == []

"""Forks, snapshots, projects and the keeper's calls of the SDK, against a scripted server on loopback."""

from collections.abc import Iterator

import pytest

from space import (
    AsyncClient,
    Client,
    HostError,
    HostFull,
    LimitExceeded,
    NotFound,
    Quota,
    Sandbox,
    SandboxError,
)
from space.sdk._async.sandbox import AsyncSandbox
from tests.scripted_server import ScriptedServer, error, operation, sandbox, snapshot

ID = sandbox()["id"]
FORKS = ["sbxbbbbbbbbbbbbbbbb", "sbxcccccccccccccccc"]
FORK = f"POST /v1/sandboxes/{ID}/fork"
OPERATION = "GET /v1/operations/opaaaaaaaaaaaaaaaa"
OK = {"exit": {"kind": "exited", "code": 0, "signal": None}, "stdout": "", "stderr": ""}


def forks(**fields: object) -> list[dict[str, object]]:
    return [sandbox(id=made, forked_from=ID, **fields) for made in FORKS]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        server.on(f"GET /v1/sandboxes/{ID}", sandbox())
        for made in (ID, *FORKS):
            server.on(f"DELETE /v1/sandboxes/{made}", {"sandbox": sandbox(state="deleted"), "operation": operation()})
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.url, "sk_test") as client:
        yield client


@pytest.fixture
def sbx(client: Client) -> Sandbox:
    return Sandbox.connect(ID, client=client)


def test_forks_that_run_are_handles_of_their_own_and_took_one_request(server: ScriptedServer, sbx: Sandbox) -> None:
    server.on(FORK, {"sandboxes": forks(), "operation": operation(kind="fork")})
    asked = len(server.seen)
    first, second = sbx.fork(2, name="try", metadata={"for": "x"}, env={"N": "1"}, timeout_s=None)
    assert len(server.seen) == asked + 1
    assert [first.id, second.id, first.info.forked_from] == [*FORKS, ID]
    sent = server.seen[-1]
    assert sent.json == {"count": 2, "name": "try", "metadata": {"for": "x"}, "env": {"N": "1"}, "timeout_s": None}
    assert sent.headers["prefer"] == "wait=30"
    assert sent.headers["idempotency-key"]
    with first:
        pass
    assert server.seen[-1].path == f"/v1/sandboxes/{FORKS[0]}"
    assert server.seen[-1].method == "DELETE"


def test_forks_are_waited_for_when_the_answer_came_early(server: ScriptedServer, sbx: Sandbox) -> None:
    server.on(FORK, {"sandboxes": forks(state="creating", ready=False), "operation": operation("running")})
    server.on(OPERATION, operation())
    for made in forks():
        server.on(f"GET /v1/sandboxes/{made['id']}", made)
    assert [fork.state for fork in sbx.fork(2)] == ["running", "running"]


def test_without_waiting_forks_are_returned_as_they_are(server: ScriptedServer, sbx: Sandbox) -> None:
    server.on(FORK, {"sandboxes": forks(state="creating", ready=False), "operation": operation("pending")})
    assert [fork.state for fork in sbx.fork(2, wait_s=None)] == ["creating", "creating"]
    assert "prefer" not in server.seen[-1].headers


@pytest.mark.parametrize("keep", [False, True])
def test_a_fork_that_fails_leaves_nothing_but_the_source(server: ScriptedServer, sbx: Sandbox, keep: bool) -> None:
    server.on(FORK, {"sandboxes": forks(state="creating", ready=False), "operation": operation("running")})
    failed = operation("failed", error={"code": "start-failed", "message": "it fell over"}, sandbox_id=ID)
    server.on(OPERATION, failed)
    with pytest.raises(SandboxError, match="it fell over"):
        sbx.fork(2, keep=keep)
    deleted = [seen.path for seen in server.seen if seen.method == "DELETE"]
    assert deleted == ([] if keep else [f"/v1/sandboxes/{made}" for made in FORKS])


def test_a_fork_that_fails_while_it_is_waited_for_leaves_nothing_either(server: ScriptedServer, sbx: Sandbox) -> None:
    """Its error names no sandboxes: the same key again tells which there are."""
    failed = error(500, "fork-incomplete", sandbox_id=ID, operation_id="op1", forks={FORKS[1]: "start-failed"})
    server.on(FORK, failed, {"sandboxes": forks(), "operation": operation("failed")})
    with pytest.raises(HostError) as caught:
        sbx.fork(2)
    assert caught.value.code == "fork-incomplete"
    first, second = server.requests(FORK)
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.json == second.json
    assert "prefer" not in second.headers
    assert [seen.path for seen in server.seen[-2:]] == [f"/v1/sandboxes/{made}" for made in FORKS]


def test_forks_keep_the_connections_of_a_source_that_is_gone(server: ScriptedServer) -> None:
    server.on("POST /v1/sandboxes", {"sandbox": sandbox(), "operation": operation()})
    server.on(FORK, {"sandboxes": forks(), "operation": operation()})
    for made in FORKS:
        server.on(f"POST /v1/sandboxes/{made}/exec", OK)
    with Sandbox.create(url=server.url, api_key="sk_test") as source:
        first, second = source.fork(2)
    assert first.run("true").ok
    first.close()
    assert second.run("true").ok
    second.close()
    with pytest.raises(RuntimeError, match="closed"):
        second.run("true")


def test_an_option_that_forks_do_not_have_is_refused_before_anything_is_sent(
    server: ScriptedServer, sbx: Sandbox
) -> None:
    asked = len(server.seen)
    with pytest.raises(TypeError, match="memory_mib"):
        sbx.fork(memory_mib=1)  # type: ignore[call-arg]
    assert len(server.seen) == asked


def test_a_command_is_found_in_a_fork_by_the_id_it_had_before(server: ScriptedServer, sbx: Sandbox) -> None:
    inherited = {"id": "cmdnew", "sandbox_id": FORKS[0], "argv": ["x"], "state": "running", "forked_from": "cmdold"}
    server.on(FORK, {"sandboxes": forks()[:1], "operation": operation()})
    server.on(f"POST /v1/sandboxes/{FORKS[0]}/access", {"url": server.url, "token": "t"})
    server.on("GET /v1/commands/cmdold", {**inherited, "id": "cmdold", "sandbox_id": ID, "forked_from": None})
    server.on("GET /v1/commands/cmdnew", inherited)
    server.on("GET /v1/commands/cmdother", {**inherited, "id": "cmdother", "sandbox_id": ID})
    server.on(f"GET /v1/sandboxes/{FORKS[0]}/commands", {"items": [inherited], "next_cursor": None})
    (fork,) = sbx.fork()
    assert [info.forked_from for info in fork.commands()] == ["cmdold"]
    assert fork.command("cmdold").id == "cmdnew"
    with pytest.raises(NotFound):
        fork.command("cmdother")


# Snapshots


def test_a_snapshot_is_returned_when_it_is_kept(server: ScriptedServer, sbx: Sandbox) -> None:
    made = f"POST /v1/sandboxes/{ID}/snapshots"
    server.on(made, {"snapshot": snapshot(kind="disk", name="ready"), "operation": operation()})
    kept = sbx.snapshot("ready", kind="disk")
    assert (kept.name, kept.kind, kept.state, kept.bytes) == ("ready", "disk", "ready", 12 * 1024 * 1024)
    assert server.requests(made)[0].json == {"name": "ready", "kind": "disk"}
    server.on(made, {"snapshot": snapshot(state="creating"), "operation": operation("running")})
    server.on(OPERATION, operation())
    server.on(f"GET /v1/snapshots/{kept.id}", snapshot())
    assert sbx.snapshot().state == "ready"
    assert sbx.snapshot(wait_s=None).state == "creating"


def test_sandboxes_are_made_from_a_snapshot_or_its_reference(server: ScriptedServer, client: Client) -> None:
    server.on("POST /v1/sandboxes", {"sandbox": sandbox(), "operation": operation()})
    server.on("GET /v1/snapshots/snpaaaaaaaaaaaaaaaa", snapshot())
    kept = client.snapshots.get("snpaaaaaaaaaaaaaaaa")
    Sandbox.create(kept, client=client)
    Sandbox.create("snapshot:snpaaaaaaaaaaaaaaaa", client=client)
    sent = [seen.json for seen in server.requests("POST /v1/sandboxes")]
    assert sent == [{"template": "snapshot:snpaaaaaaaaaaaaaaaa"}] * 2


def test_snapshots_are_listed_and_deleted(server: ScriptedServer, client: Client) -> None:
    server.on("GET /v1/snapshots", {"items": [snapshot()], "next_cursor": None})
    server.on("DELETE /v1/snapshots/snpaaaaaaaaaaaaaaaa", {})
    (kept,) = client.snapshots.list(name="x", state="ready")
    assert {"name": "x", "state": "ready"}.items() <= server.seen[-1].query.items()
    client.snapshots.delete(kept)
    client.snapshots.delete(kept.id)
    assert len(server.requests("DELETE /v1/snapshots/snpaaaaaaaaaaaaaaaa")) == 2


# Limits and deadlines


def test_an_exceeded_quota_is_raised_at_once_and_says_what_and_when(server: ScriptedServer, client: Client) -> None:
    refused = error(429, "quota-exceeded", headers={"retry-after": "1"}, quota="sandboxes", limit=2)
    server.on("POST /v1/sandboxes", refused)
    with pytest.raises(LimitExceeded) as caught:
        Sandbox.create(client=client)
    assert (caught.value.code, caught.value.retry_after_s) == ("quota-exceeded", 1.0)
    assert (caught.value.details["quota"], caught.value.details["limit"]) == ("sandboxes", 2)
    assert len(server.seen) == 1


def test_a_full_host_is_tried_again_as_it_says_and_then_raised(server: ScriptedServer, client: Client) -> None:
    server.on("POST /v1/sandboxes", error(503, "host-full", headers={"retry-after": "0"}))
    with pytest.raises(HostFull) as caught:
        Sandbox.create(client=client)
    assert caught.value.retry_after_s == 0.0
    assert len(server.seen) == 4


def test_update_tells_what_is_to_end_from_what_stays(server: ScriptedServer, sbx: Sandbox) -> None:
    changed = sandbox(idle_timeout_s=60.0, on_idle="pause", wake_on_request=True)
    server.on(f"PATCH /v1/sandboxes/{ID}", changed)
    sbx.update(timeout_s=None, idle_timeout_s=60, on_idle="pause", wake_on_request=True)
    assert server.seen[-1].json == {
        "timeout_s": None,
        "idle_timeout_s": 60,
        "on_idle": "pause",
        "wake_on_request": True,
    }
    assert (sbx.info.idle_timeout_s, sbx.info.on_idle, sbx.info.wake_on_request) == (60.0, "pause", True)
    with pytest.raises(TypeError, match="template"):
        sbx.update(template="other")  # type: ignore[call-arg]


# For keepers of an installation


PROJECT = {
    "id": "prj1",
    "name": "default",
    "quota": {"sandboxes": 10, "cpus": None, "memory_mib": 4096, "disk_mib": None},
    "used": {"sandboxes": 1, "cpus": 0.5, "memory_mib": 1024, "disk_mib": 4096},
}


def test_a_projects_limits_are_looked_at_and_changed(server: ScriptedServer, client: Client) -> None:
    server.on("GET /v1/project", PROJECT)
    server.on("GET /v1/projects/prj1", PROJECT)
    server.on("PATCH /v1/projects/prj1", {**PROJECT, "quota": {"cpus": 8.0}})
    assert client.projects.own().quota == Quota(sandboxes=10, memory_mib=4096)
    assert client.projects.get("prj1").used.cpus == 0.5
    assert client.projects.limit("prj1", cpus=8, sandboxes=None).quota.cpus == 8.0
    assert server.seen[-1].json == {"quota": {"cpus": 8, "sandboxes": None}}
    with pytest.raises(TypeError, match="cpu"):
        client.projects.limit("prj1", cpu=8)


def test_a_projects_first_key_is_in_no_repr(server: ScriptedServer, client: Client) -> None:
    server.on("POST /v1/projects", {**PROJECT, "key": "sk_first"})
    made = client.projects.create("default")
    assert made.key == "sk_first"
    assert "sk_first" not in repr(made)


def test_the_pool_and_strays_are_told(server: ScriptedServer, client: Client) -> None:
    shape = {"template_digest": "sha256:00", "driver": "gvisor", "memory_mib": 1024, "warm": True, "idle": 2}
    shape |= {"filling": 1, "target": 3, "claims": 10, "restores": 2, "boots": 1}
    server.on("GET /v1/pool", {"memory_mib": 80, "memory_max_mib": 1024, "shapes": [shape]})
    pool = client.pool()
    assert (pool.memory_mib, pool.memory_max_mib, pool.shapes[0].idle, pool.shapes[0].claims) == (80, 1024, 2, 10)
    server.on("POST /v1/gc", {"strays": [{"kind": "cgroup", "name": "sbx1", "removed": False}]})
    assert [(stray.kind, stray.name, stray.removed) for stray in client.gc(dry_run=True)] == [("cgroup", "sbx1", False)]
    assert server.seen[-1].json == {"dry_run": True}


async def test_the_asynchronous_form_branches_too(server: ScriptedServer) -> None:
    server.on(FORK, {"sandboxes": forks(), "operation": operation()})
    server.on("GET /v1/snapshots", {"items": [snapshot()], "next_cursor": None})
    async with AsyncClient(server.url, "sk_test") as client:
        source = await AsyncSandbox.connect(ID, client=client)
        assert [fork.id for fork in await source.fork(2)] == FORKS
        assert [kept.kind async for kept in client.snapshots.list()] == ["full"]

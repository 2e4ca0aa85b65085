"""Requests of the SDK: what is sent, what is sent again, and where to. Against a scripted server on loopback."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from space import (
    AsyncClient,
    AsyncSandbox,
    Client,
    CommandFailed,
    Conflict,
    HostError,
    HostFull,
    NotFound,
    OutcomeUnknown,
    Sandbox,
    SandboxError,
    Unavailable,
)
from tests.scripted_server import ScriptedServer, error, operation, sandbox

ID = sandbox()["id"]
OK = {
    "exit": {"kind": "exited", "code": 0, "signal": None},
    "stdout": "out\n",
    "stderr": "err\n",
    "stdout_bytes": 4,
    "stderr_bytes": 4,
    "truncated": False,
    "encoding": "utf-8",
    "duration_s": 0.1,
}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def node() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.url, "sk_test") as client:
        yield client


@pytest.fixture
def sbx(server: ScriptedServer, node: ScriptedServer, client: Client) -> Sandbox:
    """A sandbox in use, whose data plane is ``node``."""
    server.on(f"GET /v1/sandboxes/{ID}", sandbox())
    server.on(f"POST /v1/sandboxes/{ID}/access", access(node.url))
    server.on(f"POST /v1/sandboxes/{ID}/exec", OK)
    sbx = Sandbox.connect(ID, client=client)
    sbx.run("the first")
    del server.script[f"POST /v1/sandboxes/{ID}/exec"]
    return sbx


def access(url: str, token: str = "token1", left_s: float = 3600) -> dict[str, str]:
    return {"url": url, "token": token, "expires_at": (datetime.now(UTC) + timedelta(seconds=left_s)).isoformat()}


async def broken(request: Request) -> Response:
    """Take the request and close the connection in the middle of the answer."""
    await request.body()

    async def body():
        yield b"{"
        raise ConnectionError

    return StreamingResponse(body(), headers={"content-length": "100"})


# Creating


def test_create_waits_until_the_sandbox_runs_and_the_block_deletes_it(server: ScriptedServer) -> None:
    server.on("POST /v1/sandboxes", {"sandbox": sandbox(), "operation": operation()})
    server.on(
        f"DELETE /v1/sandboxes/{ID}", {"sandbox": sandbox(state="deleted"), "operation": operation(kind="delete")}
    )
    with Sandbox.create("base", url=server.url, api_key="sk_test", metadata={"a": "b"}, cpus=2, memory_mib=512) as sbx:
        assert (sbx.id, sbx.state) == (ID, "running")
    created, deleted = server.seen
    assert created.json == {"template": "base", "metadata": {"a": "b"}, "resources": {"cpus": 2, "memory_mib": 512}}
    assert created.headers["authorization"] == "Bearer sk_test"
    assert created.headers["prefer"] == "wait=30"
    assert len(created.headers["idempotency-key"]) >= 16
    assert deleted.method == "DELETE"


@pytest.mark.parametrize("how", ["keep", "detach"])
def test_a_kept_sandbox_is_not_deleted(server: ScriptedServer, how: str) -> None:
    server.on("POST /v1/sandboxes", {"sandbox": sandbox(), "operation": operation()})
    with Sandbox.create(url=server.url, api_key="sk_test", keep=how == "keep") as sbx:
        if how == "detach":
            sbx.detach()
    assert [s.method for s in server.seen] == ["POST"]


def test_the_block_deletes_also_when_it_fails_and_a_sandbox_that_is_gone_is_fine(server: ScriptedServer) -> None:
    server.on("POST /v1/sandboxes", {"sandbox": sandbox(), "operation": operation()})
    server.on(f"DELETE /v1/sandboxes/{ID}", error(404, "not-found"))
    with pytest.raises(ZeroDivisionError), Sandbox.create(url=server.url, api_key="sk_test"):
        raise ZeroDivisionError
    assert server.seen[-1].method == "DELETE"


def test_create_goes_on_waiting_when_the_answer_came_early(server: ScriptedServer, client: Client) -> None:
    creating = sandbox(state="creating", ready=False)
    server.on("POST /v1/sandboxes", {"sandbox": creating, "operation": operation("running")})
    server.on("GET /v1/operations/opaaaaaaaaaaaaaaaa", operation("running"), operation())
    server.on(f"GET /v1/sandboxes/{ID}", sandbox(ready=False), sandbox())
    sbx = Sandbox.create(client=client)
    assert (sbx.state, sbx.info.ready) == ("running", True)
    assert float(server.requests("GET /v1/operations/opaaaaaaaaaaaaaaaa")[0].query["wait_s"]) > 1


def test_a_create_that_fails_raises_what_it_failed_with_and_leaves_nothing(
    server: ScriptedServer, client: Client
) -> None:
    failed = operation("failed", error={"code": "start-failed", "message": "it fell over"})
    server.on(
        "POST /v1/sandboxes", {"sandbox": sandbox(state="creating", ready=False), "operation": operation("pending")}
    )
    server.on("GET /v1/operations/opaaaaaaaaaaaaaaaa", failed)
    server.on(f"DELETE /v1/sandboxes/{ID}", {"sandbox": sandbox(state="deleting"), "operation": operation()})
    with pytest.raises(SandboxError, match="it fell over") as caught:
        Sandbox.create(client=client)
    assert caught.value.code == "start-failed"
    assert server.seen[-1].method == "DELETE"


def test_a_create_that_fails_while_it_is_waited_for_leaves_nothing_either(
    server: ScriptedServer, client: Client
) -> None:
    server.on("POST /v1/sandboxes", error(500, "start-failed", sandbox_id=ID))
    server.on(f"DELETE /v1/sandboxes/{ID}", {"sandbox": sandbox(state="deleting"), "operation": operation()})
    with pytest.raises(HostError):
        Sandbox.create(client=client)
    assert server.seen[-1].method == "DELETE"
    with pytest.raises(HostError):
        Sandbox.create(client=client, keep=True)
    assert server.seen[-1].method == "POST"


def test_a_sandbox_that_goes_to_rest_instead_is_not_waited_for(server: ScriptedServer, client: Client) -> None:
    server.on(f"GET /v1/sandboxes/{ID}", sandbox(state="stopped", ready=False))
    server.on("GET /v1/operations/opaaaaaaaaaaaaaaaa", operation())
    with pytest.raises(Conflict):
        Sandbox.connect(ID, client=client).wait_ready()


def test_a_lost_answer_to_create_is_asked_for_again_with_the_same_key(server: ScriptedServer, client: Client) -> None:
    """L10"""
    server.on("POST /v1/sandboxes", broken, {"sandbox": sandbox(), "operation": operation()})
    Sandbox.create(client=client)
    first, second = server.requests("POST /v1/sandboxes")
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_two_creates_have_two_keys(server: ScriptedServer, client: Client) -> None:
    server.on("POST /v1/sandboxes", {"sandbox": sandbox(), "operation": operation()})
    Sandbox.create(client=client)
    Sandbox.create(client=client)
    first, second = server.requests("POST /v1/sandboxes")
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]


def test_an_option_that_does_not_exist_is_refused_before_anything_is_sent(
    server: ScriptedServer, client: Client
) -> None:
    with pytest.raises(TypeError, match="memory_gib"):
        Sandbox.create(client=client, memory_gib=1)  # type: ignore[call-arg]
    assert server.seen == []


def test_list_goes_through_all_pages(server: ScriptedServer) -> None:
    pages = [
        {"items": [sandbox(id="sbx1"), sandbox(id="sbx2")], "next_cursor": "c1"},
        {"items": [sandbox(id="sbx3")], "next_cursor": None},
    ]
    server.on("GET /v1/sandboxes", *pages)
    found = Sandbox.list(url=server.url, api_key="sk_test", state="running", metadata={"for": "x"})
    assert [info.id for info in found] == ["sbx1", "sbx2", "sbx3"]
    first, second = server.seen
    assert (first.query["state"], first.query["metadata.for"]) == ("running", "x")
    assert second.query["cursor"] == "c1"


# Retries


def test_a_refusal_that_may_pass_is_tried_again_when_the_server_says_when(
    server: ScriptedServer, client: Client
) -> None:
    busy = error(503, "host-full", headers={"retry-after": "0"})
    server.on("POST /v1/sandboxes", busy, busy, {"sandbox": sandbox(), "operation": operation()})
    Sandbox.create(client=client)
    assert len(server.seen) == 3


def test_a_create_that_has_failed_is_not_asked_for_again_under_the_same_key(
    server: ScriptedServer, client: Client
) -> None:
    full = error(503, "host-full", headers={"retry-after": "0"}, operation_id="op1")
    server.on("POST /v1/sandboxes", full)
    with pytest.raises(HostFull):
        Sandbox.create(client=client)
    assert len(server.seen) == 1


def test_a_refusal_without_a_time_is_raised_at_once(server: ScriptedServer, client: Client) -> None:
    server.on("POST /v1/sandboxes", error(503, "host-full"))
    with pytest.raises(Exception, match="No"):
        Sandbox.create(client=client)
    assert len(server.seen) == 1


def test_tries_end(server: ScriptedServer, client: Client) -> None:
    server.on("GET /v1/sandboxes/x", error(503, "unavailable", headers={"retry-after": "0"}))
    with pytest.raises(Unavailable):
        Sandbox.connect("x", client=client)
    assert len(server.seen) == 4


def test_an_exec_whose_answer_is_lost_is_not_repeated(node: ScriptedServer, sbx: Sandbox) -> None:
    node.on(f"POST /v1/sandboxes/{ID}/exec", broken)
    with pytest.raises(OutcomeUnknown):
        sbx.run("rm everything")
    assert len(node.seen) == 1


def test_a_server_that_is_not_there_is_unavailable_and_named() -> None:
    with (
        Client("http://127.0.0.1:9", "sk_test") as client,
        pytest.raises(Unavailable, match=r"127\.0\.0\.1:9") as caught,
    ):
        Sandbox.connect("x", client=client)
    assert caught.value.code == "unreachable"


# Commands to their end


def test_run_returns_exit_and_output_and_goes_straight_to_the_node(
    server: ScriptedServer, node: ScriptedServer, sbx: Sandbox
) -> None:
    node.on(f"POST /v1/sandboxes/{ID}/exec", OK)
    result = sbx.run("echo out", cwd="/tmp", env={"A": "1"}, user="root", timeout_s=5, stdin="fed")
    assert (result.exit.code, result.stdout, result.stderr_bytes, result.ok) == (0, "out\n", b"err\n", True)
    sbx.run(["true"])
    first, second = node.seen
    assert first.json == {
        "command": "echo out",
        "cwd": "/tmp",
        "env": {"A": "1"},
        "user": "root",
        "timeout_s": 5,
        "stdin_text": "fed",
    }
    assert second.json == {"argv": ["true"]}
    assert first.headers["authorization"] == "Bearer token1"
    assert len(server.requests(f"POST /v1/sandboxes/{ID}/access")) == 1


def test_create_and_the_first_output_take_two_requests_on_one_connection(
    server: ScriptedServer, node: ScriptedServer
) -> None:
    server.on("POST /v1/sandboxes", {"sandbox": sandbox(), "operation": operation()})
    server.on(f"POST /v1/sandboxes/{ID}/exec", OK)
    server.on(f"POST /v1/sandboxes/{ID}/access", access(node.url))
    node.on(f"POST /v1/sandboxes/{ID}/exec", OK)
    with Client(server.url, "sk_test") as client:
        sbx = Sandbox.create(client=client)
        assert sbx.run("echo out").stdout == "out\n"
        assert [seen.path for seen in server.seen] == ["/v1/sandboxes", f"/v1/sandboxes/{ID}/exec"]
        sbx.run("another")
        assert len(node.seen) == 1
        assert {seen.client for seen in server.seen} == {server.seen[0].client}


def test_the_api_key_is_never_shown_to_a_node(node: ScriptedServer, sbx: Sandbox) -> None:
    node.on(f"POST /v1/sandboxes/{ID}/exec", OK)
    sbx.run("true")
    assert "sk_test" not in str(node.seen)


def test_bytes_that_are_not_text_come_back_as_they_are(node: ScriptedServer, sbx: Sandbox) -> None:
    node.on(f"POST /v1/sandboxes/{ID}/exec", {**OK, "encoding": "base64", "stdout": "/wD+", "stderr": ""})
    assert sbx.run("x").stdout_bytes == b"\xff\x00\xfe"


def test_check_raises_with_the_result_in_it(node: ScriptedServer, sbx: Sandbox) -> None:
    node.on(f"POST /v1/sandboxes/{ID}/exec", {**OK, "exit": {"kind": "exited", "code": 3, "signal": None}})
    assert sbx.run("x").exit.code == 3
    with pytest.raises(CommandFailed, match="exited with 3: err") as caught:
        sbx.run("x", check=True)
    assert caught.value.result.stdout == "out\n"


# The data plane


def test_a_token_that_is_no_longer_good_is_replaced(server: ScriptedServer, node: ScriptedServer, sbx: Sandbox) -> None:
    server.on(f"POST /v1/sandboxes/{ID}/access", access(node.url), access(node.url, "token2"))
    server.on(f"POST /v1/sandboxes/{ID}/exec", OK)
    node.on(f"POST /v1/sandboxes/{ID}/exec", error(401, "token-expired"), OK)
    sbx.run("a")
    sbx.run("b")
    assert node.seen[-1].headers["authorization"] == "Bearer token2"


def test_a_token_is_renewed_before_it_ends(server: ScriptedServer, node: ScriptedServer, sbx: Sandbox) -> None:
    server.on(f"POST /v1/sandboxes/{ID}/access", access(node.url, left_s=-5), access(node.url, "token2"))
    node.on(f"POST /v1/sandboxes/{ID}/exec", OK)
    sbx.run("a")
    assert len(server.requests(f"POST /v1/sandboxes/{ID}/access")) == 1
    sbx._plane._renew_at = 0  # The time has come.
    sbx.run("b")
    assert node.seen[-1].headers["authorization"] == "Bearer token2"


def test_a_node_that_cannot_be_reached_is_gone_round_by_the_api(server: ScriptedServer, sbx: Sandbox) -> None:
    server.on(f"POST /v1/sandboxes/{ID}/access", access("http://127.0.0.1:9"))
    server.on(f"POST /v1/sandboxes/{ID}/exec", OK)
    assert sbx.run("a").ok
    assert sbx.run("b").ok
    assert server.seen[-1].headers["authorization"] == "Bearer sk_test"
    assert len(server.requests(f"POST /v1/sandboxes/{ID}/access")) == 1


def test_a_machine_that_is_not_running_is_left_to_the_api_to_explain(
    server: ScriptedServer, node: ScriptedServer, sbx: Sandbox
) -> None:
    node.on(f"POST /v1/sandboxes/{ID}/exec", error(409, "wrong-state", state="unknown"))
    server.on(f"POST /v1/sandboxes/{ID}/exec", error(409, "wrong-state", state="paused"))
    with pytest.raises(Conflict) as caught:
        sbx.run("a")
    assert caught.value.details["state"] == "paused"


def test_a_far_apis_loopback_node_is_not_looked_for_on_this_machine(client: Client) -> None:
    from space.sdk._sync.dataplane import DataPlane
    from space.sdk._sync.transport import Transport
    from space.sdk.config import Credentials

    transport = Transport(Credentials("https://space.example", "sk_test"))
    plane = DataPlane(transport, ID)
    plane.offer(access("http://127.0.0.1:8701"))
    assert plane._endpoint() is transport.api
    plane.offer(access("https://node.example"))
    plane._avoid_until = 0
    assert plane._endpoint().url == "https://node.example"
    transport.close()


# The rest of the api


def test_lifecycle_verbs_wait_for_their_operation_and_refresh(server: ScriptedServer, sbx: Sandbox) -> None:
    server.on(
        f"POST /v1/sandboxes/{ID}/suspend", {"sandbox": sandbox(state="suspending"), "operation": operation("running")}
    )
    server.on("GET /v1/operations/opaaaaaaaaaaaaaaaa", operation("succeeded", kind="suspend"))
    server.on(f"GET /v1/sandboxes/{ID}", sandbox(state="suspended"))
    assert sbx.suspend().state == "succeeded"
    assert sbx.state == "suspended"


def test_a_verb_that_is_done_in_time_needs_one_request(server: ScriptedServer, sbx: Sandbox) -> None:
    server.on(f"POST /v1/sandboxes/{ID}/pause", {"sandbox": sandbox(state="paused"), "operation": operation()})
    asked = len(server.seen)
    sbx.pause()
    assert sbx.state == "paused"
    assert len(server.seen) == asked + 1


def test_a_verb_without_waiting_returns_at_once(server: ScriptedServer, sbx: Sandbox) -> None:
    server.on(f"POST /v1/sandboxes/{ID}/start", {"sandbox": sandbox(), "operation": operation("pending")})
    assert sbx.boot(wait_s=None).state == "pending"
    assert "prefer" not in server.seen[-1].headers


def test_an_operation_that_takes_longer_than_asked_is_an_unknown_outcome(
    server: ScriptedServer, client: Client
) -> None:
    server.on("GET /v1/operations/op1", operation("running", id="op1"))
    with pytest.raises(OutcomeUnknown) as caught:
        client.operations.wait("op1", timeout_s=0.05)
    assert caught.value.details["operation"] == "op1"


def test_a_keys_secret_is_in_the_answer_and_in_no_repr(server: ScriptedServer, client: Client) -> None:
    server.on(
        "POST /v1/keys",
        {"id": "key1", "name": "n", "role": "member", "created_at": "2026-01-02T03:04:05Z", "key": "sk_new"},
    )
    key = client.keys.create("n")
    assert key.key == "sk_new"
    assert "sk_new" not in repr(key)


def test_events_are_read_as_they_come(server: ScriptedServer, client: Client) -> None:
    data = json.dumps({"sandbox_id": ID, "state": "running"})
    stream = f": hello\n\nid: 7\nevent: sandbox\ndata: {data}\n\nid: 8\nevent: gap\ndata: {{}}\n\n"
    server.on("GET /v1/events", Response(stream, media_type="text/event-stream"))
    first, second = client.events()
    assert (first.type, first.id, first.data["state"]) == ("sandbox", "7", "running")
    assert second.type == "gap"


def test_an_unknown_sandbox_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound):
        Sandbox.connect("sbxunknown", client=client)


async def test_the_asynchronous_form_does_the_same(server: ScriptedServer) -> None:
    server.on("POST /v1/sandboxes", {"sandbox": sandbox(), "operation": operation()})
    server.on(f"DELETE /v1/sandboxes/{ID}", {"sandbox": sandbox(state="deleted"), "operation": operation()})
    server.on(f"POST /v1/sandboxes/{ID}/exec", OK)
    server.on("GET /v1/sandboxes", {"items": [sandbox()], "next_cursor": None})
    async with AsyncClient(server.url, "sk_test") as client, await AsyncSandbox.create("base", client=client) as sbx:
        assert (await sbx.run("echo out")).stdout == "out\n"
        assert [info.id async for info in AsyncSandbox.list(client=client)] == [ID]
    assert server.seen[-1].method == "DELETE"

"""Commands, exec, files and events: what the api passes on, and how streams end."""

import asyncio
import json
import resource
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import uvicorn
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from tests.control_host import Host, code, hosting, until

MIB = 1024 * 1024


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as host:
        yield host


@asynccontextmanager
async def served(host: Host) -> AsyncGenerator[httpx.AsyncClient]:
    """The same app behind a real server on loopback: for what only a connection shows."""
    config = uvicorn.Config(host.app, host="127.0.0.1", port=0, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())

    async def started() -> bool:
        return server.started

    await until(started, "the server to listen")
    port = server.servers[0].sockets[0].getsockname()[1]
    headers = {"Authorization": f"Bearer {host.key}"}
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        server.force_exit = True
        await serving


def resident_bytes() -> int:
    """Return how much memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_a_command_is_reserved_and_answers_where_to_attach(host: Host) -> None:
    sandbox = await host.create()
    answer = await host.http.post(f"/v1/sandboxes/{sandbox}/commands", json={"argv": ["true"]})
    assert answer.status_code == httpx.codes.CREATED, answer.text
    command, attach = answer.json()["command"], answer.json()["attach"]
    assert command["state"] == "created"
    assert attach["url"] == f"ws://127.0.0.1:8701/v1/commands/{command['id']}/attach"
    key = load_pem_public_key(host.control.signer.public_pem)
    claims = jwt.decode(attach["token"], key, algorithms=["EdDSA"])  # type: ignore[arg-type]
    assert (claims["sub"], claims["cmd"], claims["scope"]) == (sandbox, command["id"], "command")
    again = (await host.http.post(f"/v1/commands/{command['id']}/access")).json()
    assert again["url"] == attach["url"]


async def test_a_command_is_shown_as_the_node_sees_it_and_after_it_has_forgotten(host: Host) -> None:
    sandbox = await host.create()
    made = await host.http.post(f"/v1/sandboxes/{sandbox}/commands", json={"argv": ["true"]})
    command = made.json()["command"]["id"]
    host.node.commands[command]["state"] = "running"
    assert (await host.http.get(f"/v1/commands/{command}")).json()["state"] == "running"
    ended = {"kind": "exited", "code": 7, "signal": None}
    host.node.commands[command] |= {"state": "ended", "exit": ended}
    assert (await host.http.get(f"/v1/commands/{command}")).json()["exit"] == ended
    host.node.commands.clear()
    assert (await host.http.get(f"/v1/commands/{command}")).json()["exit"] == ended


async def test_a_command_whose_end_nobody_saw_is_lost_not_succeeded(host: Host) -> None:
    sandbox = await host.create()
    made = await host.http.post(f"/v1/sandboxes/{sandbox}/commands", json={"argv": ["true"]})
    host.node.commands.clear()
    shown = (await host.http.get(f"/v1/commands/{made.json()['command']['id']}")).json()
    assert shown["state"] == "ended"
    assert shown["exit"]["kind"] == "lost"


async def test_commands_are_listed_newest_first_in_pages(host: Host) -> None:
    sandbox, other = await host.create(), await host.create()
    path = f"/v1/sandboxes/{sandbox}/commands"
    made = [(await host.http.post(path, json={"argv": [str(n)]})).json()["command"]["id"] for n in range(5)]
    await host.http.post(f"/v1/sandboxes/{other}/commands", json={"argv": ["x"]})
    host.node.commands[made[0]]["state"] = "running"
    first = (await host.http.get(path, params={"limit": 3})).json()
    second = (await host.http.get(path, params={"limit": 3, "cursor": first["next_cursor"]})).json()
    items = first["items"] + second["items"]
    assert [item["id"] for item in items] == made[::-1]
    assert items[-1]["state"] == "running"


async def test_the_nodes_refusal_of_a_command_is_passed_on_and_leaves_nothing(host: Host) -> None:
    sandbox = await host.create()
    path = f"/v1/sandboxes/{sandbox}/commands"
    headers = {"Idempotency-Key": "k"}
    refused = await host.http.post(path, json={"argv": []}, headers=headers)
    assert refused.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert refused.json()["error"]["details"]["field"] == "argv"
    assert (await host.http.get(path)).json()["items"] == []
    assert (await host.http.post(path, json={"argv": ["true"]}, headers=headers)).is_success


async def test_one_idempotency_key_makes_one_command(host: Host) -> None:
    """L10"""
    sandbox = await host.create()
    path = f"/v1/sandboxes/{sandbox}/commands"
    headers = {"Idempotency-Key": "k"}
    answers = await asyncio.gather(*(host.http.post(path, json={"argv": ["true"]}, headers=headers) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {httpx.codes.CREATED}
    assert len({answer.json()["command"]["id"] for answer in answers}) == 1
    changed = await host.http.post(path, json={"argv": ["false"]}, headers=headers)
    assert code(changed) == "idempotency-key-reused"


async def test_commands_of_a_deleted_sandbox_are_not_found(host: Host) -> None:
    sandbox = await host.create()
    made = await host.http.post(f"/v1/sandboxes/{sandbox}/commands", json={"argv": ["true"]})
    await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})
    for path in ("", "/output"):
        answer = await host.http.get(f"/v1/commands/{made.json()['command']['id']}{path}")
        assert answer.status_code == httpx.codes.NOT_FOUND
    used = await host.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["true"]})
    assert used.status_code == httpx.codes.NOT_FOUND


async def test_exec_passes_body_and_query_on_and_no_authority(host: Host) -> None:
    sandbox = await host.create()
    raw = b'{"argv": ["true"],  "env": {"A": "\\ud83e"}}'
    headers = {"X-Space-Command": "cmdx", "Cookie": "a=b", "X-Request-Id": "mine", "Accept": "application/x-ndjson"}
    answer = await host.http.post(f"/v1/sandboxes/{sandbox}/exec?a=%2e%2e%2f&b=%ff", content=raw, headers=headers)
    assert answer.json()["stdout"] == "hello\n"
    path, seen, body = host.node.passed[-1]
    assert path == f"/v1/sandboxes/{sandbox}/exec?a=%2e%2e%2f&b=%ff"
    assert body == raw
    lowered = {name.lower(): value for name, value in seen.items()}
    assert "authorization" not in lowered
    assert "cookie" not in lowered
    assert "x-space-command" not in lowered
    assert lowered["x-request-id"] == "mine"
    assert lowered["accept"] == "application/x-ndjson"


async def test_the_nodes_error_is_passed_on_as_it_is(host: Host) -> None:
    sandbox = await host.create()
    host.node.fail("exec", "program-not-found", 422)
    answer = await host.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["x"]})
    assert answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert answer.json()["error"]["code"] == "program-not-found"


async def test_a_node_that_is_not_there_is_a_503_with_retry_after(host: Host) -> None:
    sandbox = await host.create()
    host.settings.node_socket.unlink()
    await host.control.node.close()
    answer = await host.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["true"]})
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert code(answer) == "node-unavailable"
    assert "retry-after" in answer.headers
    ready = await host.http.get("/readyz")
    assert ready.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert ready.json()["parts"]["node"] == "node-unavailable"


async def test_files_stream_both_ways_in_constant_memory(host: Host) -> None:
    """F3"""
    sandbox = await host.create()
    size = 300 * MIB

    used: list[int] = []

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(size // MIB):
            used.append(resident_bytes())
            yield b"x" * MIB

    async with served(host) as client:
        path = f"/v1/sandboxes/{sandbox}/files"
        await client.get(path, params={"path": "/x", "size": MIB})
        before = resident_bytes()
        written = await client.put(path, params={"path": "/x"}, content=chunks())
        assert written.status_code == httpx.codes.NO_CONTENT, written.text
        assert host.node.uploaded == size
        got = 0
        async with client.stream("GET", path, params={"path": "/x", "size": size}) as answer:
            assert answer.headers["content-length"] == str(size)
            async for chunk in answer.aiter_raw():
                got += len(chunk)
                used.append(resident_bytes())
        assert got == size
        # Client, api and node share this process; a body held in memory anywhere would show.
        assert max(used) - before < 60 * MIB


async def test_what_a_guest_serves_cannot_become_a_page_of_the_api(host: Host) -> None:
    sandbox = await host.create()
    answer = await host.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "/x"})
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"


async def test_a_refusal_before_the_upload_was_read_reaches_the_caller(host: Host) -> None:
    sandbox = await host.create()
    host.node.fail("write", "permission-denied", 403)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * MIB

    async with served(host) as client:
        answer = await client.put(f"/v1/sandboxes/{sandbox}/files", params={"path": "/etc/x"}, content=chunks())
        assert answer.status_code == httpx.codes.FORBIDDEN, answer.text
        assert answer.json()["error"]["code"] == "permission-denied"


async def test_an_exec_whose_caller_went_away_is_given_up(host: Host) -> None:
    sandbox = await host.create()
    host.node.hold("exec")
    async with served(host) as client:
        asking = asyncio.create_task(client.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["sleep", "9"]}))

        async def asked() -> bool:
            return bool(host.node.passed)

        await until(asked, "the node to be asked")
        asking.cancel()

        async def given_up() -> bool:
            return host.node.gone_clients == 1

        await until(given_up, "the node to see that nobody waits any more")


async def test_a_download_whose_caller_went_away_is_given_up(host: Host) -> None:
    sandbox = await host.create()
    async with served(host) as client:
        async with client.stream(
            "GET", f"/v1/sandboxes/{sandbox}/files", params={"path": "/x", "size": 1 << 34}
        ) as answer:
            assert answer.is_success
            await anext(answer.aiter_raw())

        async def given_up() -> bool:
            return host.node.gone_clients == 1

        await until(given_up, "the node to see that nobody reads any more")


async def events(client: httpx.AsyncClient, **headers: str) -> AsyncGenerator[dict[str, Any]]:
    async with client.stream("GET", "/v1/events", headers=headers) as answer:
        assert answer.status_code == httpx.codes.OK
        assert answer.headers["content-type"] == "text/event-stream"
        found: dict[str, Any] = {}
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if name in {"id", "event", "data"}:
                found[name] = json.loads(value) if name == "data" else value
            elif not line and found:
                yield found
                found = {}
            elif line.startswith(":"):
                yield {"event": "comment"}


async def test_events_tell_every_state_change_and_resume_behind_the_last_one_seen(host: Host) -> None:
    async with served(host) as client, await host.other() as other:
        stream = events(client)
        assert await anext(stream) == {"event": "comment"}
        await other.post("/v1/sandboxes", json={"template": "base"}, headers={"Prefer": "wait=20"})
        sandbox = await host.create()
        await host.verb(sandbox, "pause")
        seen = [await anext(stream) for _ in range(4)]
        await stream.aclose()
        assert [(e["event"], e["data"]["state"], e["data"]["sandbox_id"]) for e in seen] == [
            ("sandbox", state, sandbox) for state in ("creating", "running", "pausing", "paused")
        ]
        assert seen[1]["data"]["ready"] is True
        await host.verb(sandbox, "resume")
        resumed = events(client, **{"Last-Event-ID": seen[1]["id"]})
        states = [(await anext(resumed)).get("data", {}).get("state") for _ in range(5)]
        assert states == [None, "pausing", "paused", "resuming", "running"]
        await resumed.aclose()


async def test_events_that_are_too_old_to_resume_behind_are_a_gap(host: Host) -> None:
    from space.control.reaper import sweep

    await host.create()
    host.clock.move(25 * 3600)
    await sweep(host.control)
    sandbox = await host.create()
    async with served(host) as client:
        stream = events(client, **{"Last-Event-ID": "1"})
        first, second = await anext(stream), await anext(stream)
        await stream.aclose()
    assert first["event"] == "gap"
    assert second["data"]["sandbox_id"] == sandbox


@pytest.mark.parametrize("last", ["x", "-1", "1" * 40])
async def test_a_bad_last_event_id_is_named(host: Host, last: str) -> None:
    answer = await host.http.get("/v1/events", headers={"Last-Event-ID": last})
    assert answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert answer.json()["error"]["details"]["field"] == "last-event-id"

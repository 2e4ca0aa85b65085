"""The broker's client: answers by number, errors by code, and a broker that dies in between."""

import asyncio
import json

import pytest

from space import error_wire
from space.errors import Conflict, HostError, HostFull, OutcomeUnknown, Unavailable
from space.node.broker import BrokerClient


class ScriptedBroker:
    """Answers each request with what ``script`` returns for it; None drops the connection."""

    def __init__(self, path, script):
        self.path, self.script, self.requests = path, script, []
        self.server = None

    async def __aenter__(self):
        self.server = await asyncio.start_unix_server(self.serve, self.path)
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def serve(self, reader, writer):
        while line := await reader.readline():
            request = json.loads(line)
            self.requests.append(request)
            answer = self.script(request)
            if answer is None:
                break
            writer.write(json.dumps({"id": request["id"], **answer}).encode() + b"\n")
        writer.close()


async def test_requests_are_answered_by_number(tmp_path):
    path = tmp_path / "b.sock"
    client = BrokerClient(path)
    async with ScriptedBroker(path, lambda r: {"ok": {"machine": r["machine"]}}) as broker:
        answers = await asyncio.gather(*(client.call("inspect", timeout_s=5, machine=str(n)) for n in range(20)))
        assert [a["machine"] for a in answers] == [str(n) for n in range(20)]
        assert broker.requests[0]["verb"] == "inspect"
        await client.close()


@pytest.mark.parametrize(("code", "cls"), [("conflict", Conflict), ("host-full", HostFull), ("disk-broken", HostError)])
async def test_errors_keep_code_message_and_details(tmp_path, code, cls):
    path = tmp_path / "b.sock"
    client = BrokerClient(path)
    wire = {"code": code, "message": "No.", "details": {"state": "paused", "code": "x"}}
    async with ScriptedBroker(path, lambda _: {"error": wire}):
        with pytest.raises(cls) as caught:
            await client.call("pause", timeout_s=5, machine="m")
        assert (caught.value.code, caught.value.message) == (code, "No.")
        assert caught.value.details == {"state": "paused"}
        await client.close()


@pytest.mark.parametrize("cls", [HostFull, Unavailable, Conflict])
async def test_errors_keep_their_class_under_any_code(tmp_path, cls):
    client = BrokerClient(tmp_path / "b.sock")
    wire = error_wire.render(cls("No.", code="something-new"))
    async with ScriptedBroker(tmp_path / "b.sock", lambda _: {"error": wire}):
        with pytest.raises(cls) as caught:
            await client.call("pause", timeout_s=5, machine="m")
        assert caught.value.code == "something-new"
        await client.close()


async def test_a_verb_is_sent_again_when_the_broker_dies_before_answering(tmp_path):
    path = tmp_path / "b.sock"
    client = BrokerClient(path)
    seen = []

    def script(request):
        seen.append(request)
        return {"ok": {"done": True}} if len(seen) > 2 else None

    async with ScriptedBroker(path, script):
        assert await client.call("suspend", timeout_s=10, machine="m") == {"done": True}
    assert [r["verb"] for r in seen] == ["suspend"] * 3
    await client.close()


async def test_no_broker_is_unavailable_and_a_silent_one_an_unknown_outcome(tmp_path):
    client = BrokerClient(tmp_path / "b.sock")
    with pytest.raises(Unavailable):
        await client.call("machines", timeout_s=0.3)

    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(silent, tmp_path / "b.sock")
    with pytest.raises(OutcomeUnknown):
        await client.call("boot", timeout_s=0.3, machine="m")
    await client.close()
    server.close()

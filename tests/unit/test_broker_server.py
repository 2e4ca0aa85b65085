"""The broker's socket: lines in, lines out, in any order, and nothing that a peer sends takes it down."""

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from space.broker import server
from space.broker.server import Broker
from space.errors import Conflict, InvalidRequest, NotFound, Unavailable
from space.model.ids import new_id
from space.testing import FakeDriver
from tests.brokers import DIGEST, RESOURCES, Site, serving, settings_in


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    settings = settings_in(tmp_path / "data", tmp_path / "run")
    async with serving(settings, {"fake": FakeDriver(tmp_path / "fake")}) as (one, _):
        yield one
        for machine in await one.call("machines"):
            await one.call("destroy", machine=machine["machine"])


class Wire:
    """The socket as bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, site: Site) -> "Wire":
        return cls(*await asyncio.open_unix_connection(site.settings.broker_socket))

    async def say(self, line: bytes) -> dict[str, Any]:
        self.writer.write(line + b"\n")
        return await self.hear()

    async def hear(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            return json.loads(await self.reader.readline())


async def test_a_machine_goes_through_its_whole_life(site: Site) -> None:
    machine = await site.boot()
    life = [
        *(("pause", "paused"), ("resume", "running"), ("suspend", "suspended"), ("wake", "running")),
        *(
            ("stop", "stopped"),
            ("start", "running"),
            ("pause", "paused"),
            ("suspend", "suspended"),
            ("destroy", "absent"),
        ),
    ]
    for verb, state in life:
        await site.call(verb, machine=machine)
        assert await site.state(machine) == state, verb


async def test_a_request_is_answered_under_its_number(site: Site) -> None:
    wire = await Wire.to(site)
    answer = await wire.say(b'{"id": 42, "verb": "machines"}')
    assert answer == {"id": 42, "ok": []}


async def test_a_slow_request_does_not_hold_up_others(site: Site) -> None:
    wire = await Wire.to(site)
    boot = {
        "id": 1,
        "verb": "boot",
        "machine": new_id("sbx"),
        "template": DIGEST,
        "driver": "fake",
        "resources": RESOURCES,
    }
    wire.writer.write(json.dumps({**boot, "hostname": "h"}).encode() + b"\n" + b'{"id": 2, "verb": "templates"}\n')
    assert [(await wire.hear())["id"] for _ in range(2)] == [2, 1]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"id": 1}',
        b'{"id": 1, "verb": "machines", "x": 1}',
        b"\xff\xfe\x00",
        b"[" * 30000,
        b'"' + b"a" * 60000 + b'"',
    ],
)
async def test_a_line_that_is_no_request_is_answered_and_the_next_one_carried_out(site: Site, line: bytes) -> None:
    wire = await Wire.to(site)
    assert (await wire.say(line))["error"]["code"] == "invalid-request"
    assert (await wire.say(b'{"id": 2, "verb": "machines"}')) == {"id": 2, "ok": []}


async def test_a_line_over_64_kib_ends_the_connection_and_no_other(site: Site) -> None:
    wire, other = await Wire.to(site), await Wire.to(site)
    wire.writer.write(b'{"id": 1, "verb": "' + b"a" * 70000 + b'"}\n')
    async with asyncio.timeout(10):
        assert await wire.reader.read() == b""
    assert (await other.say(b'{"id": 2, "verb": "machines"}')) == {"id": 2, "ok": []}


async def test_a_last_line_without_its_end_is_not_carried_out(site: Site) -> None:
    machine = await site.boot()
    wire = await Wire.to(site)
    wire.writer.write(f'{{"id": 1, "verb": "destroy", "machine": "{machine}"}}'.encode())
    wire.writer.write_eof()
    async with asyncio.timeout(10):
        assert await wire.reader.read() == b""
    assert await site.state(machine) == "running"


async def test_more_requests_at_once_than_are_taken_wait_their_turn(site: Site) -> None:
    wire = await Wire.to(site)
    count = server.REQUESTS_MAX * 4
    wire.writer.write(b"".join(b'{"id": %d, "verb": "machines"}\n' % number for number in range(count)))
    assert {(await wire.hear())["id"] for _ in range(count)} == set(range(count))


async def test_connections_over_the_limit_are_closed_at_once(site: Site) -> None:
    wires = [await Wire.to(site) for _ in range(server.CONNECTIONS_MAX)]
    for number, wire in enumerate(wires):
        assert (await wire.say(b'{"id": %d, "verb": "machines"}' % number))["id"] == number
    over = await Wire.to(site)
    async with asyncio.timeout(10):
        assert await over.reader.read() == b""
    for wire in wires:
        wire.writer.close()


async def test_a_request_is_carried_out_although_its_connection_is_lost(site: Site) -> None:
    """The node is killed after asking: asked again, the work is done."""
    machine = new_id("sbx")
    wire = await Wire.to(site)
    boot = {"id": 1, "verb": "boot", "machine": machine, "template": DIGEST, "driver": "fake", "resources": RESOURCES}
    wire.writer.write(json.dumps({**boot, "hostname": "h"}).encode() + b"\n")
    await wire.writer.drain()
    wire.writer.transport.abort()
    await site.until(machine, "running")
    await site.boot(machine)


async def test_twenty_verbs_at_once_on_one_machine_take_turns(site: Site) -> None:
    """L7 at the level of the broker: each succeeds or is refused with the state, and the last word is consistent."""
    machine = await site.boot()
    verbs = ["pause", "resume", "suspend", "wake", "stop", "start"] * 3 + ["destroy", "destroy"]
    answers = await asyncio.gather(*(site.call(verb, machine=machine) for verb in verbs), return_exceptions=True)
    for answer in answers:
        assert isinstance(answer, dict | Conflict | NotFound), answer
    assert await site.state(machine) == "absent"


async def test_verbs_in_the_wrong_state_are_refused_with_the_state(site: Site) -> None:
    machine = await site.boot()
    await site.call("suspend", machine=machine)
    for verb in ("pause", "resume", "stop"):
        with pytest.raises(Conflict) as caught:
            await site.call(verb, machine=machine)
        assert caught.value.details["state"] == "suspended"
    await site.call("wake", machine=machine)
    await site.call("pause", machine=machine)
    for verb in ("wake", "start"):
        with pytest.raises(Conflict) as caught:
            await site.call(verb, machine=machine)
        assert caught.value.details["state"] == "paused"


async def test_verbs_asked_again_find_their_work_done(site: Site) -> None:
    """L3: also wake of a running machine, destroy of an unknown one."""
    machine = await site.boot()
    await site.boot(machine)
    await site.call("wake", machine=machine)
    for verb in ("pause", "resume", "suspend", "wake", "stop", "start", "destroy"):
        for _ in range(2):
            await site.call(verb, machine=machine)
    await site.call("destroy", machine=new_id("sbx"))


@pytest.mark.parametrize("verb", ["pause", "resume", "suspend", "wake", "stop", "start"])
async def test_verbs_on_an_unknown_machine_say_so(site: Site, verb: str) -> None:
    with pytest.raises(NotFound):
        await site.call(verb, machine=new_id("sbx"))


async def test_a_machine_cannot_be_booted_as_another(site: Site) -> None:
    machine = await site.boot()
    site.template = "sha256:" + "1" * 64
    with pytest.raises(Conflict):
        await site.boot(machine)


async def test_limits_of_the_installation_are_enforced_here_too(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "data", tmp_path / "run", sandboxes_max=1, memory_mib_max=512)
    async with serving(settings, {"fake": FakeDriver(tmp_path / "fake")}) as (site, _):
        with pytest.raises(InvalidRequest) as caught:
            await site.boot(memory_mib=513)
        assert caught.value.details["field"] == "memory_mib"
        machine = await site.boot(memory_mib=512)
        with pytest.raises(Exception, match="as many sandboxes") as full:
            await site.boot()
        assert getattr(full.value, "code", None) == "host-full"
        await site.call("destroy", machine=machine)


async def test_an_unknown_driver_is_named(site: Site) -> None:
    site.driver = "qemu"
    with pytest.raises(InvalidRequest) as caught:
        await site.boot()
    assert caught.value.details["field"] == "driver"


async def test_answers_name_no_path_of_the_host(site: Site, tmp_path: Path) -> None:
    machine = await site.boot()
    said = [await site.call("inspect", machine=machine), await site.call("machines")]
    site.driver = "none"
    for verb in ("wake", "start", "pause"):
        try:
            await site.call(verb, machine=new_id("sbx"))
        except NotFound as error:
            said.append([error.message, error.details])
    assert str(tmp_path) not in json.dumps(said)
    assert str(site.settings.run_dir) not in json.dumps(said)


async def test_only_one_broker_serves_a_data_directory(site: Site, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="Another broker"):
        async with Broker(site.settings, {"fake": FakeDriver(tmp_path / "fake")}).serving():
            pass
    assert await site.call("machines") == []


async def test_the_socket_is_for_root_and_the_nodes_group(site: Site) -> None:
    mode = site.settings.broker_socket.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o660
    assert site.settings.broker_socket.stat().st_uid == os.geteuid()

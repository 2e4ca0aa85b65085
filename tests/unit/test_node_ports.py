"""What bounds connections to ports whatever a guest does, and what of a request's head passes."""

import asyncio
from typing import Any

import pytest

from space.errors import GuestError, LimitExceeded, RequestError, SandboxError
from space.node.guests import Guest
from space.node.ports import admission, guest_tunnel, heads
from space.node.ports.guest_tunnel import GuestTunnel, Tunnels
from space.node.ports.target import Target
from space.protocol.frames import OFFSET, FrameType
from space.protocol.streams import PORT_WINDOW_BYTES
from tests.unit.test_node_guests import PATIENCE_S, ScriptedGuest, frame, message

SANDBOX = "sbx" + "a" * 16
CHUNK = 64 * 1024


class Nobody:
    def on_welcome(self, guest: Guest, welcome: Any) -> None:
        """Nothing has to be resumed."""

    def on_exit(self, guest: Guest, fields: dict[str, Any]) -> None:
        """There are no commands."""

    def on_lost(self, guest: Guest, cause: str) -> None:
        """The tests see it by their connections."""


@pytest.fixture
async def pair(tmp_path):
    script = ScriptedGuest(tmp_path / "channel")
    guest = Guest(SANDBOX, script.directory, Nobody())
    greeting = asyncio.ensure_future(guest.greet())
    await asyncio.sleep(0)
    await script.welcome()
    await greeting
    yield guest, script
    guest.close(SandboxError())
    script.close()


async def connected(tunnels: Tunnels, guest: Guest, script: ScriptedGuest, port: int = 80) -> GuestTunnel:
    dialling = asyncio.ensure_future(tunnels.dial(guest, port))
    await asyncio.sleep(0)
    number, asked = await script.request()
    assert asked["op"] == "connect"
    await script.write(message(FrameType.REPLY, number, ok={}))
    async with asyncio.timeout(PATIENCE_S):
        return await dialling


async def test_more_than_its_window_ends_a_connection_and_no_other(pair) -> None:
    guest, script = pair
    tunnels = Tunnels()
    greedy, other = await connected(tunnels, guest, script), await connected(tunnels, guest, script)
    for _ in range(PORT_WINDOW_BYTES // CHUNK + 1):
        await script.write(frame(FrameType.DATA, greedy.number, bytes(CHUNK)))
    await script.write(frame(FrameType.DATA, other.number, b"fine"))
    async with asyncio.timeout(PATIENCE_S):
        assert await other.read() == b"fine"
        with pytest.raises(LimitExceeded):
            await greedy.read()
    assert tunnels.held_bytes == 0


async def test_what_all_of_them_hold_is_bounded(pair, monkeypatch) -> None:
    guest, script = pair
    monkeypatch.setattr(guest_tunnel, "HELD_BYTES_MAX", 4 * CHUNK)
    tunnels = Tunnels()
    opened = [await connected(tunnels, guest, script) for _ in range(4)]
    for tunnel in opened:
        for _ in range(2):
            await script.write(frame(FrameType.DATA, tunnel.number, bytes(CHUNK)))
    # The channel is in order: what comes last has been told after all the rest.
    last = await connected(tunnels, guest, script)
    assert tunnels.held_bytes <= 5 * CHUNK
    for tunnel in (*opened, last):
        await tunnel.close()
    assert tunnels.held_bytes == 0
    assert not tunnels.open


async def test_nothing_is_sent_beyond_the_window_that_the_guest_has_taken(pair) -> None:
    guest, script = pair
    tunnel = await connected(Tunnels(), guest, script)
    writing = asyncio.ensure_future(tunnel.write(bytes(PORT_WINDOW_BYTES + 1)))
    got = 0
    while got < PORT_WINDOW_BYTES:
        got += len((await script.next(FrameType.DATA))[1])
    assert not writing.done()
    await script.write(frame(FrameType.ACK, tunnel.number, OFFSET.pack(got)))
    assert len((await script.next(FrameType.DATA))[1]) == 1
    async with asyncio.timeout(PATIENCE_S):
        await writing
    await tunnel.close()
    assert (await script.next(FrameType.RESET))[0] == tunnel.number


async def test_when_much_is_under_way_each_connection_sends_little(pair, monkeypatch) -> None:
    guest, script = pair
    monkeypatch.setattr(guest_tunnel, "HELD_BYTES_MAX", CHUNK)
    tunnels = Tunnels()
    opened = [await connected(tunnels, guest, script) for _ in range(3)]
    await opened[0].write(bytes(CHUNK))
    writing = [asyncio.ensure_future(tunnel.write(bytes(CHUNK))) for tunnel in opened[1:]]
    little = guest_tunnel.HELD_EACH_BYTES
    await asyncio.sleep(0)
    assert tunnels.sent_bytes == CHUNK + 2 * little
    for tunnel, sent in zip(opened, (CHUNK, little, little), strict=True):
        await script.write(frame(FrameType.ACK, tunnel.number, OFFSET.pack(sent)))
        got = 0
        while got < sent:
            got += len((await script.next(FrameType.DATA))[1])
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*writing)
    for tunnel in opened:
        await tunnel.close()
    assert tunnels.sent_bytes == 0


async def test_a_sandbox_has_so_many_connections_and_no_more(pair, monkeypatch) -> None:
    guest, script = pair
    monkeypatch.setattr(guest_tunnel, "CONNECTIONS_MAX", 2)
    tunnels = Tunnels()
    opened = [await connected(tunnels, guest, script) for _ in range(2)]
    with pytest.raises(LimitExceeded) as refused:
        await tunnels.dial(guest, 80)
    assert refused.value.code == "too-many-connections"
    await opened[0].close()
    await connected(tunnels, guest, script)


async def test_a_guest_that_knows_no_ports_is_told_apart(pair) -> None:
    guest, script = pair
    dialling = asyncio.ensure_future(Tunnels().dial(guest, 80))
    number, _ = await script.request()
    await script.write(message(FrameType.REPLY, number, error={"code": "invalid-request", "message": "op: unknown"}))
    with pytest.raises(GuestError) as refused:
        await dialling
    assert refused.value.code == "agent-too-old"


# --- heads


async def nowhere() -> Any:
    raise AssertionError


def target(**changes: Any) -> Target:
    return Target(dial=nowhere, port=8000, **changes)


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"headers": [(b"host", b"a.example"), *headers], "client": ("203.0.113.7", 1), "scheme": "http"}


@pytest.mark.parametrize("name", [b"host", b"content-length", b"cookie", b"authorization"])
def test_naming_a_header_in_connection_does_not_hide_what_matters(name) -> None:
    sent = heads.for_server(scope((b"connection", name), (name, b"1")), target())
    assert name in {found for found, _ in sent}


def test_one_request_has_one_length() -> None:
    for given in (
        [(b"content-length", b"1"), (b"content-length", b"1")],
        [(b"content-length", b"1"), (b"transfer-encoding", b"chunked")],
    ):
        with pytest.raises(RequestError) as refused:
            heads.for_server(scope(*given), target())
        assert refused.value.code == "ambiguous-length"


def test_what_a_server_says_of_other_hosts_does_not_pass() -> None:
    given = [
        (b"alt-svc", b'h3="evil.example:443"'),
        (b"set-cookie", b"a=1; DOMAIN=.example; Path=/"),
        (b"set-cookie", b"space_preview=x"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"5"),
        (b"x-space-anything", b"1"),
        (b"connection", b"x-own"),
        (b"x-own", b"1"),
    ]
    own = target(drop_cookies=frozenset({admission.COOKIE}))
    assert heads.for_client(200, given, own) == [(b"set-cookie", b"a=1; Path=/")]
    shared = dict(heads.for_client(200, [*given, (b"clear-site-data", b'"*"')], target(cookies=False)))
    assert set(shared) == {b"content-security-policy"}


@pytest.mark.parametrize(
    ("path", "query", "place"),
    [
        (b"/", b"", b"/"),
        (b"//evil.example/x", b"a=1", b"/evil.example/x?a=1"),
        (b"/\\evil.example", b"", b"/evil.example"),
        (b"/a%0d%0ab", b"", b"/a%0d%0ab"),
    ],
)
def test_a_visitor_is_sent_on_to_the_same_host(path, query, place) -> None:
    found = admission.location({"raw_path": path}, query)
    assert found == place
    assert not found.startswith((b"//", b"/\\"))


@pytest.mark.parametrize(
    ("host", "found"),
    [
        (f"8000-{SANDBOX}.sandboxes.localhost:8701", (SANDBOX, 8000)),
        (f"8000-{SANDBOX}.SANDBOXES.localhost", (SANDBOX, 8000)),
        (f"8000-{SANDBOX}.sandboxes.localhost.", (SANDBOX, 8000)),
        (f"8000-{SANDBOX}.sandboxes.localhost.evil.example", None),
        (f"8000-{SANDBOX}.localhost", None),
        (f"x8000-{SANDBOX}.sandboxes.localhost", None),
        (f"800000-{SANDBOX}.sandboxes.localhost", None),
        ("sandboxes.localhost", None),
    ],
)
def test_only_the_own_host_of_a_port_is_one(host, found) -> None:
    assert admission.preview_of({"headers": [(b"host", host.encode())]}, "sandboxes.localhost:8701") == found

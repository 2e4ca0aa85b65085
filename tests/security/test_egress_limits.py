"""Limits: whatever one sandbox sends, leaves open or does not read costs the gateway little, and the others nothing."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import dns.message
import pytest

from space.broker.firewall import CONNECTIONS_MAX
from space.egress import dns as egress_dns
from tests.egress_host import GatewayHost, Place, until
from tests.guest import Closed, request
from tests.upstreams import Outside

MEMORY_MIB = 48
OTHERS_S = 1.0
"""How long a sandbox may wait while another one floods; this is not the measurement of it, see `make bench`."""


@pytest.fixture
def hostile(gateway: GatewayHost, outside: Outside) -> Iterator[Place]:
    """A sandbox with a link of its own, which the test may spoil."""
    place = gateway.place()
    place.attach({"rules": [{"hosts": ["good.example", "*.wild.example"]}]})
    yield place
    gateway.leave(place.sandbox)
    until(lambda: "space_egress_connections 0.0" in gateway.call("GET", "/metrics").text)


@pytest.fixture
def small(gateway: GatewayHost) -> Iterator[None]:
    """See to it that the gateway needs little more memory afterwards."""
    before = gateway.memory_mib()
    yield
    assert gateway.memory_mib() - before < MEMORY_MIB


def is_well(guest: Place) -> None:
    """See to it that another sandbox is served as ever."""
    began = time.monotonic()
    guest.reaches()
    assert time.monotonic() - began < OTHERS_S


@contextlib.contextmanager
def many(place: Place, count: int, data: bytes = b"", port: int = 80) -> Iterator[list[socket.socket]]:
    """Hold connections open on which these bytes were sent."""
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            sock = place.tcp(port)
            held.append(sock)
            if data:
                sock.sendall(data)
        yield held
    finally:
        for sock in held:
            sock.close()


# --- one request


@pytest.mark.parametrize(
    "head",
    [
        b"X: " + b"a" * 600_000,
        b"X: y\r\n" * 100_000,
        b"X" * 600_000 + b": y",
        b"Cookie: " + b"a=b; " * 120_000,
    ],
    ids=["value", "many", "name", "cookie"],
)
@pytest.mark.usefixtures("small")
def test_a_giant_head_is_refused(guest: Place, outside: Outside, head: bytes) -> None:
    with guest.http() as talk:
        assert talk.ask(b"GET / HTTP/1.1\r\nHost: good.example\r\n" + head + b"\r\n\r\n").status == 400
        assert talk.is_closed()
    assert outside.seen() == []
    guest.reaches()


@pytest.mark.usefixtures("small")
def test_a_giant_target_is_refused(guest: Place, outside: Outside) -> None:
    with guest.http() as talk:
        assert talk.get("good.example", "/" + "a" * 20_000).refusal == (400, "bad-target")
    with guest.http() as talk:
        assert talk.get("good.example", "/" + "a" * 600_000).status == 400
    assert outside.seen() == []
    assert all(len(record["path"] or "") <= 2048 for record in guest.egress())


@pytest.mark.usefixtures("small")
def test_a_head_without_end_is_not_collected(guest: Place, outside: Outside) -> None:
    with guest.http() as talk, contextlib.suppress(ConnectionError):
        talk.send(b"GET / HTTP/1.1\r\nHost: good.example\r\n")
        for _ in range(2000):
            talk.send(b"X: " + b"a" * 16_000 + b"\r\n")
    assert outside.seen() == []
    is_well(guest)


@pytest.mark.usefixtures("small")
def test_a_body_without_end_passes_through_in_memory_that_does_not_grow(guest: Place) -> None:
    """N12"""
    part = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    with guest.https("good.example") as talk:
        talk.send(b"POST /sink HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(800):
            talk.send(part)
        talk.send(b"0\r\n\r\n")
        assert talk.answer("POST").body == str(800 * 0x10000).encode()


@pytest.mark.usefixtures("small")
def test_an_answer_without_end_passes_through_in_memory_that_does_not_grow(guest: Place) -> None:
    """N12"""
    with guest.https("good.example") as talk:
        talk.send(request("good.example", "/bytes?n=60000000"))
        left = 60_000_000
        while left > 0:
            piece = talk.sock.recv(1 << 18)
            assert piece, f"cut off {left} bytes before the end"
            left -= len(piece)


@pytest.mark.usefixtures("small")
def test_a_body_for_a_request_that_is_refused_is_not_collected(guest: Place, outside: Outside) -> None:
    with guest.http() as talk:
        talk.send(b"POST / HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 1000000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                talk.send(bytes(1 << 16))
        with contextlib.suppress(Closed):
            assert talk.answer("POST").refusal == (403, "default-deny")
    assert outside.seen() == []


def test_the_first_byte_of_a_stream_comes_when_the_server_sends_it(guest: Place) -> None:
    """N12: events, of which each tells when it was sent."""
    with guest.https("good.example") as talk:
        talk.send(request("good.example", "/events?n=1"))
        data = b""
        while b"data: " not in data:
            data += talk.sock.recv(4096)
        sent = float(data.partition(b"data: ")[2].split()[0])
        assert time.time() - sent < 0.4, "before the stream ends, half a second after it"


# --- many connections


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"G",
        b"GET / HTTP/1.1\r\nHost: good.example\r\nX: ",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST /sink HTTP/1.1\r\nHost: good.example\r\nContent-Length: 100\r\n\r\nabc",
        b"GET /bytes?n=3000000 HTTP/1.1\r\nHost: good.example\r\n\r\n",
    ],
    ids=["silent", "one-byte", "half-a-head", "half-a-hello", "half-a-body", "unread-answer"],
)
@pytest.mark.usefixtures("small")
def test_connections_on_which_nothing_goes_on_cost_little_and_the_others_nothing(
    hostile: Place, guest: Place, data: bytes
) -> None:
    """Slow clients: 40 of them, and what each may hold."""
    with many(hostile, 40, data):
        is_well(guest)


def test_a_sandbox_has_so_many_connections_and_the_others_have_theirs(hostile: Place, guest: Place) -> None:
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(many(hostile, 0))
        with contextlib.suppress(Closed):
            while len(held) <= CONNECTIONS_MAX:
                held.append(hostile.tcp(80))
        assert CONNECTIONS_MAX // 2 < len(held) <= CONNECTIONS_MAX
        is_well(guest)
    until(lambda: _reaches(hostile))


def _reaches(place: Place) -> bool:
    with contextlib.suppress(Closed):
        place.reaches()
        return True
    return False


@pytest.mark.usefixtures("small")
def test_connections_opened_and_dropped_in_rapid_succession_cost_the_others_nothing(
    hostile: Place, guest: Place
) -> None:
    for _ in range(400):
        with contextlib.suppress(Closed):
            hostile.tcp(443).close()
    is_well(guest)


def test_a_plain_connection_that_asks_many_servers_keeps_few_connections_to_them(
    hostile: Place, guest: Place, outside: Outside
) -> None:
    descriptors = Path(f"/proc/{hostile.host.pid}/fd")
    before = len(list(descriptors.iterdir()))
    with hostile.http() as talk:
        for number in range(60):
            assert talk.get(f"n{number}.wild.example").status == 200
        assert len(list(descriptors.iterdir())) - before < 20
    assert len(outside.seen("http")) == 60


def test_many_questions_are_answered_up_to_a_point_and_those_of_others_always(hostile: Place, guest: Place) -> None:
    question = dns.message.make_query("good.example", "A").to_wire()
    answered = 0
    with hostile.socket(kind=socket.SOCK_DGRAM) as sock:
        sock.connect((str(hostile.link.host_v4), 53))
        sock.setblocking(False)  # noqa: FBT003 - of socket
        for _ in range(int(egress_dns.BURST) * 3):
            with contextlib.suppress(OSError):
                sock.send(question)
            answered += _taken(sock)
        until(lambda: guest.ask_name("good.example", wait_s=1))  # at the second attempt, if one came in its midst
        while select.select([sock], [], [], 0.05)[0]:
            answered += _taken(sock)
    assert 0 < answered < egress_dns.BURST * 2


def _taken(sock: socket.socket) -> int:
    count = 0
    with contextlib.suppress(OSError):
        while sock.recv(4096):
            count += 1
    return count


def test_many_names_refused_are_recorded_and_do_not_hold_up_the_others(hostile: Place, guest: Place) -> None:
    for number in range(200):
        hostile.ask_name(f"{number}.evil.example")
    is_well(guest)
    assert len(hostile.egress()) == 200


def test_many_refused_requests_do_not_hold_up_the_others(hostile: Place, guest: Place, outside: Outside) -> None:
    with hostile.http() as talk:
        talk.send(request("evil.example") * 300)
        is_well(guest)
        assert [talk.answer().status for _ in range(300)] == [403] * 300
    assert {dict(row["headers"])["host"] for row in outside.seen("http")} == {"good.example"}


def test_a_name_server_that_does_not_answer_holds_up_nobody_else(hostile: Place, guest: Place) -> None:
    hostile.attach({"rules": [{"hosts": ["*.mute.example", "good.example"]}]})
    with contextlib.ExitStack() as stack:
        for number in range(20):
            talk = stack.enter_context(hostile.http())
            talk.send(request(f"a{number}.mute.example"))
        is_well(guest)
        is_well(hostile)


def test_requests_that_wait_for_a_server_hold_up_nobody_else(hostile: Place, guest: Place) -> None:
    with many(hostile, 40, request("good.example", "/silent")) as held:
        is_well(guest)
        is_well(hostile)
        assert not select.select(held, [], [], 0)[0]


def test_a_connection_that_ends_within_its_request_leaves_nothing_behind(hostile: Place, guest: Place) -> None:
    descriptors = Path(f"/proc/{hostile.host.pid}/fd")
    is_well(hostile)
    before = len(list(descriptors.iterdir()))
    for data in (
        b"G",
        request("good.example", "/silent"),
        b"\x16\x03\x01\x02",
        request("good.example", "/bytes?n=9000000"),
    ):
        for _ in range(10):
            sock = hostile.tcp(80)
            sock.sendall(data)
            sock.close()
    until(lambda: len(list(descriptors.iterdir())) <= before + 2, lambda: opened(descriptors))
    is_well(guest)


def opened(descriptors: Path) -> str:
    """What there is, for whoever looks for what was left."""
    held = subprocess.run(["ss", "-tnp"], capture_output=True, text=True, check=False).stdout
    return held + " ".join(sorted(str(one.readlink()) for one in descriptors.iterdir()))

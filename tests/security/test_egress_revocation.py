"""Revocation: once the api has its answer nothing goes out any more that is not allowed by now, whatever was open; and a
gateway that is gone, or has just come, lets nothing out.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from space.model.ids import new_id
from tests.egress_host import SECRET, GatewayHost, Place, until
from tests.guest import Closed, Talk, request
from tests.guest_http2 import DATA, Http2Talk, Reset, pseudo
from tests.upstreams import GOOD, Outside

EFFECT_S_MAX = 0.1
GRANT: dict[str, Any] = {
    "id": "gnt1",
    "secret": "token",
    "hosts": ["good.example"],
    "placement": "bearer",
    "value": {"kind": "text", "value": SECRET},
}
ALLOWED: dict[str, Any] = {"rules": [{"hosts": ["good.example"]}]}
WEBSOCKET = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
)
Printing = Callable[[str], None]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Printing:
    """Print past pytest."""

    def out(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", end="")

    return out


def timed(say: Printing, what: str, revoke: Callable[[], None], effect: Callable[[], None]) -> None:
    """Revoke, wait for the effect, and say how long after the api's answer it was there."""
    revoke()
    answered = time.perf_counter()
    effect()
    took_s = time.perf_counter() - answered
    say(f"{what}: {took_s * 1000:.2f} ms from the api's answer to the effect")
    assert took_s <= EFFECT_S_MAX


def ended(sock: socket.socket) -> None:
    """Wait for the end of a connection, whatever still comes before it."""
    with contextlib.suppress(ConnectionError, OSError):
        while sock.recv(1 << 16):
            pass


# --- the next request


@pytest.mark.alone
def test_the_next_request_on_an_open_http1_connection_is_refused(guest: Place, outside: Outside, say: Printing) -> None:
    with guest.https("good.example") as talk:
        assert talk.get("good.example").status == 200

        def effect() -> None:
            assert talk.get("good.example", "/hidden").refusal == (403, "default-deny")

        timed(say, "keep-alive", lambda: guest.attach("none"), effect)
    assert [row["target"] for row in outside.seen("http")] == ["/hello"]


@pytest.mark.alone
def test_the_next_request_on_an_open_http2_connection_is_refused(guest: Place, outside: Outside, say: Printing) -> None:
    with Http2Talk(guest.tls("good.example", alpn=("h2",))) as talk:
        assert talk.get("good.example").status == 200

        def effect() -> None:
            assert talk.get("good.example", "/hidden").refusal == (403, "default-deny")

        timed(say, "HTTP/2", lambda: guest.attach("none"), effect)
    assert [row["target"] for row in outside.seen("http")] == ["/hello"]


@pytest.mark.parametrize("version", ["1.1", "2"])
def test_the_next_request_after_a_grant_was_revoked_has_no_secret(guest: Place, outside: Outside, version: str) -> None:
    guest.attach(ALLOWED, [GRANT])
    talk: Any = guest.https("good.example") if version == "1.1" else Http2Talk(guest.tls("good.example", alpn=("h2",)))
    with talk:
        assert talk.get("good.example").status == 200
        guest.attach(ALLOWED)
        assert talk.get("good.example").status == 200
        guest.attach(ALLOWED, [{**GRANT, "expires_at": time.time() - 1}])
        assert talk.get("good.example").status == 200
    placed = ["authorization" in dict(row["headers"]) for row in outside.seen("http")]
    assert placed == [True, False, False]
    assert [record["secrets"] for record in guest.egress()] == [["token"], [], []]


def test_the_next_question_for_a_name_is_refused(guest: Place, outside: Outside) -> None:
    first = guest.ask_name("good.example")
    guest.attach("none")
    second = guest.ask_name("good.example")
    assert first is not None
    assert second is not None
    assert (bool(first.answer), bool(second.answer)) == (True, False)


def test_a_change_is_seen_by_every_next_request_of_a_busy_connection(guest: Place, outside: Outside) -> None:
    with guest.https("good.example") as talk:
        for number in range(40):
            if number % 2:
                guest.attach("none")
            else:
                guest.attach(ALLOWED)
            assert talk.get("good.example", f"/hello?{number}").status == (403 if number % 2 else 200)
    assert [row["target"] for row in outside.seen("http")] == [f"/hello?{number}" for number in range(0, 40, 2)]
    generations = [record["generation"] for record in guest.egress()]
    assert generations == sorted(generations)


# --- what goes on


@contextlib.contextmanager
def websocket(guest: Place) -> Iterator[socket.socket]:
    with guest.https("good.example") as talk:
        assert talk.ask(request("good.example", "/ws", *WEBSOCKET), upgrade=True).status == 101
        yield talk.sock


@contextlib.contextmanager
def passed_through(guest: Place) -> Iterator[socket.socket]:
    guest.attach({"rules": [{"hosts": ["good.example"], "tls": "passthrough"}]})
    theirs = guest.host.outside.certificates.authorities / "ca.crt"
    with guest.https("good.example", authority=theirs) as talk:
        assert talk.get("good.example").status == 200
        yield talk.sock


@contextlib.contextmanager
def to_a_network(guest: Place) -> Iterator[socket.socket]:
    guest.attach({"networks": [{"networks": [GOOD], "ports": [9]}]})
    with guest.tcp(9, GOOD) as sock:
        sock.sendall(b"hello")
        assert sock.recv(5) == b"hello"
        yield sock


@contextlib.contextmanager
def streaming(guest: Place) -> Iterator[socket.socket]:
    with guest.https("good.example") as talk:
        talk.send(request("good.example", "/events?n=100"))
        assert talk.sock.recv(4096).startswith(b"HTTP/1.1 200")
        yield talk.sock


@contextlib.contextmanager
def uploading(guest: Place) -> Iterator[socket.socket]:
    with guest.https("good.example") as talk:
        talk.send(b"POST /sink HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n")
        until(lambda: guest.host.outside.seen("http"))
        yield talk.sock


ONGOING = [websocket, passed_through, to_a_network, streaming, uploading]


@pytest.mark.alone
@pytest.mark.parametrize("begin", ONGOING, ids=lambda begin: begin.__wrapped__.__name__)
@pytest.mark.parametrize("how", ["none", "deleted", "others-only"])
def test_what_is_under_way_ends_when_it_is_forbidden(
    guest: Place, say: Printing, begin: Callable[[Place], Any], how: str
) -> None:
    with begin(guest) as sock:

        def revoke() -> None:
            if how == "none":
                guest.attach("none")
            elif how == "deleted":
                guest.host.call("DELETE", f"/sandboxes/{guest.sandbox}")
            else:
                guest.host.call("PUT", "/sandboxes", json={"sandboxes": []})

        timed(say, f"{begin.__wrapped__.__name__} ({how})", revoke, lambda: ended(sock))  # type: ignore[attr-defined]


@pytest.mark.parametrize("begin", ONGOING, ids=lambda begin: begin.__wrapped__.__name__)
def test_what_is_under_way_goes_on_when_something_else_is_forbidden(
    guest: Place, begin: Callable[[Place], Any]
) -> None:
    with begin(guest) as sock:
        guest.attach(
            {
                "rules": [
                    {
                        "name": "new",
                        "hosts": ["good.example"],
                        "tls": "passthrough" if begin is passed_through else "terminate",
                    }
                ],
                "networks": [{"networks": ["198.51.100.0/24"], "ports": [9]}],
            }
        )
        sock.settimeout(0.05)
        with pytest.raises((TimeoutError, AssertionError)):
            assert sock.recv(1 << 16) == b""


@pytest.mark.alone
@pytest.mark.parametrize("begin", [websocket, streaming], ids=["websocket", "streaming"])
def test_what_is_under_way_with_a_secret_ends_with_its_grant(
    guest: Place, say: Printing, begin: Callable[[Place], Any]
) -> None:
    guest.attach(ALLOWED, [GRANT])
    with begin(guest) as sock:
        timed(say, "grant revoked", lambda: guest.attach(ALLOWED), lambda: ended(sock))


def test_a_stream_of_http2_that_is_under_way_ends_and_the_connection_goes_on(guest: Place, outside: Outside) -> None:
    guest.attach({"rules": [{"hosts": ["good.example"], "paths": ["/silent", "/hello"]}]})
    with Http2Talk(guest.tls("good.example", alpn=("h2",))) as talk:
        stream = talk.open(pseudo("good.example", "/silent", "POST"), end=False)
        talk.frame(DATA, 0, stream, b"abc")
        waiting = talk.open(pseudo("good.example", "/silent"))
        until(lambda: outside.seen("http"))
        guest.attach({"rules": [{"hosts": ["good.example"], "paths": ["/hello"]}]})
        for number in (stream, waiting):
            with pytest.raises(Reset):
                talk.answer(number)
        assert talk.get("good.example").status == 200
    assert [record["reason"] for record in guest.egress(decision="deny")] == ["revoked", "revoked"]


def test_a_websocket_that_opens_while_it_is_being_forbidden_does_not_stay(guest: Place, outside: Outside) -> None:
    with guest.https("good.example") as talk:
        talk.send(request("good.example", "/held", *WEBSOCKET))
        until(lambda: outside.seen("http"))
        guest.attach("none")
        with guest.host.reach(GOOD, 80) as host:
            assert Talk(host).get("good.example", "/release").status == 404
        ended(talk.sock)


# --- whose it is


def test_a_link_that_is_handed_over_leaves_nothing_of_the_old_connections(
    guest: Place, outside: Outside, links: list[Place]
) -> None:
    with guest.https("good.example") as kept, websocket(guest) as open_one:
        assert kept.get("good.example").status == 200
        heir = guest.host.hand_over(guest, new_id("sbx"))
        links[0] = heir
        heir.attach(ALLOWED)
        with pytest.raises(Closed):
            kept.get("good.example", "/hidden")
        ended(open_one)
    heir.reaches()
    assert "/hidden" not in {row["target"] for row in outside.seen("http")}
    assert {record["sandbox"] for record in heir.egress()} == {heir.sandbox}


def test_a_link_that_is_taken_away_ends_its_connections_at_the_server(gateway: GatewayHost, outside: Outside) -> None:
    place = gateway.place()
    place.attach(ALLOWED)
    with websocket(place):
        assert "space_egress_tunnels 1.0" in gateway.call("GET", "/metrics").text
        gateway.leave(place.sandbox)
        until(lambda: "space_egress_tunnels 0.0" in gateway.call("GET", "/metrics").text)


def test_an_entry_that_is_gone_means_closed(guest: Place, outside: Outside) -> None:
    entries = guest.host.settings.links_dir
    names = [str(guest.link.guest_v4), str(guest.link.guest_v6)]
    kept = {name: (entries / name).readlink() for name in names}
    with guest.https("good.example") as talk:
        assert talk.get("good.example").status == 200
        for name in names:
            (entries / name).unlink()
        try:
            with pytest.raises(Closed):
                talk.get("good.example", "/hidden")
            with pytest.raises(Closed):
                guest.get("https://good.example/hidden")
            assert guest.ask_name("good.example", wait_s=0.2) is None
        finally:
            for name, target in kept.items():
                (entries / name).symlink_to(target)
    guest.reaches()
    assert "/hidden" not in {row["target"] for row in outside.seen("http")}


# --- the gateway


def test_a_killed_gateway_lets_nothing_out_and_a_new_one_nothing_until_it_is_told(
    gateway: GatewayHost, guest: Place, outside: Outside
) -> None:
    """Fails closed, in every state of a restart."""
    with guest.https("good.example") as kept, websocket(guest) as open_one:
        assert kept.get("good.example").status == 200
        gateway.kill()
        with pytest.raises(Closed):
            kept.get("good.example", "/hidden")
        ended(open_one)
    for to in (None, GOOD, str(guest.link.host_v6)):
        for port in (80, 443):
            with pytest.raises(Closed, match="refused"):
                guest.tcp(port, to)
    assert guest.ask_name("good.example", wait_s=0.2) is None
    gateway.start()
    assert guest.get("https://good.example/hidden").refusal == (403, "default-deny")
    guest.attach(ALLOWED)
    guest.reaches()
    assert sorted(row["target"] for row in outside.seen("http")) == ["/hello", "/hello", "/ws"]

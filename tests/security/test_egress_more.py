"""Ways to take from the others what all of them share, which were found by attacking the gateway as a customer may."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Iterator

import dns.message
import pytest

from space.egress.messages import HEADERS_MAX
from tests.egress_host import GatewayHost, Place
from tests.guest_http2 import Http2Talk
from tests.upstreams import Outside

OTHERS_S = 1.0


@pytest.fixture
def hostile(gateway: GatewayHost) -> Iterator[Place]:
    """A sandbox with a link of its own, of somebody who may write its policy as he likes."""
    place = gateway.place()
    yield place
    gateway.leave(place.sandbox)


def test_names_whose_servers_say_nothing_hold_up_nobody_elses_questions(hostile: Place, guest: Place) -> None:
    networks = [{"networks": ["198.51.100.0/24"]}]  # so names are resolved when they are asked for
    hostile.attach({"rules": [{"hosts": ["*.mute.example"]}], "networks": networks})
    guest.attach({"rules": [{"hosts": ["good.example"]}], "networks": networks})
    with hostile.socket(kind=2) as sock:
        sock.connect((str(hostile.link.host_v4), 53))
        for number in range(640):
            with contextlib.suppress(OSError):
                sock.send(dns.message.make_query(f"n{number}.mute.example", "A").to_wire())
        began = time.monotonic()
        assert guest.ask_name("good.example") is not None
        assert time.monotonic() - began < OTHERS_S


def test_a_head_of_thousands_of_headers_is_refused_and_costs_little(guest: Place, outside: Outside) -> None:
    head = b"GET /hello HTTP/1.1\r\nHost: good.example\r\n"
    with guest.http() as talk:
        talk.send(head + b"a:b\r\n" * 45_000 + b"\r\n")
        assert talk.answer().status == 400
    with guest.http() as talk:
        assert talk.ask(head + b"a:b\r\n" * HEADERS_MAX + b"\r\n").refusal == (400, "too-many-headers")
    with guest.http() as talk:
        assert talk.ask(head + b"a:b\r\n" * (HEADERS_MAX - 1) + b"\r\n").status == 200
    assert len(outside.seen("http")) == 1


def test_thousands_of_headers_over_http2_are_refused(guest: Place, outside: Outside) -> None:
    with Http2Talk(guest.tls("good.example", alpn=("h2",))) as talk:
        assert talk.get("good.example", "/hello", *[("a", "b")] * HEADERS_MAX).status == 400
        assert talk.get("good.example", "/hello", *[("a", "b")] * (HEADERS_MAX - 4)).status == 200
    assert len(outside.seen("http")) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + b"a:b\r\n" * HEADERS_MAX + b"\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 40 + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=["headers", "interim"],
)
def test_a_server_that_says_thousands_of_things_before_its_answer_is_not_listened_to(
    guest: Place, answer: bytes
) -> None:
    coded = base64.urlsafe_b64encode(answer).decode()
    assert guest.get(f"https://good.example/raw?b64={coded}").status == 502

"""HTTP/2: every stream is decided on by itself, and no frame of a guest costs the gateway more than that guest."""

from __future__ import annotations

import contextlib
import struct

import pytest

from tests.egress_host import Place
from tests.guest import Closed
from tests.guest_http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    HeaderList,
    Http2Talk,
    Reset,
    frame,
    pseudo,
)
from tests.upstreams import GOOD, PLAIN, Outside

ENHANCE_YOUR_CALM, PROTOCOL_ERROR = 11, 1
MEMORY_MIB = 24
"""What one connection may cost the gateway, whatever is sent on it."""


def http2(guest: Place, name: str = "good.example") -> Http2Talk:
    return Http2Talk(guest.tls(name, alpn=("h2",)))


def outcome(talk: Http2Talk, headers: HeaderList) -> object:
    """Return what becomes of a request: refusal's status and reason, ``reset``, or ``closed``."""
    try:
        answer = talk.answer(talk.open(headers))
    except Reset:
        return "reset"
    except (Closed, BrokenPipeError):
        return "closed"
    return answer.refusal if answer.status >= 400 and answer.body.startswith(b'{"error"') else answer.status


def hosts(outside: Outside) -> set[tuple[str, str]]:
    return {(row["server"], dict(row["headers"])["host"]) for row in outside.seen("http")}


def test_a_request_over_http2_is_served_over_http2(guest: Place, outside: Outside) -> None:
    with http2(guest) as talk:
        assert talk.get("good.example").body == b"hello"
        assert talk.get("good.example", "/echo", ("x-a", "b")).json["method"] == "GET"
    assert {row["version"] for row in outside.seen("http")} == {"2"}


def test_a_call_of_grpc_gets_its_answer_and_its_trailers(guest: Place) -> None:
    """N12"""
    with http2(guest) as talk:
        stream = talk.open([*pseudo("good.example", "/grpc", "POST"), ("content-type", "application/grpc")], end=False)
        talk.frame(DATA, END_STREAM, stream, b"\0\0\0\0\5hello")
        answer = talk.answer(stream)
    assert (answer.status, answer.body, answer.trailers) == (200, b"\0\0\0\0\5hello", [("grpc-status", "0")])


@pytest.mark.parametrize("authority", ["evil.example", "other.example", "good.example.evil.example"])
def test_another_authority_on_the_same_connection_is_refused(guest: Place, outside: Outside, authority: str) -> None:
    """N4: also one that the policy allows, since TLS was asked for another name."""
    guest.attach({"rules": [{"hosts": ["good.example", "other.example"]}]})
    with http2(guest) as talk:
        assert talk.get("good.example").status == 200
        assert talk.get(authority).refusal == (403, "authority-mismatch")
        assert talk.get("good.example").status == 200
    assert hosts(outside) == {(GOOD, "good.example")}


@pytest.mark.parametrize(
    "authority",
    [
        "good.example@evil.example",
        "evil.example:443@good.example",
        "good.example,evil.example",
        "good.example evil.example",
        "good.example/",
        "good.example\x00.evil.example",
        "good.example\r\nhost: evil.example",
        "198.51.100.66",
        "[2001:db8:5::66]",
        "3405803842",
        "",
        "*",
    ],
)
def test_an_authority_that_is_no_host_is_refused(guest: Place, outside: Outside, authority: str) -> None:
    with http2(guest) as talk:
        assert outcome(talk, pseudo(authority)) in {(400, "bad-host"), "reset", "closed"}
    assert outside.seen() == []
    guest.reaches()


def test_another_port_in_the_authority_is_refused(guest: Place, outside: Outside) -> None:
    with http2(guest) as talk:
        assert talk.get("good.example:8443").refusal == (403, "authority-mismatch")
        assert talk.get("good.example:80").refusal == (403, "authority-mismatch")
        assert talk.get("GOOD.example:443").status == 200
    assert hosts(outside) == {(GOOD, "good.example")}


GOOD_HEAD = pseudo("good.example")


@pytest.mark.parametrize(
    "headers",
    [
        [*GOOD_HEAD, (":authority", "evil.example")],
        [(":authority", "evil.example"), *GOOD_HEAD],
        [*GOOD_HEAD, (":path", "/hidden")],
        [*GOOD_HEAD, (":method", "POST")],
        [*GOOD_HEAD, (":scheme", "http")],
        [*GOOD_HEAD, ("x-a", "b"), (":authority", "evil.example")],
        [("x-a", "b"), *GOOD_HEAD],
        [*GOOD_HEAD, (":status", "200")],
        [*GOOD_HEAD, (":host", "evil.example")],
        [*GOOD_HEAD, (":protocol", "websocket")],
        [pair for pair in GOOD_HEAD if pair[0] != ":authority"],
        [*(pair for pair in GOOD_HEAD if pair[0] != ":authority"), ("host", "good.example")],
        [pair for pair in GOOD_HEAD if pair[0] != ":path"],
        [pair for pair in GOOD_HEAD if pair[0] != ":method"],
        [pair for pair in GOOD_HEAD if pair[0] != ":scheme"],
        pseudo("good.example", scheme="http"),
        pseudo("good.example", scheme="file"),
        pseudo("good.example", ""),
        pseudo("good.example", "hello"),
        pseudo("good.example", "/a b"),
        pseudo("good.example", "/a\r\nhost: evil.example"),
        pseudo("good.example", "/a\x00"),
        pseudo("good.example", "/a#b"),
        pseudo("good.example", "http://evil.example/"),
        pseudo("good.example", "/hello", "GET / HTTP/1.1\r\nhost: evil.example\r\n\r\nGET"),
        pseudo("good.example", "/hello", "GET /hidden"),
        pseudo("good.example", "/hello", ""),
        pseudo("good.example", "/hello", "CONNECT"),
        [(":method", "CONNECT"), (":authority", "evil.example:443")],
        [(":method", "CONNECT"), (":protocol", "websocket"), *GOOD_HEAD[1:]],
        [*GOOD_HEAD, ("host", "evil.example")],
        [*GOOD_HEAD, ("host", "good.example"), ("host", "evil.example")],
        [*GOOD_HEAD, ("Host", "good.example")],
        [*GOOD_HEAD, ("connection", "close")],
        [*GOOD_HEAD, ("transfer-encoding", "chunked")],
        [*GOOD_HEAD, ("upgrade", "h2c")],
        [*GOOD_HEAD, ("te", "gzip")],
        [*GOOD_HEAD, ("x-a", "b\r\nx-c: d")],
        [*GOOD_HEAD, ("x-a", "b\nx-c: d")],
        [*GOOD_HEAD, ("x-a", "b\x00")],
        [*GOOD_HEAD, ("x-a\r\nx-c", "d")],
        [*GOOD_HEAD, ("x-a: b", "d")],
        [*GOOD_HEAD, ("x a", "d")],
        [*GOOD_HEAD, ("", "d")],
        [*GOOD_HEAD, ("content-length", "5")],
        [*GOOD_HEAD, ("content-length", "x")],
        [*GOOD_HEAD, ("content-length", "1"), ("content-length", "2")],
    ],
    ids=lambda headers: ",".join(name for name, _ in headers)[:60],
)
def test_a_request_that_can_be_read_in_two_ways_is_not_sent(
    guest: Place, outside: Outside, headers: HeaderList
) -> None:
    """N4"""
    guest.attach({"rules": [{"hosts": ["good.example", "evil.example"]}]})
    with http2(guest) as talk:
        found = outcome(talk, headers)
    assert found in {"reset", "closed"} or (isinstance(found, tuple) and found[0] in {400, 403}), found
    assert outside.seen() == []
    guest.reaches()


def test_a_host_beside_the_authority_is_fine_when_it_is_the_same_and_is_sent_once(
    guest: Place, outside: Outside
) -> None:
    with http2(guest) as talk:
        assert talk.get("good.example", "/hello", ("host", "good.example")).status == 200
    assert [value for name, value in outside.seen("http")[0]["headers"] if name == "host"] == ["good.example"]


@pytest.mark.parametrize("name", ["(x)", "x{a}", "x;a", "x/a", 'x"a'])
def test_a_header_that_http1_has_no_way_to_write_ends_that_request_alone(
    guest: Place, outside: Outside, name: str
) -> None:
    guest.attach({"rules": [{"hosts": ["good.example", PLAIN]}]})
    with http2(guest) as talk:
        assert outcome(talk, [*GOOD_HEAD, (name, "b")]) == 200, "HTTP/2 has a way"
    assert outside.seen("http")[-1]["version"] == "2"
    with http2(guest, PLAIN) as talk:
        assert outcome(talk, [*pseudo(PLAIN), (name, "b")]) == (502, "request-not-expressible")
        assert talk.get(PLAIN).status == 200
    sent = outside.seen("http")[-1]
    assert sent["version"] == "1.1"
    assert name not in dict(sent["headers"])


def test_a_header_that_http2_has_no_way_to_write_ends_the_connection(guest: Place, outside: Outside) -> None:
    guest.attach({"rules": [{"hosts": ["good.example"]}]})
    with http2(guest) as talk:
        assert outcome(talk, [*GOOD_HEAD, ("x\x7fa", "b")]) == "closed"
    assert outside.seen() == []


def test_a_body_that_is_shorter_or_longer_than_it_says_is_not_taken_for_whole(guest: Place, outside: Outside) -> None:
    for data in (b"abc", b"abcdef"):
        with http2(guest) as talk:
            head = [*pseudo("good.example", "/echo", "POST"), ("content-length", "5")]
            stream = talk.open(head, end=False)
            talk.frame(DATA, END_STREAM, stream, data)
            with contextlib.suppress(Reset, Closed):
                assert talk.answer(stream).status != 200
    guest.reaches()


def test_trailers_of_a_request_name_no_other_host(guest: Place, outside: Outside) -> None:
    for trailer in ([(":authority", "evil.example")], [("host", "evil.example")]):
        with http2(guest) as talk:
            stream = talk.open(pseudo("good.example", "/echo", "POST"), end=False)
            talk.frame(DATA, 0, stream, b"abc")
            talk.frame(HEADERS, END_HEADERS | END_STREAM, stream, talk.encoded(trailer))
            try:
                assert "evil" not in talk.answer(stream).body.decode()
            except (Reset, Closed):
                continue
    assert hosts(outside) <= {(GOOD, "good.example")}


def test_http2_behind_http1_on_one_connection_is_refused(guest: Place, outside: Outside) -> None:
    with guest.https("good.example", alpn=("http/1.1",)) as talk:
        assert talk.get("good.example").status == 200
        assert talk.ask(PREFACE + frame(SETTINGS, 0, 0)).status == 400
    assert len(outside.seen("http")) == 1


def test_http1_where_http2_was_agreed_on_is_refused(guest: Place, outside: Outside) -> None:
    with guest.tls("good.example", alpn=("h2",)) as sock:
        sock.sendall(b"GET /hidden HTTP/1.1\r\nHost: good.example\r\n\r\n")
        while sock.recv(65536):
            pass
    assert outside.seen() == []
    guest.reaches()


# --- floods


def test_streams_given_up_in_rapid_succession_end_the_connection(guest: Place, outside: Outside) -> None:
    with http2(guest) as talk:
        parts = []
        for _ in range(400):
            stream = talk.number()
            parts += [frame(HEADERS, END_HEADERS | END_STREAM, stream, talk.encoded(pseudo("evil.example")))]
            parts += [frame(RST_STREAM, 0, stream, struct.pack("!I", 8))]
        talk.sock.sendall(b"".join(parts))
        talk.until_closed()
    assert outside.seen() == []
    guest.reaches()


def test_a_head_in_endless_parts_is_cut_off_in_little_memory(guest: Place) -> None:
    before = guest.host.memory_mib()
    with http2(guest) as talk:
        talk.frame(HEADERS, END_STREAM, talk.number(), talk.encoded(GOOD_HEAD))
        part = frame(CONTINUATION, 0, 1, b"\x00\x01a\x7f\x80\xfe\x00" + b"b" * 16_000)
        with contextlib.suppress(ConnectionError):
            for _ in range(4000):
                talk.sock.sendall(part)
        talk.until_closed()
    assert guest.host.memory_mib() - before < MEMORY_MIB
    guest.reaches()


def test_a_head_that_unpacks_to_a_giant_is_refused_in_little_memory(guest: Place, outside: Outside) -> None:
    before = guest.host.memory_mib()
    with http2(guest) as talk:
        block = talk.encoded([*GOOD_HEAD, ("x-a", "b" * 3000)]) + b"\xbe" * 15_000  # what came last, again and again
        talk.frame(HEADERS, END_HEADERS | END_STREAM, talk.number(), block)
        talk.until_closed()
        assert talk.gone
    assert guest.host.memory_mib() - before < MEMORY_MIB
    assert outside.seen() == []
    guest.reaches()


@pytest.mark.parametrize(
    "part",
    [
        frame(PING, 0, 0, b"12345678"),
        frame(SETTINGS, 0, 0),
        frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 65535)),
        frame(PRIORITY, 0, 1, b"\x00\x00\x00\x00\x10"),
        frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", 1)),
        frame(0x42, 0, 0, b"unknown"),
    ],
    ids=["ping", "settings", "settings-window", "priority", "window", "unknown"],
)
def test_a_flood_of_frames_that_nobody_reads_the_answers_to_stays_small(guest: Place, part: bytes) -> None:
    before = guest.host.memory_mib()
    with http2(guest) as talk:
        talk.sock.settimeout(0.05)
        many = part * 2000
        try:
            for _ in range(20):
                talk.sock.sendall(many)
        except (TimeoutError, ConnectionError):
            pass  # the gateway reads no more, or has closed
        guest.reaches()
        assert guest.host.memory_mib() - before < MEMORY_MIB


@pytest.mark.parametrize(
    "frames",
    [
        frame(DATA, 0, 0, b"a"),
        frame(DATA, 0, 1, b"a"),
        frame(HEADERS, END_HEADERS, 0, b""),
        frame(HEADERS, END_HEADERS | END_STREAM, 2, b"\x82"),
        frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\xff\xff\xff\xff\xff\xff"),
        frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x3f\xe1\xff\xff\xff\x0f"),
        frame(HEADERS, 0, 1, b"\x82") + frame(PING, 0, 0, b"12345678"),
        frame(CONTINUATION, END_HEADERS, 1, b"\x82"),
        frame(PUSH_PROMISE, END_HEADERS, 1, b"\x00\x00\x00\x02\x82"),
        frame(SETTINGS, ACK, 0, b"a"),
        frame(SETTINGS, 0, 0, b"abc"),
        frame(SETTINGS, 0, 1),
        frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 0x80000000)),
        frame(SETTINGS, 0, 0, struct.pack("!HI", 5, 1)),
        frame(SETTINGS, 0, 0, struct.pack("!HI", 2, 7)),
        frame(PING, 0, 0, b"short"),
        frame(PING, 0, 1, b"12345678"),
        frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", 0)),
        frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", 0x7FFFFFFF)) * 2,
        frame(RST_STREAM, 0, 0, struct.pack("!I", 8)),
        frame(RST_STREAM, 0, 5, struct.pack("!I", 8)),
        frame(DATA, 0x8, 1, b"\xff"),
        b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    ],
)
def test_a_frame_that_makes_no_sense_ends_the_connection(guest: Place, outside: Outside, frames: bytes) -> None:
    with http2(guest) as talk:
        talk.sock.sendall(frames)
        assert talk.until_closed() is not None or talk.frames
    assert outside.seen() == []
    guest.reaches()


def test_more_streams_than_allowed_end_the_connection(guest: Place, outside: Outside) -> None:
    with http2(guest) as talk:
        parts = [
            frame(HEADERS, END_HEADERS | END_STREAM, talk.number(), talk.encoded(pseudo("good.example", "/silent")))
            for _ in range(200)
        ]
        with contextlib.suppress(ConnectionError):
            talk.sock.sendall(b"".join(parts))
        talk.until_closed()
    assert len(outside.seen("http")) <= 128
    guest.reaches()


def test_answers_that_nobody_reads_stay_in_little_memory(guest: Place) -> None:
    before = guest.host.memory_mib()
    with http2(guest) as talk:
        talk.frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 0x7FFFFFFF))
        talk.frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", 0x7FFF0000 - 65535))
        for _ in range(100):
            talk.open(pseudo("good.example", "/bytes?n=1000000"))
        for _ in range(20):
            guest.reaches()
        assert guest.host.memory_mib() - before < MEMORY_MIB

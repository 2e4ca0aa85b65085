"""Addresses: none that a guest chooses is connected to, and of those that names have none that is not public."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.egress_host import GatewayHost, Place, until
from tests.guest import Closed, Talk
from tests.netns import socket_in
from tests.upstreams import EVIL, EVIL_V6, GOOD, GOOD_V6, HOST_V4, HOST_V6, OWN, Outside

EVERYTHING = {"rules": [{"hosts": ["*"], "ports": [80, 443, 8443]}]}


@contextlib.contextmanager
def listening(address: str, netns: str | None = None) -> Iterator[socket.socket]:
    """Listen on a port of that address; what connects is there to be accepted, without waiting."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket_in(netns, family) if netns else socket.socket(family)
    with sock:
        sock.bind((address, 0))
        sock.listen(8)
        sock.setblocking(False)  # noqa: FBT003 - of socket
        yield sock


def accepted(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("address", [EVIL, EVIL_V6, GOOD, GOOD_V6])
@pytest.mark.parametrize("port", [443, 80, 22, 9])
def test_no_address_is_connected_to_because_a_guest_asks(
    guest: Place, outside: Outside, address: str, port: int
) -> None:
    """N3"""
    with guest.http(port, address) as talk, contextlib.suppress(Closed):
        assert talk.get("good.example").refusal == (403, "direct-address")
    assert outside.seen() == []
    guest.reaches()
    with guest.host.reach(address, port):  # it is there for who may
        until(lambda: outside.seen("raw") or port in {80, 443})


@pytest.mark.parametrize("address", [GOOD, GOOD_V6, EVIL])
def test_an_allowed_name_at_an_address_of_the_guests_choice_is_closed(
    guest: Place, outside: Outside, address: str
) -> None:
    """N4: an allowed SNI to an address that no name of ours led to."""
    with pytest.raises(Closed):
        guest.tls("good.example", to=address)
    assert outside.seen() == []
    assert guest.refusals() == {("direct-address", "good.example")}
    assert guest.egress()[-1]["address"] == address


def test_another_host_at_an_allowed_hosts_address_is_not_reached(guest: Place, outside: Outside) -> None:
    """The second published attack: one address, two names, of which one is allowed."""
    guest.reaches()
    assert guest.get("http://other.example/").refusal == (403, "default-deny")
    assert guest.get("https://other.example/").refusal == (403, "default-deny")
    for to in (GOOD, EVIL):
        with pytest.raises(Closed):
            guest.get("https://other.example/", to=to)
    assert {dict(row["headers"])["host"] for row in outside.seen("http")} == {"good.example"}
    guest.attach({"rules": [{"hosts": ["other.example"]}]})
    guest.reaches("https://other.example/hello")  # it is at that address


def test_a_v6_socket_with_a_v4_address_in_it_is_no_way_around(guest: Place, outside: Outside) -> None:
    """N3"""
    with guest.socket(socket.AF_INET6) as sock:
        sock.connect((f"::ffff:{EVIL}", 80))
        assert Talk(sock).get("good.example").refusal == (403, "direct-address")
    assert outside.seen() == []
    guest.reaches()


@pytest.mark.parametrize(
    "host",
    [
        EVIL,
        f"[{EVIL_V6}]",
        f"[::ffff:{EVIL}]",
        "3405803842",
        "0xcb007142",
        "0313.0.0161.0102",
        "203.0.28994",
        "0xcb.0x0.0x71.0x42",
        "198.51.100.66.",
        "127.1",
        "0",
        "localhost.127.0.0.1",
        "[fe80::1%25eth0]",
    ],
)
def test_an_address_is_no_host_however_it_is_written(guest: Place, outside: Outside, host: str) -> None:
    """N3"""
    guest.attach(EVERYTHING)
    with guest.http() as talk:
        assert talk.get(host).refusal == (400, "bad-host")
    with guest.https("good.example") as talk:
        assert talk.get(host).refusal == (400, "bad-host")
    with guest.http() as talk:
        assert talk.ask(f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).refusal == (400, "bad-host")
    assert outside.seen() == []
    guest.reaches()


@pytest.mark.parametrize(
    "name",
    [
        "metadata.example",
        "loopback.example",
        "zero.example",
        "private.example",
        "shared.example",
        "mapped.example",
        "nat64.example",
        "multicast.example",
        "link-local.example",
        "six-to-four.example",
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_allowed_name_with_an_address_that_is_not_public_is_not_connected_to(
    guest: Place, outside: Outside, name: str, scheme: str
) -> None:
    """N10"""
    guest.attach({"rules": [{"hosts": ["good.example", name]}]})
    assert guest.get(f"{scheme}://{name}/latest/meta-data").refusal == (403, "address-refused")
    assert outside.asked() <= {name}
    assert guest.refusals() == {("address-refused", name)}
    guest.reaches()


def test_no_service_of_the_host_is_reached_through_a_name_for_loopback(guest: Place, outside: Outside) -> None:
    """N10"""
    with listening("127.0.0.1") as service:
        port = service.getsockname()[1]
        guest.attach({"rules": [{"hosts": ["loopback.example"], "ports": [port]}]})
        assert guest.get(f"http://loopback.example:{port}/").refusal == (403, "address-refused")
        assert not accepted(service)
        with socket.create_connection(("127.0.0.1", port), 5):
            assert accepted(service)
    assert outside.seen("http") == []


def test_no_service_of_the_host_is_reached_through_a_name_for_its_public_address(guest: Place) -> None:
    with listening(OWN) as service:
        port = service.getsockname()[1]
        guest.attach({"rules": [{"hosts": ["own.example"], "ports": [port]}]})
        assert guest.get(f"http://own.example:{port}/").refusal == (403, "address-refused")
        assert not accepted(service)
        with socket.create_connection((OWN, port), 5):
            assert accepted(service)


def test_of_a_names_addresses_only_public_ones_are_dialled(guest: Place, outside: Outside) -> None:
    """N10"""
    guest.attach({"rules": [{"hosts": ["mixed.example"]}]})
    guest.reaches("https://mixed.example/hello")
    assert [row["server"] for row in outside.seen("http")] == [GOOD]


def test_what_was_looked_at_is_what_is_dialled(guest: Place, outside: Outside) -> None:
    """N10: a name that has another address the second time it is asked for is dialled at the first one."""
    name = f"a{guest.link.index}.rebind.example"
    guest.attach({"rules": [{"hosts": ["*.rebind.example"]}]})
    guest.reaches(f"https://{name}/hello")
    assert [row["type"] for row in outside.seen("dns")].count("A") == 1
    assert [row["server"] for row in outside.seen("http")] == [GOOD]


def test_a_name_that_has_become_a_private_address_is_refused_from_then_on(guest: Place, outside: Outside) -> None:
    """N10"""
    name = f"b{guest.link.index}.rebind.example"
    guest.attach({"rules": [{"hosts": ["*.rebind.example"], "ports": [443]}]})
    guest.reaches(f"https://{name}/hello")
    until(lambda: guest.get(f"https://{name}/hello").status == 403)  # once its first answer is too old
    assert guest.refusals() == {("address-refused", name)}
    assert guest.get(f"https://{name}/hello").refusal == (403, "address-refused")


def test_ipv6_is_held_to_the_same_policy_and_works(guest: Place, outside: Outside) -> None:
    """N3"""
    guest.attach({"rules": [{"hosts": ["six.example", "both.example"]}]})
    for name in ("six.example", "both.example"):
        answer = guest.get(f"https://{name}/hello", to=str(guest.link.host_v6))
        assert (answer.status, answer.body) == (200, b"hello")
    assert guest.get("https://evil-six.example/", to=str(guest.link.host_v6)).refusal == (403, "default-deny")
    assert guest.get("http://evil-six.example/", to=str(guest.link.host_v6)).refusal == (403, "default-deny")
    assert GOOD_V6 in {row["server"] for row in outside.seen("http")}
    assert not {EVIL_V6, EVIL} & {row["server"] for row in outside.seen("http")}


@pytest.mark.parametrize(("address", "evil"), [(GOOD, EVIL), (GOOD_V6, EVIL_V6)])
def test_a_rule_for_networks_lets_out_what_it_names_and_nothing_else(
    guest: Place, outside: Outside, address: str, evil: str
) -> None:
    """N3"""
    guest.attach({"networks": [{"networks": [address], "ports": [9]}]})
    with guest.tcp(9, address) as sock:
        sock.sendall(b"hello")
        assert sock.recv(5) == b"hello"
    for port, to in ((9, evil), (22, address), (80, address), (9, str(guest.link.host_v4))):
        with pytest.raises(Closed):
            guest.tls(None, port=port, to=to)
    assert [(row["server"], row["port"]) for row in outside.seen("raw")] == [(address, 9)]


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "10.0.0.1", "100.100.100.200", "192.168.1.1", "172.16.0.1", "168.63.129.16", OWN]
)
def test_everything_public_is_nothing_private(guest: Place, outside: Outside, address: str) -> None:
    """N10: a policy for the whole internet, connections by address."""
    guest.attach("public-internet")
    with pytest.raises(Closed):
        guest.tls(None, port=8080, to=address)
    assert guest.refusals() == {("address-refused", None)}
    with guest.tcp(9, GOOD) as sock:
        sock.sendall(b"hello")
        assert sock.recv(5) == b"hello"


@pytest.mark.parametrize("address", ["169.254.169.254", "fd00:ec2::254", "100.100.100.200", "168.63.129.16"])
def test_a_metadata_address_is_answered_by_the_gateway_with_a_refusal(
    guest: Place, outside: Outside, address: str
) -> None:
    """N10"""
    guest.attach("public-internet")
    answer = guest.get("http://metadata.example/latest/meta-data/", to=address)
    assert answer.refusal == (403, "direct-address")
    with pytest.raises(Closed):
        guest.tls("metadata.example", to=address)
    assert outside.seen() == []


@pytest.mark.parametrize("address", [HOST_V4, HOST_V6, OWN, "link-v4", "link-v6"])
def test_no_port_of_the_host_can_be_reached(guest: Place, outside: Outside, address: str) -> None:
    to = {"link-v4": str(guest.link.host_v4), "link-v6": str(guest.link.host_v6)}.get(address, address)
    guest.attach("public-internet")
    with listening(to) as service:
        port = service.getsockname()[1]
        with guest.tcp(port, to) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 403")
        with pytest.raises(Closed):
            guest.tls(None, port=port, to=to)
        assert not accepted(service)
        with socket.create_connection((to, port), 5):
            assert accepted(service)


@pytest.mark.parametrize("family", [4, 6])
def test_a_neighbour_cannot_be_reached(guest: Place, neighbour: Place, outside: Outside, family: int) -> None:
    to = str(neighbour.link.guest_v4 if family == 4 else neighbour.link.guest_v6)
    guest.attach("public-internet")
    with listening(to, neighbour.netns) as service:
        port = service.getsockname()[1]
        with contextlib.suppress(Closed), guest.tcp(port, to) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n")
            sock.recv(65536)
        assert not accepted(service)
        with neighbour.tcp_inside(port, to):
            assert accepted(service)
    assert neighbour.egress() == []


def test_by_the_end_of_a_neighbours_link_one_reaches_what_one_may_oneself(
    guest: Place, neighbour: Place, outside: Outside
) -> None:
    neighbour.attach({"rules": [{"hosts": ["evil.example"]}]}, project="prj2")
    to = str(neighbour.link.host_v4)
    assert guest.get("https://evil.example/hello", to=to).refusal == (403, "default-deny")
    assert outside.seen() == []
    neighbour.reaches("https://evil.example/hello")
    assert {record["sandbox"] for record in guest.egress()} == {guest.sandbox}
    assert [record["decision"] for record in neighbour.egress()] == ["allow"]


def test_the_gateways_own_port_is_closed_by_its_address_and_elsewhere_a_port_like_any_other(
    guest: Place, outside: Outside
) -> None:
    port = guest.host.settings.gateway_port
    with pytest.raises(Closed, match="refused"):
        guest.tcp(port)
    assert guest.get(f"http://good.example:{port}/", to=HOST_V4).refusal == (403, "direct-address")
    assert outside.seen() == []
    guest.reaches()


def test_nobody_but_a_sandbox_can_connect_to_the_gateway(guest: Place, outside: Outside) -> None:
    settings = guest.host.settings
    for netns, address in ((outside.netns, HOST_V4), (outside.netns, HOST_V6), (None, HOST_V4), (None, "127.0.0.1")):
        for port in (settings.gateway_port, settings.gateway_dns_port):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket_in(netns, family) if netns else socket.socket(family) as sock:
                sock.settimeout(5)
                with pytest.raises(ConnectionRefusedError):
                    sock.connect((address, port))
    guest.reaches()


@pytest.mark.parametrize("port", [8080, 25, 1, 65535, 8443])
def test_a_port_that_no_rule_has_is_refused(guest: Place, outside: Outside, port: int) -> None:
    assert guest.get(f"http://good.example:{port}/").refusal == (403, "default-deny")
    assert guest.get(f"https://good.example:{port}/").refusal == (403, "default-deny")
    assert outside.seen() == []
    guest.attach({"rules": [{"hosts": ["untrusted.example"], "ports": [8443]}]})
    assert guest.get("https://untrusted.example:8443/").refusal == (502, "upstream-certificate")  # it is tried


def test_a_sandbox_that_nobody_has_told_of_reaches_nothing(gateway: GatewayHost, outside: Outside) -> None:
    place = gateway.place()
    try:
        assert place.get("https://good.example/").refusal == (403, "default-deny")
        assert place.get("http://good.example/").refusal == (403, "default-deny")
        assert outside.seen() == []
        assert {(record["project"], record["reason"]) for record in place.egress()} == {("", "default-deny")}
        place.attach({"rules": [{"hosts": ["good.example"]}]})
        place.reaches()
    finally:
        gateway.leave(place.sandbox)

"""Packets: of all that a machine can put on its link, nothing but TCP and questions for names is taken, and all of that
by the gateway; whoever it says it is from.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests import packets
from tests.egress_host import GatewayHost, Place, until
from tests.guest import refused
from tests.upstreams import EVIL, EVIL_V6, GOOD, GOOD_V6, HOST_V4, HOST_V6, NAME_SERVER, Outside

MULTICAST_V4, MULTICAST_V6 = "224.0.0.251", "ff02::fb"


class Watched:
    """The wire outside: ``seen()`` is every packet that came out of it since."""

    def __init__(self, outside: Outside) -> None:
        self._wire = packets.Wire(outside.netns)

    def close(self) -> None:
        self._wire.close()

    def seen(self) -> list[bytes]:
        """Send a packet as the host, and return what came before it."""
        mark = os.urandom(16)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as host:
            host.sendto(mark, (EVIL, 9))
        return [frame for frame in self._wire.until(mark) if not _is_the_hosts(frame)]


def _is_the_hosts(frame: bytes) -> bool:
    """Whether it is of what an earlier test has left: connections, and questions that nobody answered."""
    six = frame[12:14] == b"\x86\xdd"
    at, source, protocol = (54, frame[22:38], frame[20]) if six else (34, frame[26:30], frame[23])
    ours = source in {socket.inet_aton(HOST_V4), socket.inet_pton(socket.AF_INET6, HOST_V6)}
    connected = protocol == packets.TCP and not frame[at + 13] & 0x02
    asking = protocol == packets.UDP and frame[at + 2 : at + 4] == b"\0\x35" and b"\x04mute" in frame
    return ours and (connected or asking)


@pytest.fixture(scope="module")
def watched(gateway: GatewayHost) -> Iterator[Watched]:
    one = Watched(gateway.outside)
    yield one
    one.close()


@pytest.fixture
def wire(watched: Watched) -> Watched:
    """The wire outside from now on."""
    watched.seen()
    return watched


def own(guest: Place, target: str) -> str:
    return str(guest.link.guest_v6 if ":" in target else guest.link.guest_v4)


def settled(guest: Place) -> None:
    """Wait until the host has dealt with every packet sent before: they go one after the other."""
    assert guest.ask_name("good.example", "TXT") is not None


@pytest.mark.parametrize("target", [EVIL, GOOD, EVIL_V6, GOOD_V6])
@pytest.mark.parametrize("port", [9, 123, 443, 5353])
def test_udp_goes_nowhere(guest: Place, wire: Watched, target: str, port: int) -> None:
    """N3: QUIC among it."""
    guest.attach("public-internet")
    with guest.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"secret", (target, port))
    settled(guest)
    assert wire.seen() == []


def quic(outside: Outside) -> list[str]:
    return [row["data"] for row in outside.seen("udp") if row["port"] == 443]


@pytest.mark.parametrize("target", [EVIL, EVIL_V6])
def test_quic_is_refused_at_once_so_that_clients_go_on_to_tcp(
    gateway: GatewayHost, outside: Outside, target: str
) -> None:
    """N3"""
    guest = gateway.place()  # of its own, as the kernel says this to one address a few times a second
    with guest.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((target, 443))
        sock.send(b"secret")
        with pytest.raises(OSError, match=r"No route to host|Permission denied|refused|unreachable"):
            sock.recv(1)
    with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as host:
        host.sendto(b"control", (target, 443))  # it is there for who may
    until(lambda: quic(outside))
    assert quic(outside) == ["control"]
    gateway.leave(guest.sandbox)


@pytest.mark.parametrize("target", [EVIL, EVIL_V6])
def test_ping_goes_nowhere(guest: Place, wire: Watched, target: str) -> None:
    """N3"""
    guest.attach("public-internet")
    packets.send(guest, packets.echo(own(guest, target), target))
    settled(guest)
    assert wire.seen() == []
    size, family, kind = (40, socket.AF_INET6, packets.ICMP6) if ":" in target else (20, socket.AF_INET, packets.ICMP)
    with socket.socket(family, socket.SOCK_RAW, kind) as host:  # which may
        host.sendto(packets.echo(own(guest, target), target)[size:], (target, 0))
    assert len(wire.seen()) == 1


@pytest.mark.parametrize("target", [EVIL, EVIL_V6])
@pytest.mark.parametrize("protocol", [1, 2, 4, 33, 41, 47, 50, 58, 89, 103, 132, 136, 253, 255])
def test_no_other_protocol_goes_anywhere(guest: Place, wire: Watched, target: str, protocol: int) -> None:
    """N3: tunnels, SCTP, DCCP, UDP-Lite, raw."""
    guest.attach("public-internet")
    inner = packets.udp(own(guest, target), target, 1000, 9, b"secret")
    packets.send(guest, packets.ip(own(guest, target), target, protocol, inner))
    settled(guest)
    assert wire.seen() == []


@pytest.mark.parametrize("target", [EVIL, EVIL_V6])
def test_a_packet_in_pieces_goes_nowhere(guest: Place, wire: Watched, target: str) -> None:
    source = own(guest, target)
    whole = packets.udp(source, target, 1000, 9, b"secret" * 16)
    size = 40 if ":" in target else 20
    head, body = whole[:size], whole[size:]
    if ":" in target:
        pieces = [
            packets.ip(source, target, 44, bytes([17, 0, 0, 1, 0, 0, 0, 7]) + body[:56]),
            packets.ip(source, target, 44, bytes([17, 0, 0, 56, 0, 0, 0, 7]) + body[56:]),
        ]
    else:
        assert head[9] == packets.UDP
        pieces = [
            packets.ip(source, target, packets.UDP, body[:56], fragment=0x2000),
            packets.ip(source, target, packets.UDP, body[56:], fragment=7),
        ]
    packets.send(guest, *pieces)
    settled(guest)
    assert wire.seen() == []


def test_a_packet_that_names_its_own_way_goes_nowhere(guest: Place, wire: Watched) -> None:
    """Loose source routes of IPv4, a routing header of IPv6."""
    source, via = str(guest.link.guest_v4), socket.inet_aton(EVIL)
    datagram = packets.udp(source, EVIL, 1000, 9, b"secret")[20:]
    routed = packets.ip(source, HOST_V4, packets.UDP, datagram, options=bytes([131, 7, 4]) + via + b"\0")
    source6 = str(guest.link.guest_v6)
    inner = packets.udp(source6, EVIL_V6, 1000, 9, b"secret")[40:]
    header = bytes([packets.UDP, 2, 0, 1, 0, 0, 0, 0]) + socket.inet_pton(socket.AF_INET6, EVIL_V6)
    packets.send(guest, routed, packets.ip(source6, HOST_V6, 43, header + inner))
    settled(guest)
    assert wire.seen() == []


@pytest.mark.parametrize("source", [GOOD, NAME_SERVER, HOST_V4, "127.0.0.1", "10.0.0.5", "0.0.0.0", "neighbour"])
def test_a_connection_from_another_v4_source_is_not_begun(
    guest: Place, neighbour: Place, outside: Outside, wire: Watched, source: str
) -> None:
    neighbour.attach({"rules": [{"hosts": ["good.example"]}]}, project="prj2")
    source = str(neighbour.link.guest_v4) if source == "neighbour" else source
    before = refused_connections(guest)
    for target in (str(guest.link.host_v4), EVIL, HOST_V4):
        packets.send(guest, packets.syn(source, target, 4000, 443), packets.syn(source, target, 4001, 80))
        packets.send(guest, packets.udp(source, target, 4000, 53, b"x"))
    settled(guest)
    assert wire.seen() == []
    assert refused_connections(guest) == before
    assert neighbour.egress() == []
    neighbour.reaches()


@pytest.mark.parametrize("source", [GOOD_V6, HOST_V6, "::1", "fe80::1", "::ffff:198.51.100.10", "::", "neighbour"])
def test_a_connection_from_another_v6_source_is_not_begun(
    guest: Place, neighbour: Place, wire: Watched, source: str
) -> None:
    """N3"""
    source = str(neighbour.link.guest_v6) if source == "neighbour" else source
    before = refused_connections(guest)
    for target in (str(guest.link.host_v6), EVIL_V6, HOST_V6):
        packets.send(guest, packets.syn(source, target, 4000, 443), packets.udp(source, target, 4000, 53, b"x"))
    settled(guest)
    assert wire.seen() == []
    assert refused_connections(guest) == before
    assert neighbour.egress() == []


def refused_connections(guest: Place) -> list[str]:
    """Return what the gateway counted of connections that it had nothing to do with."""
    lines = guest.host.call("GET", "/metrics").text.splitlines()
    return [line for line in lines if line.startswith("space_egress_connections_refused_total")]


def test_a_question_in_a_neighbours_name_is_not_taken(guest: Place, neighbour: Place, outside: Outside) -> None:
    question = bytes.fromhex("abcd01000001000000000000") + b"\x04evil\x07example\x00\x00\x01\x00\x01"
    for sender, to in ((guest, guest.link.host_v4), (guest, neighbour.link.host_v4)):
        packets.send(sender, packets.udp(neighbour.link.guest_v4, to, 4000, 53, question))
    settled(guest)
    assert neighbour.egress() == []
    packets.send(neighbour, packets.udp(neighbour.link.guest_v4, neighbour.link.host_v4, 4000, 53, question))
    until(neighbour.egress)  # which is how it would have looked
    assert outside.seen() == []


def test_a_lie_about_whose_an_address_is_is_not_believed(guest: Place, neighbour: Place, outside: Outside) -> None:
    """ARP: answers nobody asked for, announcements, questions in another's name."""
    before = known_neighbours()
    for address in (neighbour.link.guest_v4, neighbour.link.host_v4, guest.link.host_v4, GOOD, NAME_SERVER, HOST_V4):
        for operation in (1, 2):
            message = packets.arp(operation, guest.link.guest_mac, address, address)
            packets.send(guest, message, kind=packets.ETH_ARP)
            packets.send(guest, message, kind=packets.ETH_ARP, to=packets.BROADCAST)
    settled(guest)
    assert known_neighbours() == before
    assert refused(neighbour.ask_name("good.example"))
    guest.reaches()


def test_a_lie_of_neighbour_discovery_is_not_believed(guest: Place, neighbour: Place, outside: Outside) -> None:
    """N3: advertisements, a router's too, and redirects."""
    before, routes = known_neighbours(), shown("-6", "route")
    link_local = "fe80::5"
    for kind in (133, 134, 135, 136, 137):
        for about in (neighbour.link.guest_v6, guest.link.host_v6, GOOD_V6, HOST_V6):
            for source in (guest.link.guest_v6, link_local):
                message = packets.neighbour(kind, source, guest.link.host_v6, about, guest.link.guest_mac)
                packets.send(guest, message, packets.neighbour(kind, source, "ff02::1", about, guest.link.guest_mac))
    settled(guest)
    assert known_neighbours() == before
    assert shown("-6", "route") == routes
    guest.reaches()


def shown(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def known_neighbours() -> set[str]:
    """Return which address the host takes to be where."""
    return {" ".join(line.split()[:5]) for line in shown("neigh").splitlines() if "lladdr" in line}


def test_a_frame_for_another_than_the_host_is_not_taken(guest: Place, neighbour: Place, wire: Watched) -> None:
    """A neighbour's hardware address, none, everybody's; and frames with a VLAN's tag."""
    whole = packets.udp(guest.link.guest_v4, EVIL, 1000, 9, b"secret")
    for mac in (neighbour.link.guest_mac, neighbour.link.host_mac, "00:00:00:00:00:00", packets.BROADCAST):
        packets.send(guest, whole, packets.syn(guest.link.guest_v4, neighbour.link.guest_v4, 1000, 80), to=mac)
    packets.send(guest, b"\x00\x05\x08\x00" + whole, kind=packets.ETH_VLAN)
    settled(guest)
    assert wire.seen() == []
    assert neighbour.egress() == []


@pytest.mark.parametrize("target", [MULTICAST_V4, "255.255.255.255", MULTICAST_V6, "198.51.100.255"])
def test_what_is_for_many_reaches_nobody(guest: Place, neighbour: Place, wire: Watched, target: str) -> None:
    inside = packets.Wire(neighbour.netns)
    try:
        packets.send(guest, packets.udp(own(guest, target), target, 5353, 5353, b"secret"), to=packets.BROADCAST)
        settled(guest)
        assert wire.seen() == []
        assert refused(neighbour.ask_name("mark.example"))
        assert [frame for frame in inside.until(b"\x04mark\x07example") if b"secret" in frame] == []
    finally:
        inside.close()


def test_an_answer_to_nothing_opens_no_way(guest: Place, wire: Watched) -> None:
    """TCP that does not begin with its beginning."""
    for target in (EVIL, str(guest.link.host_v4)):
        whole = bytearray(packets.syn(guest.link.guest_v4, target, 4000, 443))
        for flags in (0x00, 0x01, 0x10, 0x12, 0x18, 0x29, 0x3F):
            whole[33] = flags
            whole[36:38] = b"\0\0"
            total = packets.checksum(bytes(whole[12:20]) + b"\0\x06\0\x14" + bytes(whole[20:]))
            packets.send(guest, bytes(whole[:36]) + total.to_bytes(2) + bytes(whole[38:]))
    settled(guest)
    assert wire.seen() == []
    guest.reaches()

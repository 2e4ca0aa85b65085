"""Packets made by hand, as whoever owns a machine can make them, and what is seen of them on the other side's wire."""

from __future__ import annotations

import functools
import ipaddress
import socket
import struct
from typing import Any

from tests.guest import Guest
from tests.netns import socket_in

TCP, UDP, ICMP, ICMP6 = socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_ICMP, socket.IPPROTO_ICMPV6
BROADCAST = "ff:ff:ff:ff:ff:ff"
_ETH_ALL, _ETH_IP, _ETH_IP6 = 0x0003, 0x0800, 0x86DD
ETH_ARP, ETH_VLAN = 0x0806, 0x8100
_WAIT_S = 8.0


def checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _pseudo(source: str, target: str, protocol: int, size: int) -> bytes:
    ends = ipaddress.ip_address(source).packed + ipaddress.ip_address(target).packed
    return ends + (struct.pack("!BBH", 0, protocol, size) if len(ends) == 8 else struct.pack("!II", size, protocol))


def ip(source: Any, target: Any, protocol: int, body: bytes, *, options: bytes = b"", fragment: int = 0) -> bytes:
    """Return an IP packet of the family that its addresses have."""
    source, target = str(source), str(target)
    ends = ipaddress.ip_address(source).packed + ipaddress.ip_address(target).packed
    if len(ends) == 32:
        return struct.pack("!IHBB", 6 << 28, len(body), protocol, 64) + ends + body
    size = 20 + len(options)
    first = 0x40 | size // 4
    head = struct.pack("!BBHHHBBH", first, 0, size + len(body), 7, fragment, 64, protocol, 0)
    total = checksum(head + ends + options)
    return head[:10] + struct.pack("!H", total) + ends + options + body


def udp(source: Any, target: Any, from_port: int, to_port: int, data: bytes) -> bytes:
    head = struct.pack("!HHHH", from_port, to_port, 8 + len(data), 0) + data
    total = checksum(_pseudo(str(source), str(target), UDP, len(head)) + head) or 0xFFFF
    return ip(source, target, UDP, head[:6] + struct.pack("!H", total) + head[8:])


def syn(source: Any, target: Any, from_port: int, to_port: int) -> bytes:
    """Return the beginning of a TCP connection."""
    head = struct.pack("!HHIIBBHHH", from_port, to_port, 1, 0, 0x50, 0x02, 65535, 0, 0)
    total = checksum(_pseudo(str(source), str(target), TCP, len(head)) + head)
    return ip(source, target, TCP, head[:16] + struct.pack("!H", total) + head[18:])


def echo(source: Any, target: Any) -> bytes:
    """Return what `ping` sends."""
    if ipaddress.ip_address(str(target)).version == 4:
        body = struct.pack("!BBHHH", 8, 0, 0, 1, 1) + b"ping"
        return ip(source, target, ICMP, body[:2] + struct.pack("!H", checksum(body)) + body[4:])
    body = struct.pack("!BBHHH", 128, 0, 0, 1, 1) + b"ping"
    total = checksum(_pseudo(str(source), str(target), ICMP6, len(body)) + body)
    return ip(source, target, ICMP6, body[:2] + struct.pack("!H", total) + body[4:])


def neighbour(kind: int, source: Any, target: Any, about: Any, mac: str) -> bytes:
    """Return a message of neighbour discovery (RFC 4861 §4): 136 advertises that `about` is at `mac`."""
    option = 1 if kind in {133, 134, 135} else 2
    body = struct.pack("!BBHI", kind, 0, 0, 0x60000000) + ipaddress.ip_address(str(about)).packed
    body += bytes([option, 1]) + bytes.fromhex(mac.replace(":", ""))
    total = checksum(_pseudo(str(source), str(target), ICMP6, len(body)) + body)
    packet = ip(source, target, ICMP6, body[:2] + struct.pack("!H", total) + body[4:])
    return packet[:7] + b"\xff" + packet[8:]


def arp(operation: int, mac: str, address: Any, target: Any) -> bytes:
    """Return an ARP message (RFC 826): that, or who asks, `address` is at `mac`."""
    own = bytes.fromhex(mac.replace(":", "")) + ipaddress.ip_address(str(address)).packed
    return (
        struct.pack("!HHBBH", 1, _ETH_IP, 6, 4, operation) + own + bytes(6) + ipaddress.ip_address(str(target)).packed
    )


@functools.cache
def _end(netns: str) -> socket.socket:
    """Return a socket for whole frames at a link's end; kept, as closing one takes the kernel a while."""
    wire = socket_in(netns, socket.AF_PACKET, socket.SOCK_RAW)
    wire.bind(("eth0", 0))
    return wire


def send(guest: Guest, *packets: bytes, kind: int | None = None, to: str | None = None, mac: str | None = None) -> None:
    """Put packets on the guest's end of its link, behind the kernel's back."""
    ends = (to or guest.link.host_mac, mac or guest.link.guest_mac)
    head = b"".join(bytes.fromhex(text.replace(":", "")) for text in ends)
    for packet in packets:
        ethernet = kind or (_ETH_IP if packet[0] >> 4 == 4 else _ETH_IP6)
        _end(guest.netns).send(head + struct.pack("!H", ethernet) + packet)


class Wire:
    """All packets that come in at ``eth0`` of a namespace from now on."""

    def __init__(self, netns: str) -> None:
        self._sock = socket_in(netns, socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_ALL))
        self._sock.bind(("eth0", _ETH_ALL))
        self._sock.settimeout(_WAIT_S)

    def close(self) -> None:
        self._sock.close()

    def until(self, mark: bytes) -> list[bytes]:
        """Return what came before the packet that has ``mark`` in it, but neighbours' questions for addresses."""
        found: list[bytes] = []
        while True:
            frame, source = self._sock.recvfrom(65535)
            if source[2] == socket.PACKET_OUTGOING:
                continue
            if mark in frame:
                return found
            if not _is_solicitation(frame):
                found.append(frame)


def _is_solicitation(frame: bytes) -> bool:
    """Whether it is what every host says by itself: neighbours' questions, and which groups it listens to."""
    kind = int.from_bytes(frame[12:14])
    if kind != _ETH_IP6:
        return kind == ETH_ARP
    at = 62 if frame[20] == 0 else 54
    return frame[20] in {0, ICMP6} and frame[at] in {130, 131, 132, 133, 134, 135, 136, 143}

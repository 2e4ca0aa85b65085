"""What the host's kernel remembers of a machine's connections, and having it forget that when the link goes.

The next machine of that address would inherit it otherwise, and an established connection is remembered for days.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address

ANSWER_S = 5.0
_NETFILTER = 12  # NETLINK_NETFILTER
# linux/netlink.h, linux/netfilter/nfnetlink.h, linux/netfilter/nfnetlink_conntrack.h
_HEADER, _FAMILY, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBH"), struct.Struct("=HH")
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_ERROR, _DONE = 2, 3
_GET, _DELETE = 0x101, 0x102
_NESTED, _KIND = 0x8000, 0x3FFF
_TUPLE_ORIG, _TUPLE_IP, _V4_SRC, _V6_SRC = 1, 1, 1, 3
_READ_BYTES = 1 << 18


def forget(address: IPv4Address | IPv6Address) -> int:
    """Forget the connections that an address has begun; return how many those were. Raises ``OSError``."""
    family, by_source = (socket.AF_INET, _V4_SRC) if address.version == 4 else (socket.AF_INET6, _V6_SRC)
    # SAFETY: deletes what one address, a link's own, has begun, and nothing else.
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER) as kernel:
        kernel.bind((0, 0))
        kernel.settimeout(ANSWER_S)
        # All are listed: some kernels know no filter here, and in others the one for IPv6 is the wrong way round.
        kernel.send(_message(_GET, _DUMP, family, b""))
        listed = [one for data in _parts(kernel) if address.packed in data for one in _tuples(data)]
        found = [one for one in listed if _part(_part(one, _TUPLE_IP), by_source) == address.packed]
        for one in found:
            kernel.send(_message(_DELETE, _ACK, family, _attribute(_TUPLE_ORIG | _NESTED, one)))
            with suppress(FileNotFoundError):  # it has just ended by itself
                _check(kernel.recv(_READ_BYTES))
    return len(found)


def _parts(kernel: socket.socket) -> Iterator[bytes]:
    """Yield what the kernel sends until it says that this was all."""
    while True:
        data = kernel.recv(_READ_BYTES)
        if _HEADER.unpack_from(data)[1] == _ERROR:
            _check(data)
        yield data
        # The last of all messages is a header and a status.
        if _HEADER.unpack_from(data, len(data) - _HEADER.size - 4)[:2] == (_HEADER.size + 4, _DONE):
            return


def _tuples(data: bytes) -> Iterator[bytes]:
    """Yield the original direction of every connection that is listed there."""
    place = 0
    while place < len(data):
        size, kind = _HEADER.unpack_from(data, place)[:2]
        head = place + _HEADER.size + _FAMILY.size
        if kind != _DONE:
            yield _part(data[head : place + size], _TUPLE_ORIG)
        place += -(-size // 4) * 4


def _part(data: bytes, kind: int) -> bytes:
    return next((value for name, value in _attributes(data) if name == kind), b"")


def _check(data: bytes) -> None:
    (number,) = struct.unpack_from("=i", data, _HEADER.size)
    if number:
        raise OSError(-number, "The kernel's table of connections")


def _message(kind: int, flags: int, family: int, attributes: bytes) -> bytes:
    body = _FAMILY.pack(family, 0, 0) + attributes
    return _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, 1, 0) + body


def _attribute(kind: int, data: bytes) -> bytes:
    size = _ATTRIBUTE.size + len(data)
    return _ATTRIBUTE.pack(size, kind) + data + bytes(-size % 4)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, place)
        yield kind & _KIND, data[place + _ATTRIBUTE.size : place + size]
        place += max(-(-size // 4) * 4, _ATTRIBUTE.size)

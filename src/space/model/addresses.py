"""IP addresses: which are on the public internet, and what an operator allows besides."""

import ipaddress
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# What of IPv6 is given out for everybody's use; what lies outside is local, multicast, or stands for something else.
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
# Within it: 6to4, which stands for an IPv4 address, protocols' own (Teredo among them), and documentation.
_NOT_PUBLIC_V6 = tuple(map(ipaddress.IPv6Network, ("2002::/16", "2001::/23", "2001:db8::/32", "3fff::/20")))
# What `is_global` takes for public and is not: protocols' own (one cloud's metadata service lies there), the relays of
# 6to4, and the address at which another cloud's hosts answer its guests.
_NOT_PUBLIC_V4 = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))


class Allowed:
    """What the operator allows besides public addresses: names, and networks."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._names: set[str] = set()
        self._networks: list[Network] = []
        for entry in entries:
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                self._names.add(entry.lower().rstrip("."))

    def name(self, host: str) -> bool:
        return host.lower().rstrip(".") in self._names

    def address(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def host(self, host: str) -> bool:
        """Whether a URL's host is allowed as it is written there."""
        literal = as_address(host)
        return self.name(host) if literal is None else self.address(literal)


def is_public(address: Address) -> bool:
    """Whether an address is one on the public internet, and no other way to write one that is not."""
    if isinstance(address, ipaddress.IPv6Address):
        return (
            address in _GLOBAL_V6
            and address.is_global
            and address.scope_id is None
            and not any(address in network for network in _NOT_PUBLIC_V6)
        )
    return (
        address.is_global
        and not (address.is_multicast or address.is_reserved or address.is_unspecified)
        and not any(address in network for network in _NOT_PUBLIC_V4)
    )


def as_address(host: str) -> Address | None:
    """Return the address that a URL's host is, or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None

"""Names and addresses of links, which follow from the instance and a number alone.

The link of index *n* has at the host's end the name ``<instance>-<n in hex>``; the addresses are the *n*-th pair of the
instance's ranges.
"""

import hashlib
import ipaddress
from dataclasses import dataclass

# The range for benchmarks between networks (RFC 2544): never routed, and unlike 10/8 or 100.64/10 in use by nobody's
# hosts, clouds or VPNs. Split into blocks so that installations side by side on one host do not meet.
RANGE_V4 = ipaddress.IPv4Network("198.18.0.0/15")
BLOCKS = 32
LINKS_MAX = RANGE_V4.num_addresses // 2 // BLOCKS
HOST_MAC, GUEST_MAC = "02:53:50:00", "02:53:50:01"
"""Locally administered, the index behind them."""


@dataclass(frozen=True, slots=True)
class Link:
    """Names and addresses of one link; a pure function of instance and index."""

    index: int
    interface: str
    host_v4: ipaddress.IPv4Address
    guest_v4: ipaddress.IPv4Address
    host_v6: ipaddress.IPv6Address
    guest_v6: ipaddress.IPv6Address

    @property
    def host_mac(self) -> str:
        return f"{HOST_MAC}:{self.index >> 8:02x}:{self.index & 0xFF:02x}"

    @property
    def guest_mac(self) -> str:
        return f"{GUEST_MAC}:{self.index >> 8:02x}:{self.index & 0xFF:02x}"


def link(instance: str, index: int) -> Link:
    """Return link `index` of an installation."""
    digest = hashlib.sha256(f"space link {instance}".encode()).digest()
    block = digest[0] % BLOCKS
    v4 = RANGE_V4[(block * LINKS_MAX + index) * 2]
    # A unique local prefix as RFC 4193 wants it (40 bits that nobody else is likely to have), the index as subnet.
    v6 = ipaddress.IPv6Address(b"\xfd" + digest[1:6] + index.to_bytes(2, "big") + bytes(8))
    return Link(index, f"{instance}-{index:04x}", v4, v4 + 1, v6, v6 + 1)


def netns_name(instance: str, machine_id: str) -> str:
    return f"{instance}-{machine_id}"

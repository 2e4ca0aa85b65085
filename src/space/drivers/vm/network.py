"""A virtual machine's network: inside its own namespace, between the tap device that is its cable and the link.

Every machine has the same addresses inside, and the namespace translates them to those of its link. So memory that is
restored under another link needs no new addresses: its sockets stay as they are, and what led out is dead, because the
namespace knows no connection that did not begin in it. Link, firewall and gateway see the link's own addresses alone,
as of machines of any driver.
"""

import ipaddress

TAP = "tap0"
# The prefix for such inner hops (RFC 7335): nobody's hosts have these. And a local one (RFC 4193) for version 6.
GUEST_V4 = ipaddress.IPv4Interface("192.0.0.2/29")
HOST_V4 = ipaddress.IPv4Interface("192.0.0.1/29")
GUEST_V6 = ipaddress.IPv6Interface("fd53:5041:4345::2/126")
HOST_V6 = ipaddress.IPv6Interface("fd53:5041:4345::1/126")
GUEST_MAC = "02:53:50:02:00:02"
HOST_MAC = "02:53:50:02:00:01"

CONNECTIONS_MAX = 2048
"""What the host's kernel remembers of a machine in its namespace; the link allows fewer, so this is never felt."""

KNOBS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv6/conf/all/forwarding": "1",
    f"net/ipv4/conf/{TAP}/rp_filter": "1",
    f"net/ipv4/conf/{TAP}/accept_redirects": "0",
    f"net/ipv4/conf/{TAP}/send_redirects": "0",
    f"net/ipv6/conf/{TAP}/accept_ra": "0",
    f"net/ipv6/conf/{TAP}/accept_redirects": "0",
}
"""Below ``/proc/sys``, as seen in the machine's namespace."""

DEVICE = f"""\
link set {TAP} address {HOST_MAC}
link set {TAP} addrgenmode none
address add {HOST_V4} dev {TAP}
address add {HOST_V6} dev {TAP} nodad
link set {TAP} up
neighbour replace {GUEST_V4.ip} lladdr {GUEST_MAC} nud permanent dev {TAP}
neighbour replace {GUEST_V6.ip} lladdr {GUEST_MAC} nud permanent dev {TAP}
"""
"""For ``ip -batch``, in the machine's namespace, once the tap device is there."""

RULES = f"""\
table inet space_vm
delete table inet space_vm
table inet space_vm {{
    chain end {{
        type filter hook prerouting priority mangle
        iifname "{TAP}" ct state new,invalid tcp flags & (fin|syn|rst|ack) != syn reject with tcp reset
    }}
    chain translate {{
        type nat hook postrouting priority srcnat
        oifname != "{TAP}" masquerade
    }}
    chain pass {{
        type filter hook forward priority filter; policy drop
        iifname != "{TAP}" ct state established,related accept
        iifname "{TAP}" ct state new ct count over {CONNECTIONS_MAX} drop
        iifname "{TAP}" ip saddr {GUEST_V4.ip} accept
        iifname "{TAP}" ip6 saddr {GUEST_V6.ip} accept
    }}
    chain here {{
        type filter hook input priority filter; policy drop
        iifname "{TAP}" icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        iifname != "{TAP}" accept
    }}
}}
"""
"""For ``nft -f``, in the machine's namespace; loads again over itself."""

"""Every machine's own point-to-point link: a network namespace, one veth pair, one address each way, and nothing let
through.

The link of index *n* follows from the instance and *n* alone: the host's end is ``<instance>-<n in hex>``, the
addresses are the *n*-th pair of the instance's ranges. Indexes are journaled and handed out in turn, so a fresh
machine never gets an address that another one still has or had a moment ago. One nftables table covers all links by a
wildcard on their names: a machine costs no rule, and there is no moment at which a link exists without its rules.
"""

# ruff: noqa: ASYNC240 - names in local directories are looked up in microseconds

import asyncio
import hashlib
import ipaddress
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from space.drivers import programs
from space.errors import HostError, HostFull

NETNS_DIR = Path("/run/netns")
PROGRAM_S = 20.0
# The range for benchmarks between networks (RFC 2544): never routed, and unlike 10/8 or 100.64/10 in use by nobody's
# hosts, clouds or VPNs. Split into blocks so that installations side by side on one host do not meet.
RANGE_V4 = ipaddress.IPv4Network("198.18.0.0/15")
BLOCKS = 32
LINKS_MAX = RANGE_V4.num_addresses // 2 // BLOCKS

_RULES = """\
table inet {instance} {{}}
delete table inet {instance}
table inet {instance} {{
    chain input {{
        type filter hook input priority -200; policy accept;
        iifname "{instance}-*" counter drop
    }}
    chain forward {{
        type filter hook forward priority -200; policy accept;
        iifname "{instance}-*" counter drop
        oifname "{instance}-*" counter drop
    }}
    chain output {{
        type filter hook output priority -200; policy accept;
        oifname "{instance}-*" counter drop
    }}
}}
"""
_CHAINS = ("input", "forward", "output")


@dataclass(frozen=True, slots=True)
class Link:
    """Names and addresses of one link; a pure function of instance and index."""

    index: int
    interface: str
    host_v4: ipaddress.IPv4Address
    guest_v4: ipaddress.IPv4Address
    host_v6: ipaddress.IPv6Address
    guest_v6: ipaddress.IPv6Address


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


class Links:
    """All links of one installation."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._used: set[int] = set()
        self._next = 0

    async def open(self, used: set[int]) -> None:
        """Install the rules if they are not there as they must be; `used` are the indexes that journals know."""
        self._used = set(used)
        self._next = max(used, default=-1) + 1
        NETNS_DIR.mkdir(mode=0o755, exist_ok=True)
        if not await self.guarded():
            # SAFETY: static text; the one thing filled in is the instance's name, which matched ^[a-z][a-z0-9]{0,7}$.
            # The replacement is one transaction: at no moment are links without rules.
            rules = _RULES.format(instance=self._instance).encode()
            await programs.check(["nft", "-f", "-"], stdin=rules, timeout_s=PROGRAM_S)
        if not await self.guarded():
            raise HostError(
                "The rules that keep sandboxes off the network could not be installed.", code="links-unguarded"
            )

    async def guarded(self) -> bool:
        """Whether the kernel holds all of the rules now."""
        listed = await programs.run(["nft", "-j", "list", "table", "inet", self._instance], timeout_s=PROGRAM_S)
        if listed.status:
            return False
        items = json.loads(listed.output)["nftables"]
        hooks = {item["chain"]["hook"] for item in items if "chain" in item and "hook" in item["chain"]}
        dropping = [
            item["rule"]["chain"] for item in items if "rule" in item and {"drop": None} in item["rule"]["expr"]
        ]
        return set(_CHAINS) == hooks and sorted(dropping) == ["forward", "forward", "input", "output"]

    async def reserve(self) -> int:
        """Return an index that no machine has, whose addresses nobody else on this host has either."""
        taken = await _addresses()
        for step in range(LINKS_MAX):
            index = (self._next + step) % LINKS_MAX
            found = link(self._instance, index)
            if index not in self._used and not {str(found.host_v4), str(found.guest_v4)} & taken:
                self._used.add(index)
                self._next = (index + 1) % LINKS_MAX
                return index
        raise HostFull("All link addresses are in use.", code="links-full")

    def free(self, index: int) -> None:
        self._used.discard(index)

    async def create(self, machine_id: str, index: int) -> Path:
        """Make the link, up and addressed at both ends; return its network namespace. Replaces a half-made one."""
        found = link(self._instance, index)
        name = netns_name(self._instance, machine_id)
        await self.delete(machine_id, index)
        # SAFETY: all words are made from the instance, the index and a validated id. The rules are in place before the
        # interface exists (`open`), and match it by name from the moment it does.
        await _ip([], f"netns add {name}")
        host_end = found.interface
        host = [f"link add {host_end} type veth peer name eth0 netns {name}", f"link set {host_end} addrgenmode none"]
        await _ip([], *host)
        _harden(host_end)
        await asyncio.gather(
            _ip(
                [],
                f"address add {found.host_v4}/31 dev {host_end}",
                f"address add {found.host_v6}/127 dev {host_end} nodad",
                f"link set {host_end} up",
            ),
            _ip(
                ["-n", name],
                "link set eth0 addrgenmode none",
                f"address add {found.guest_v4}/31 dev eth0",
                f"address add {found.guest_v6}/127 dev eth0 nodad",
                "link set lo up",
                "link set eth0 up",
                # No default route: what is not let through fails at once inside, instead of after a timeout.
            ),
        )
        return NETNS_DIR / name

    async def delete(self, machine_id: str, index: int | None) -> None:
        """Remove both ends and the namespace. Not there: success."""
        if index is not None:
            await self._delete_interface(link(self._instance, index).interface)
        name = netns_name(self._instance, machine_id)
        if (NETNS_DIR / name).exists():
            # SAFETY: the name is the instance's with a validated id; the namespace was made for it.
            await programs.run(["ip", "netns", "delete", name], timeout_s=PROGRAM_S)
            if (NETNS_DIR / name).exists():
                raise HostError("The machine's network namespace could not be removed.", code="link-stuck")

    def known(self) -> set[str]:
        """Return the ids of the machines that have a namespace."""
        prefix = netns_name(self._instance, "")
        return (
            {path.name.removeprefix(prefix) for path in NETNS_DIR.glob(f"{prefix}*")} if NETNS_DIR.is_dir() else set()
        )

    async def sweep(self, used: set[int]) -> None:
        """Remove interfaces of ours whose index is not in `used`."""
        ours = re.compile(rf"{self._instance}-([0-9a-f]{{4}})")
        for name in [path.name for path in Path("/sys/class/net").iterdir()]:
            if (match := ours.fullmatch(name)) and int(match[1], 16) not in used:
                await self._delete_interface(name)

    async def close(self) -> None:
        """Remove the rules, once no link is left."""
        await programs.run(["nft", "delete", "table", "inet", self._instance], timeout_s=PROGRAM_S)

    async def _delete_interface(self, name: str) -> None:
        if not Path("/sys/class/net", name).exists():
            return
        # SAFETY: the name begins with the instance's prefix and ends in four hexadecimal digits: only our own links
        # match.
        await programs.run(["ip", "link", "delete", name], timeout_s=PROGRAM_S)
        if Path("/sys/class/net", name).exists():
            raise HostError("The machine's link could not be removed.", code="link-stuck")


async def _ip(options: list[str], *lines: str) -> None:
    """Carry out lines of ``ip -batch``: two programs a link instead of twelve, and no faster through netlink from
    Python.
    """
    words = ["ip", *options, "-batch", "-"]
    await programs.check(words, stdin="\n".join(lines).encode(), timeout_s=PROGRAM_S)


async def _addresses() -> set[str]:
    """Return every IPv4 address that this host has."""
    output = await programs.check(["ip", "-4", "-j", "address", "show"], timeout_s=PROGRAM_S)
    return {info["local"] for item in json.loads(output) for info in item.get("addr_info", []) if "local" in info}


def _harden(interface: str) -> None:
    """The host's end believes nothing that the guest says about the network."""
    v4, v6 = Path("/proc/sys/net/ipv4/conf", interface), Path("/proc/sys/net/ipv6/conf", interface)
    knobs = {
        v4 / "rp_filter": "1",  # only from the address that the route back leads to
        v4 / "arp_ignore": "2",  # answer for this link's own address only
        v4 / "accept_redirects": "0",
        v4 / "send_redirects": "0",
        v4 / "accept_source_route": "0",
        v6 / "accept_ra": "0",
        v6 / "accept_redirects": "0",
        v6 / "autoconf": "0",
    }
    # SAFETY: the interface's name is made of the instance and a number, so each path is a knob of our own link; every
    # value only takes something away.
    for knob, value in knobs.items():
        with suppress(FileNotFoundError):  # a host without IPv6 has none of these, and then no IPv6 to guard
            knob.write_text(value)

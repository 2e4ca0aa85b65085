"""Every machine's own point-to-point link: a network namespace, one veth pair, one address each way, and beyond it the
gateway alone.

Indexes are journaled and handed out in turn, so a fresh machine never gets an address that another one still has or had
a moment ago. The rules (`firewall.py`) cover all links by a wildcard on their names, so there is no moment at which a
link exists without them; of its own a link has an entry there that lets its addresses through, and entries in the
register (`register.py`) that say whose they are. Neighbours are told to both ends and learned by neither.
"""

# ruff: noqa: ASYNC240 - names in local directories are looked up in microseconds

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from space.broker import conntrack
from space.broker.addressing import LINKS_MAX, Link, link, netns_name
from space.broker.firewall import Firewall
from space.broker.register import Register
from space.drivers import programs
from space.errors import HostError, HostFull
from space.settings import Settings

NETNS_DIR = Path("/run/netns")
PROGRAM_S = 20.0
_LOCAL = re.compile(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL")

log = structlog.get_logger()


class Links:
    """All links of one installation."""

    def __init__(self, settings: Settings) -> None:
        self._instance = settings.instance
        self._firewall = Firewall(settings.instance, settings.gateway_port, settings.gateway_dns_port)
        self._register = Register(settings.links_dir)
        self._used: set[int] = set()
        self._next = 0

    async def open(self, used: set[int]) -> None:
        """Install the rules if they are not there as they must be; `used` are the indexes that journals know.

        Links that journals do not know are cut off.
        """
        self._used = set(used)
        self._next = max(used, default=-1) + 1
        NETNS_DIR.mkdir(mode=0o755, exist_ok=True)
        known = [link(self._instance, index) for index in sorted(used & set(self.interfaces().values()))]
        self._register.open(known)
        await self._firewall.install(known)

    async def guarded(self) -> bool:
        """Whether the kernel holds all of the rules now."""
        return await self._firewall.holds()

    async def reserve(self) -> int:
        """Return an index that no machine has, whose addresses nobody else on this host has either."""
        taken = _addresses()
        for step in range(LINKS_MAX):
            index = (self._next + step) % LINKS_MAX
            found = link(self._instance, index)
            if index not in self._used and not {str(found.host_v4), str(found.guest_v4)} & taken:
                self._used.add(index)
                self._next = (index + 1) % LINKS_MAX
                return index
        raise HostFull("All link addresses are in use.", code="links-full")

    def hold(self, index: int) -> bool:
        """Take a link that was kept for a machine; False when somebody on this host has its address by now."""
        found = link(self._instance, index)
        self._used.add(index)
        return not {str(found.host_v4), str(found.guest_v4)} & _addresses()

    def free(self, index: int) -> None:
        self._used.discard(index)

    async def create(self, machine_id: str, index: int, former: Sequence[int] = ()) -> Path:
        """Make the link, up and addressed at both ends; return its network namespace. Replaces a half-made one.

        Nothing leaves by it until it is entered somebody's (`enter`). The machine's end has the addresses of the links
        `former`, too: nothing can be sent from them, but sockets that have them are as they were.
        """
        found = link(self._instance, index)
        others = [link(self._instance, one) for one in former if one != index]
        name = netns_name(self._instance, machine_id)
        self._register.strike(found)
        await self.delete_interface(found.interface)
        await self._remove_netns(name)
        # SAFETY: all words are made from the instance, the index and a validated id. The rules are in place before the
        # interface exists (`open`), and match it by name from the moment it does.
        host_end, host_mac, guest_mac = found.interface, found.host_mac, found.guest_mac
        await asyncio.gather(
            self._firewall.admit(found),
            _ip(
                [],
                f"netns add {name}",
                f"link add {host_end} address {host_mac} type veth peer name eth0 address {guest_mac} netns {name}",
                f"link set {host_end} addrgenmode none",
            ),
        )
        _harden(host_end)
        await asyncio.gather(
            _ip(
                [],
                f"address add {found.host_v4}/31 dev {host_end}",
                f"address add {found.host_v6}/127 dev {host_end} nodad",
                f"link set {host_end} up",
                f"neighbour replace {found.guest_v4} lladdr {guest_mac} nud permanent dev {host_end}",
                f"neighbour replace {found.guest_v6} lladdr {guest_mac} nud permanent dev {host_end}",
            ),
            _ip(
                ["-n", name],
                "link set eth0 addrgenmode none",
                f"address add {found.guest_v4}/31 dev eth0",
                f"address add {found.guest_v6}/127 dev eth0 nodad",
                *(f"address add {one.guest_v4}/31 dev eth0" for one in others),
                *(f"address add {one.guest_v6}/127 dev eth0 nodad" for one in others),
                "link set lo up",
                "link set eth0 up",
                f"neighbour replace {found.host_v4} lladdr {host_mac} nud permanent dev eth0",
                f"neighbour replace {found.host_v6} lladdr {host_mac} nud permanent dev eth0",
                f"route add default via {found.host_v4} src {found.guest_v4}",
                f"route add default via {found.host_v6} src {found.guest_v6}",
            ),
        )
        return NETNS_DIR / name

    def enter(self, index: int, machine: str) -> None:
        """Say whose the link is, from now on. Repeatable."""
        self._register.enter(link(self._instance, index), machine)

    async def delete(self, machine_id: str, index: int | None) -> None:
        """Remove both ends, the namespace and all that is known of the link. Not there: success."""
        name, found = netns_name(self._instance, machine_id), None if index is None else link(self._instance, index)
        if found is None:
            await self._remove_netns(name)
            return
        self._register.strike(found)
        await self.delete_interface(found.interface)
        forgotten = asyncio.to_thread(_forget, found)
        await asyncio.gather(self._remove_netns(name), self._firewall.expel(found), forgotten)

    async def _remove_netns(self, name: str) -> None:
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

    def interfaces(self) -> dict[str, int]:
        """Return the host's ends of all links of this installation, with their indexes."""
        ours = re.compile(rf"{self._instance}-([0-9a-f]{{4}})")
        found = ((path.name, ours.fullmatch(path.name)) for path in Path("/sys/class/net").iterdir())
        return {name: int(match[1], 16) for name, match in found if match}

    def others(self, used: set[int]) -> list[str]:
        """Return the entries of addresses that are of no link in `used`."""
        return self._register.others(link(self._instance, index) for index in used)

    def strike(self, name: str) -> None:
        """Remove one of `others`. Not there: success."""
        self._register.remove(name)

    async def sweep(self, used: set[int]) -> None:
        """Remove what there is of links whose index is not in `used`."""
        for name, index in self.interfaces().items():
            if index not in used:
                await self.delete_interface(name)
        self._register.open([link(self._instance, index) for index in used])

    async def close(self) -> None:
        """Remove the rules, once no link is left."""
        await self._firewall.remove()

    async def delete_interface(self, name: str) -> None:
        """Remove one of `interfaces`. Not there: success."""
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


def _forget(gone: Link) -> None:
    """Have the kernel forget the connections of a link that is no more."""
    try:
        for address in (gone.guest_v4, gone.guest_v6):
            conntrack.forget(address)
    except OSError as error:
        # They end by themselves after their time, and whoever has the address next can only send into them.
        log.warning("connections-not-forgotten", interface=gone.interface, reason=error.strerror)


def _addresses() -> set[str]:
    """Return every IPv4 address that this host has; from the routes, as starting `ip` takes milliseconds."""
    return set(_LOCAL.findall(Path("/proc/net/fib_trie").read_text()))


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

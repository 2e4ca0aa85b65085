"""What may come out of links and go into them: one nftables table, the same few rules however many links there are.

All of a machine's TCP leads to the gateway, and its DNS, wherever it was sent; nothing else gets anywhere. What can be
refused at once is refused, not swallowed: inside, that fails quickly, and runsc cannot write the image of a machine in
which a connection waits for an answer. What floods is cut off before it costs the host memory: a link has so many
beginnings a second and so many connections, and packets with another source than the link's own leave no trace at all.
"""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from space.broker.addressing import Link
from space.drivers import programs
from space.errors import HostError

PROGRAM_S = 20.0
CONNECTIONS_MAX = 1024
"""Open at one time on one link."""
BEGINNINGS_S, BEGINNINGS_BURST = 200, 1000
"""New connections a second, and how many may come at once after a pause."""
QUESTIONS_S, QUESTIONS_BURST = 200, 250
"""DNS packets."""

# Priorities: -300 is before connection tracking, -150 after it, -100 where destinations are translated.
_RULES = """\
table inet {instance} {{}}
delete table inet {instance}
table inet {instance} {{
    set sources4 {{ type ifname . ipv4_addr; }}
    set sources6 {{ type ifname . ipv6_addr; }}
    set beginnings {{ type ifname; flags dynamic; timeout 1m; size 65536; }}
    set questions {{ type ifname; flags dynamic; timeout 1m; size 65536; }}
    set refusals {{ type ifname; flags dynamic; timeout 1m; size 65536; }}
    set connections {{ type ifname; flags dynamic; size 65536; }}
    ct timeout dns4 {{ protocol udp; l3proto ip; policy = {{ unreplied : 5, replied : 5 }}; }}
    ct timeout dns6 {{ protocol udp; l3proto ip6; policy = {{ unreplied : 5, replied : 5 }}; }}
    ct timeout tcp4 {{ protocol tcp; l3proto ip; policy = {{ {tcp} }}; }}
    ct timeout tcp6 {{ protocol tcp; l3proto ip6; policy = {{ {tcp} }}; }}
    chain arriving {{
        type filter hook prerouting priority -300; policy accept;
        iifname "{instance}-*" goto from_guest
    }}
    chain from_guest {{
        meta nfproto ipv4 iifname . ip saddr != @sources4 counter drop
        meta nfproto ipv6 iifname . ip6 saddr != @sources6 counter drop
        meta l4proto tcp tcp flags & (fin | syn | rst | ack) != syn accept
        meta l4proto tcp update @beginnings {{ iifname limit rate over {beginnings} }} counter reject with tcp reset
        meta l4proto tcp accept
        udp dport 53 update @questions {{ iifname limit rate over {questions} }} counter drop
        udp dport 53 accept
        update @refusals {{ iifname limit rate over 20/second burst 50 packets }} counter drop
        counter reject with icmpx admin-prohibited
    }}
    chain tracked {{
        type filter hook prerouting priority -150; policy accept;
        iifname "{instance}-*" ct state new goto begun
        iifname "{instance}-*" ct state invalid counter drop
    }}
    chain begun {{
        meta l4proto tcp tcp flags & (fin | syn | rst | ack) != syn counter reject with tcp reset
        meta l4proto tcp add @connections {{ iifname ct count over {connections} }} counter reject with tcp reset
        meta nfproto ipv4 meta l4proto tcp ct timeout set "tcp4"
        meta nfproto ipv6 meta l4proto tcp ct timeout set "tcp6"
        meta nfproto ipv4 meta l4proto udp ct timeout set "dns4"
        meta nfproto ipv6 meta l4proto udp ct timeout set "dns6"
    }}
    chain redirected {{
        type nat hook prerouting priority -100; policy accept;
        iifname "{instance}-*" meta l4proto {{ tcp, udp }} th dport 53 redirect to :{dns_port}
        iifname "{instance}-*" meta l4proto tcp redirect to :{port}
    }}
    chain input {{
        type filter hook input priority -200; policy accept;
        iifname "{instance}-*" ct status dnat tcp dport {{ {port}, {dns_port} }} accept
        iifname "{instance}-*" ct status dnat udp dport {dns_port} accept
        iifname "{instance}-*" meta l4proto tcp counter reject with tcp reset
        iifname "{instance}-*" counter drop
        tcp dport {{ {port}, {dns_port} }} ct state new counter reject with tcp reset
        udp dport {dns_port} ct state new counter drop
    }}
    chain forward {{
        type filter hook forward priority -200; policy accept;
        iifname "{instance}-*" counter drop
        oifname "{instance}-*" counter drop
    }}
    chain output {{
        type filter hook output priority -150; policy accept;
        oifname "{instance}-*" ct state established,related accept
        oifname "{instance}-*" tcp flags & rst == rst accept
        oifname "{instance}-*" icmp type destination-unreachable accept
        oifname "{instance}-*" icmpv6 type destination-unreachable accept
        oifname "{instance}-*" counter drop
        tcp sport {{ {port}, {dns_port} }} tcp flags & rst != rst counter drop
        udp sport {dns_port} counter drop
    }}
}}
"""
# Connections that nobody has any more are forgotten sooner than the host's own; one that is idle is not.
_TCP = "syn_sent : 20, syn_recv : 20, fin_wait : 30, close_wait : 60, last_ack : 15, time_wait : 10, close : 5"
# What is not a rule but has come of using it.
_PASSING = frozenset({"handle", "elem", "packets", "bytes"})


@dataclass(frozen=True, slots=True)
class Firewall:
    """The rules of one installation. ``port`` and ``dns_port`` are the gateway's."""

    instance: str
    port: int
    dns_port: int

    def rules(self) -> str:
        """Return what nft reads. Nothing is filled in but the instance's name, which is of its pattern, and numbers."""
        return _RULES.format(
            instance=self.instance,
            port=self.port,
            dns_port=self.dns_port,
            tcp=_TCP,
            connections=CONNECTIONS_MAX,
            beginnings=f"{BEGINNINGS_S}/second burst {BEGINNINGS_BURST} packets",
            questions=f"{QUESTIONS_S}/second burst {QUESTIONS_BURST} packets",
        )

    async def install(self, links: Iterable[Link]) -> None:
        """See to it that exactly these rules hold, for exactly these links; they hold at every moment meanwhile."""
        text = self._sources("add", links)
        if await self.holds():
            text = "".join(f"flush set inet {self.instance} {name}\n" for name in ("sources4", "sources6")) + text
        else:
            text = self.rules() + text
        await self._tell(text)
        if not await self.holds():
            raise HostError(
                "The rules that keep sandboxes off the network could not be installed.", code="links-unguarded"
            )

    async def holds(self) -> bool:
        """Whether the kernel holds all of the rules now, and nothing else in their table."""
        there, wanted = await asyncio.gather(self._listed(), self._wanted())
        return there is not None and there == wanted

    async def is_installed(self) -> bool:
        """Whether there is a table of this installation's at all."""
        return await self._listed() is not None

    async def admit(self, link: Link) -> None:
        """Let a link's own addresses through. Repeatable."""
        await self._tell(self._sources("add", [link]))

    async def expel(self, link: Link) -> None:
        """Let nothing through from a link any more. Repeatable, and also where somebody has removed the rules."""
        # What is not there cannot be deleted, but for the moment of one transaction it can always be there.
        try:
            await self._tell(self._sources("add", [link]) + self._sources("delete", [link]))
        except HostError:
            if await self.is_installed():
                raise

    async def remove(self) -> None:
        """Remove the rules. Not there: success."""
        await programs.run(["nft", "delete", "table", "inet", self.instance], timeout_s=PROGRAM_S)

    def _sources(self, verb: str, links: Iterable[Link]) -> str:
        found = list(links)
        if not found:
            return ""
        head, v4, v6 = (
            f"{verb} element inet {self.instance}",
            ", ".join(f'"{one.interface}" . {one.guest_v4}' for one in found),
            ", ".join(f'"{one.interface}" . {one.guest_v6}' for one in found),
        )
        return f"{head} sources4 {{ {v4} }}\n{head} sources6 {{ {v6} }}\n"

    async def _tell(self, text: str) -> None:
        # SAFETY: words of ours, and names and addresses that follow from the instance and numbers. nft carries all of
        # it out in one transaction or nothing: at no moment are links without rules.
        await programs.check(["nft", "-f", "-"], stdin=text.encode(), timeout_s=PROGRAM_S)

    async def _listed(self) -> Any:
        done = await programs.run(["nft", "-j", "list", "table", "inet", self.instance], timeout_s=PROGRAM_S)
        return None if done.status else _lasting(json.loads(done.output)["nftables"])

    async def _wanted(self) -> Any:
        """Return what the kernel says of the rules where nothing else is: in a network namespace that ends at once."""
        show = f"nft -f - && exec nft -j list table inet {self.instance}"
        words = ["unshare", "--net", "sh", "-c", show]
        # SAFETY: the one thing filled in is the instance's name, which matched ^[a-z][a-z0-9]{0,7}$.
        output = await programs.check(words, stdin=self.rules().encode(), timeout_s=PROGRAM_S)
        return _lasting(json.loads(output)["nftables"])


def _lasting(item: Any) -> Any:
    """Return what nft has listed without what changes while rules are used."""
    if isinstance(item, list):
        return [_lasting(one) for one in item]
    if isinstance(item, dict):
        return {name: _lasting(value) for name, value in item.items() if name not in _PASSING}
    return item

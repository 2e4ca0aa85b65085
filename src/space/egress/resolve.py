"""Names to addresses that may be dialled: asked by us, looked at one by one, and dialled as they were looked at.

The name servers are the operator's. Nothing that a guest said about addresses has a part in it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import aiohappyeyeballs
import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver

from space.egress.denials import Denied, Failed
from space.model.addresses import Address, Allowed, is_public

RESOLVE_S = 5.0
CONNECT_S = 10.0
EYEBALLS_S = 0.25
"""How long an address of one family is tried before one of the other is tried beside it (RFC 8305 §5)."""
KEPT = 4096
TTL_S_MAX, TTL_S_MIN, UNKNOWN_TTL_S = 60.0, 1.0, 1.0
ADDRESSES_MAX = 16
LOOKED_AT_MAX = 64
"""Of the addresses of either kind in an answer; it has room for thousands, each of which costs a moment to look at."""
_ANY_PORT = 9
_TYPES = (dns.rdatatype.AAAA, dns.rdatatype.A)


@dataclass(frozen=True, slots=True)
class _Known:
    until: float
    addresses: tuple[Address, ...]
    refused: tuple[Address, ...]


class Resolver:
    """Resolves and dials. Addresses that are not public are left out unless the operator allows them or the name."""

    def __init__(self, name_servers: Sequence[str] | None, private_hosts: Sequence[str]) -> None:
        self._resolver = dns.asyncresolver.Resolver(configure=False)
        self._resolver.nameservers = list(name_servers) if name_servers is not None else system_name_servers()
        self._resolver.lifetime = RESOLVE_S
        self._allowed = Allowed(private_hosts)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._asking: dict[str, asyncio.Task[_Known]] = {}

    def permits(self, address: Address) -> bool:
        """Whether a connection may go to an address. This host's own are not public, whatever they are: its services
        are kept from the world by rules that a connection from here does not meet.
        """
        return self._allowed.address(address) or (is_public(address) and not is_own(address))

    async def addresses(self, host: str) -> tuple[Address, ...]:
        """Return the permitted addresses of a normalised name, at least one; raise ``Denied`` or ``Failed``."""
        known = self._known.get(host)
        if known is None or known.until < time.monotonic():
            known = await self._ask_once(host)
        if known.addresses:
            return known.addresses
        if known.refused:
            raise Denied(
                "address-refused",
                f"{host} has no public address. The operator can allow it by `egress_private_hosts`.",
            )
        raise Failed("name-not-found", 502, f"{host} has no address.")

    async def dial(self, host: str, port: int) -> socket.socket:
        """Connect to one of a name's permitted addresses."""
        return await self.dial_addresses(await self.addresses(host), port)

    async def dial_addresses(self, addresses: Iterable[Address], port: int) -> socket.socket:
        """Connect to one of these addresses, which the caller has looked at."""
        infos = [
            (
                socket.AF_INET if isinstance(one, ipaddress.IPv4Address) else socket.AF_INET6,
                socket.SOCK_STREAM,
                socket.IPPROTO_TCP,
                "",
                (str(one), port) if isinstance(one, ipaddress.IPv4Address) else (str(one), port, 0, 0),
            )
            for one in addresses
        ]
        try:
            async with asyncio.timeout(CONNECT_S):
                sock = await aiohappyeyeballs.start_connection(infos, happy_eyeballs_delay=EYEBALLS_S)
        except TimeoutError as error:
            raise Failed("connect-timeout", 504, "The server does not answer.") from error
        except OSError as error:
            raise Failed("connect-failed", 502, "The server cannot be reached.") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    async def _ask_once(self, host: str) -> _Known:
        """Ask once for all who want to know at the same time."""
        task = self._asking.get(host)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask(host))
            self._asking[host] = task
            task.add_done_callback(lambda task: self._answered(host, task))
        return await asyncio.shield(task)

    def _answered(self, host: str, task: asyncio.Task[_Known]) -> None:
        self._asking.pop(host, None)
        if not task.cancelled():
            task.exception()  # is known by that: whoever wanted the answer may be gone

    async def _ask(self, host: str) -> _Known:
        answers = await asyncio.gather(*(self._ask_type(host, kind) for kind in _TYPES), return_exceptions=True)
        found: list[Address] = []
        ttl_s, failure = TTL_S_MAX, None
        for answer in answers:
            if isinstance(answer, BaseException):
                failure = answer
                continue
            found += answer[1]
            ttl_s = min(ttl_s, answer[0])
        if not found and failure is not None:
            raise failure
        now = time.monotonic()
        if not found:
            return self._keep(host, _Known(now + UNKNOWN_TTL_S, (), ()))
        named = self._allowed.name(host)
        judged = [(one, named or self.permits(one)) for one in found]
        good = tuple(one for one, permitted in judged if permitted)
        bad = tuple(one for one, permitted in judged if not permitted)
        return self._keep(host, _Known(now + max(ttl_s, TTL_S_MIN), good[:ADDRESSES_MAX], bad[:ADDRESSES_MAX]))

    def _keep(self, host: str, known: _Known) -> _Known:
        self._known[host] = known
        self._known.move_to_end(host)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return known

    async def _ask_type(self, host: str, kind: dns.rdatatype.RdataType) -> tuple[float, list[Address]]:
        name = dns.name.from_text(host + ".")
        try:
            answer = await self._resolver.resolve(name, kind, search=False, raise_on_no_answer=False)
        except dns.resolver.NXDOMAIN:
            return TTL_S_MAX, []
        except dns.exception.Timeout as error:
            raise Failed("name-server-timeout", 504, "The name server does not answer.") from error
        except dns.exception.DNSException as error:
            raise Failed("name-server-failed", 502, "The name server gives no usable answer.") from error
        except OSError as error:
            raise Failed("name-server-failed", 502, "The name server cannot be reached.") from error
        if answer.rrset is None:
            return TTL_S_MAX, []
        some = islice(answer.rrset, LOOKED_AT_MAX)
        return float(answer.rrset.ttl), [ipaddress.ip_address(item.address) for item in some]


def is_own(address: Address) -> bool:
    """Whether an address is this host's: what is sent there comes from there."""
    with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((str(address), _ANY_PORT))  # sends nothing
        except OSError:
            return False  # there is no way there at all
        return ipaddress.ip_address(sock.getsockname()[0]) == address


def system_name_servers(path: Path = Path("/etc/resolv.conf")) -> list[str]:
    """Return the host's own name servers."""
    found: list[str] = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            found.append(words[1].partition("%")[0])
    return found or ["127.0.0.1"]

"""The name server of every sandbox. Names that its policy allows are the gateway itself; all others are refused.

So no address that a guest holds means anything, a forged answer leads nowhere else, and no question of a guest leaves
the host. The exception are policies with rules for networks, which let connections out by address: names that such a
policy allows are resolved as the gateway resolves them, and answered with what a rule covers. A sandbox's own host
name is the sandbox itself.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter, OrderedDict
from typing import cast

import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from space.egress.attachments import Attachment, Attachments
from space.egress.audit import Audit, Record
from space.egress.decide import decide_host, may_answer, may_resolve
from space.egress.denials import NotCarriedOut
from space.egress.links import Links, Source
from space.egress.metrics import Metrics
from space.egress.resolve import Resolver
from space.model.hosts import HOST_CHARS_MAX, normalise_host

TTL_S = 5
"""A policy, and the address of a sandbox that wakes, may change at any time."""
QUESTION_BYTES_MAX = 4096
RATE_PER_S, BURST = 200.0, 400.0
RESOLVING_MAX = 512
ASKING_PER_SANDBOX, ASKING = 32, 2048
"""Questions that wait to be answered. Name servers outside that say nothing make them wait, and whose names these are
is up to a guest."""
RECORDED_S, RECORDED_MAX = 10.0, 4096
TCP_SILENCE_S, TCP_QUESTIONS_MAX = 10.0, 256
_HTTPS_PORT = 443
_ADDRESSES = {dns.rdatatype.A: 4, dns.rdatatype.AAAA: 6}
_LOOPBACK = {dns.rdatatype.A: "127.0.0.1", dns.rdatatype.AAAA: "::1"}


class Names:
    """Answers questions of guests."""

    def __init__(
        self, links: Links, attachments: Attachments, audit: Audit, metrics: Metrics, resolver: Resolver
    ) -> None:
        self._links = links
        self._attachments = attachments
        self._audit = audit
        self._metrics = metrics
        self._resolver = resolver
        self._asking: Counter[str] = Counter()
        self._budgets: dict[str, tuple[float, float]] = {}
        self._recorded: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._resolving = asyncio.Semaphore(RESOLVING_MAX)

    async def answer(self, address: str, data: bytes) -> bytes | None:
        """Return the answer to a message from that address; None: there is none to give."""
        source = self._links.source(address)
        if source is None or len(data) > QUESTION_BYTES_MAX or not self._within_budget(source.sandbox):
            return None
        try:
            question = dns.message.from_wire(data)
            if question.flags & dns.flags.QR:
                return None
            response = dns.message.make_response(question, recursion_available=True)
        except (dns.exception.DNSException, ValueError, struct.error, IndexError):
            return None
        if question.opcode() != dns.opcode.QUERY or len(question.question) != 1:
            response.set_rcode(dns.rcode.NOTIMP)
        elif self._asking[source.sandbox] >= ASKING_PER_SANDBOX:
            return None  # who asks will ask again
        else:
            self._asking[source.sandbox] += 1
            try:
                await self._fill(response, source)
            finally:
                self._asking[source.sandbox] -= 1
                if not self._asking[source.sandbox]:
                    del self._asking[source.sandbox]
        return response.to_wire(max_size=65535)

    async def _fill(self, response: dns.message.Message, source: Source) -> None:
        asked = response.question[0]
        if asked.name.to_text(omit_final_dot=True).lower() == source.sandbox:
            _lead_back(response)
            return
        name = normalise_host(asked.name.to_text())
        attachment = self._attachments.of(source.sandbox)
        if asked.rdclass != dns.rdataclass.IN or name is None or not may_resolve(attachment.policy, name):
            response.set_rcode(dns.rcode.REFUSED)
            shown = asked.name.to_text(omit_final_dot=True)[:HOST_CHARS_MAX]
            record = Record(source.sandbox, attachment.project, "dns", generation=attachment.generation, host=shown)
            record.rule = decide_host(attachment.policy, shown, _HTTPS_PORT).rule
            record.reason = "rule" if record.rule else "default-deny"
            record.method, record.protocol = dns.rdatatype.to_text(asked.rdtype), "dns"
            await self._record(record)
            return
        version = _ADDRESSES.get(asked.rdtype)
        if version is None:
            return  # it has nothing of that kind: no HTTPS record, and so no key to hide a name with
        texts = await self._addresses(name, source, attachment, version)
        if texts:
            response.answer.append(dns.rrset.from_text_list(asked.name, TTL_S, "IN", asked.rdtype, texts))

    async def _addresses(self, name: str, source: Source, attachment: Attachment, version: int) -> list[str]:
        ours = source.host_v4 if version == 4 else source.host_v6
        if not attachment.policy.networks:
            return [ours]
        try:
            async with self._resolving:
                found = await self._resolver.addresses(name)
        except NotCarriedOut:
            return [ours]  # the connection will be told what is wrong
        reachable = [one for one in found if may_answer(attachment.policy, one)]
        if not reachable:
            return [ours]
        return [str(one) for one in reachable if one.version == version]

    async def _record(self, record: Record) -> None:
        """Record that a name was refused; asked again and again within a short time, it is one record."""
        self._metrics.count(record)
        now, key = time.monotonic(), (record.sandbox, str(record.host))
        if now - self._recorded.get(key, -RECORDED_S) < RECORDED_S:
            return
        self._recorded[key] = now
        self._recorded.move_to_end(key)
        while len(self._recorded) > RECORDED_MAX:
            self._recorded.popitem(last=False)
        await self._audit.add(record)

    def _within_budget(self, sandbox: str) -> bool:
        now = time.monotonic()
        left, at = self._budgets.get(sandbox, (BURST, now))
        left = min(BURST, left + (now - at) * RATE_PER_S) - 1
        self._budgets[sandbox] = (max(left, -1.0), now)
        return left >= 0

    def forget(self, known: set[str]) -> None:
        """Forget sandboxes that are not among those."""
        for sandbox in self._budgets.keys() - known:
            del self._budgets[sandbox]


def _lead_back(response: dns.message.Message) -> None:
    """Answer for a sandbox's own host name, which programs ask for: that is the sandbox itself, whatever its policy."""
    asked = response.question[0]
    if asked.rdclass == dns.rdataclass.IN and (own := _LOOPBACK.get(asked.rdtype)):
        response.answer.append(dns.rrset.from_text(asked.name, TTL_S, "IN", asked.rdtype, own))


class Datagrams(asyncio.DatagramProtocol):
    """Questions over UDP. Owns what answers them; ``close`` ends it."""

    def __init__(self, names: Names, asking_max: int = ASKING) -> None:
        self._names = names
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking_max = asking_max
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if len(self._tasks) >= self._asking_max:
            return  # who asks will ask again
        task = asyncio.get_running_loop().create_task(self._answer(data, addr))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = await self._names.answer(addr[0], data)
        if answer is not None and self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(answer, addr)

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def serve_stream(names: Names, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Questions over TCP (RFC 1035 §4.2.2): each message with its length before it."""
    address = str(writer.get_extra_info("peername")[0])
    try:
        for _ in range(TCP_QUESTIONS_MAX):
            async with asyncio.timeout(TCP_SILENCE_S):
                size = int.from_bytes(await reader.readexactly(2))
                data = await reader.readexactly(size)
            answer = await names.answer(address, data)
            if answer is None:
                return
            writer.write(len(answer).to_bytes(2) + answer)
            async with asyncio.timeout(TCP_SILENCE_S):
                await writer.drain()
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()
        try:
            async with asyncio.timeout(TCP_SILENCE_S):
                await writer.wait_closed()
        except (TimeoutError, ConnectionError):
            writer.transport.abort()  # whoever takes no answers would have the socket stay

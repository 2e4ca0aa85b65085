"""The sockets: connections that the kernel turned aside from sandboxes' links, and what each of them is.

A connection is HTTP, TLS that is terminated for one name, TLS that is passed through, or bytes to a network that a rule
names. What is none of these is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from space.egress.attachments import Attachment
from space.egress.audit import Record
from space.egress.certificates import Authority
from space.egress.client_hello import NotAHello
from space.egress.decide import decide_host, decide_network
from space.egress.denials import Denied, NotCarriedOut
from space.egress.guest_http1 import Http1Guest
from space.egress.guest_http2 import Http2Guest
from space.egress.holding import Account, charge, too_much
from space.egress.links import Source, plain
from space.egress.messages import GuestGone
from space.egress.peek import client_hello, first_byte, http_host, is_tls
from space.egress.pipeline import Connection, Pipeline
from space.egress.resolve import Resolver
from space.egress.tunnels import Counted, Tunnel, join
from space.egress.turns import Turns
from space.egress.upstreams import Upstreams
from space.egress.wire import Wire, accepted, connected
from space.model.hosts import normalise_host

log = structlog.get_logger(__name__)

CONNECTIONS_PER_SANDBOX, CONNECTIONS_MAX = 1024, 8192
ACCEPTED_AT_ONCE = 16
REST_S = 0.1
"""How long no connection is accepted once there is no descriptor or memory for one."""
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
FIRST_BYTE_S = 30.0
SPEAKS_FIRST_S = 0.3
"""How long a client of a network may be silent before its server is taken to be the one to go on."""
HTTP_PORTS = frozenset({80, 443})
HALF_CLOSED_S = 2.0
"""How long who says nothing more by HTTP is still given an answer."""
SWEEP_S = 1.0
# linux/netfilter_ipv4.h and netfilter_ipv6/ip6_tables.h: where a connection went before it was turned aside.
_SO_ORIGINAL_DST, _SOL_IPV6 = 80, 41
_SOCKADDR_IN, _SOCKADDR_IN6 = struct.Struct("!2xH4s8x"), struct.Struct("!2xH4x16s4x")


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A connection before anything was read of it."""

    sock: socket.socket
    source: Source
    address: str
    to_address: str
    to_port: int

    @property
    def to_link(self) -> bool:
        """Whether it was made to what our name server gives as address; else to an address of the guest's choice."""
        return self.source.is_link_address(self.to_address)


class Gateway:
    """Takes connections. ``run`` it until it is cancelled."""

    def __init__(
        self, pipeline: Pipeline, resolver: Resolver, authority: Authority, tls: Callable[[], ssl.SSLContext]
    ) -> None:
        self._pipeline = pipeline
        self._resolver = resolver
        self._authority = authority
        self._turns = Turns()
        self._tls_http1, self._tls_http2 = tls(), tls()
        self._tls_http1.set_alpn_protocols(["http/1.1"])
        self._tls_http2.set_alpn_protocols(["h2", "http/1.1"])
        self._of: dict[str, dict[asyncio.Task[None], Account]] = {}
        self._reviewing: set[str] = set()
        self._to_servers: Counter[str] = Counter()
        self._count = 0
        self._listening: set[socket.socket] = set()
        pipeline.metrics.show("space_egress_connections", "Open connections of sandboxes.", lambda: self._count)

    async def run(self, listeners: list[socket.socket]) -> None:
        """Serve connections; also end those whose link is gone."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._listening.update(listeners)
                for listener in listeners:
                    loop.add_reader(listener.fileno(), self._accept, listener, tasks)
                while True:
                    await asyncio.sleep(SWEEP_S)
                    self._sweep(tasks)
        finally:
            self._listening.clear()
            for listener in listeners:
                loop.remove_reader(listener.fileno())

    def _accept(self, listener: socket.socket, tasks: asyncio.TaskGroup) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._rest(listener, tasks)
                return
            arrived = self._admit(sock, str(peer[0]))
            if arrived is None:
                sock.close()
                continue
            sandbox = arrived.source.sandbox
            account = Account()
            task = tasks.create_task(self._serve(arrived, account))
            self._of.setdefault(sandbox, {})[task] = account
            self._count += 1
            task.add_done_callback(lambda task, sandbox=sandbox: self._done(sandbox, task))

    def _rest(self, listener: socket.socket, tasks: asyncio.TaskGroup) -> None:
        """Let connections wait in the kernel for a moment: it would offer them again at once, and to no purpose."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener.fileno())
        log.warning("connections-wait")

        def go_on() -> None:
            if listener in self._listening:
                loop.add_reader(listener.fileno(), self._accept, listener, tasks)

        loop.call_later(REST_S, go_on)

    def _admit(self, sock: socket.socket, peer: str) -> _Arrived | None:
        """Return what is known of a connection; None: it is not let in."""
        refused = self._pipeline.metrics.refused
        source = self._pipeline.links.source(peer)
        if source is None:
            refused.labels("unknown-link").inc()
            return None
        if self._count >= CONNECTIONS_MAX or len(self._of.get(source.sandbox, ())) >= CONNECTIONS_PER_SANDBOX:
            refused.labels("too-many").inc()
            return None
        sock.setblocking(False)  # noqa: FBT003 - of socket
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            address, port = original_destination(sock)
        except OSError:
            refused.labels("no-destination").inc()
            return None
        return _Arrived(sock, source, plain(peer), address, port)

    def _done(self, sandbox: str, task: asyncio.Task[None]) -> None:
        self._count -= 1
        of = self._of.get(sandbox, {})
        of.pop(task, None)
        if not of:
            self._of.pop(sandbox, None)

    def _sweep(self, tasks: asyncio.TaskGroup) -> None:
        """End the connections of sandboxes that have no link any more, and those that hold too much."""
        gone = self._of.keys() - self._pipeline.links.sandboxes() if self._of else set[str]()
        for sandbox in self._pipeline.tunnels.sandboxes():
            if sandbox not in self._reviewing:
                self._reviewing.add(sandbox)
                tasks.create_task(self._review(sandbox))
        for sandbox in gone:
            for task in list(self._of.get(sandbox, ())):
                task.cancel()
        for sandbox, accounts in self._of.items():
            for task in too_much({task: account for task, account in accounts.items() if not task.cancelling()}):
                self._pipeline.metrics.refused.labels("too-much-held").inc()
                log.warning("connection-ended", sandbox=sandbox, reason="too-much-held")
                task.cancel()

    async def _review(self, sandbox: str) -> None:
        """End what goes on with a grant that has expired."""
        try:
            await self._pipeline.tunnels.review(sandbox, self._pipeline.attachments.of(sandbox))
        finally:
            self._reviewing.discard(sandbox)

    # --- one connection

    async def _serve(self, arrived: _Arrived, account: Account) -> None:
        """Serve one connection, whatever happens on it."""
        charge(account)
        try:
            async with asyncio.timeout(FIRST_BYTE_S) as waiting:
                await self._turns.take(arrived.source.sandbox)
                await self._classify(arrived, waiting)
        except (GuestGone, ConnectionError, TimeoutError, NotAHello, ssl.SSLError):
            pass
        except NotCarriedOut as error:
            log.debug("connection-not-carried-out", sandbox=arrived.source.sandbox, reason=error.reason)
        except Exception:
            log.exception("connection-failed", sandbox=arrived.source.sandbox)
        finally:
            arrived.sock.close()

    async def _classify(self, arrived: _Arrived, waiting: asyncio.Timeout) -> None:
        """Find out what a connection is, by its first byte."""
        byte = await self._first_byte(arrived)
        attachment = self._pipeline.attachments.of(arrived.source.sandbox)
        if byte is None:
            waiting.reschedule(None)
            await self._network(arrived, attachment)
        elif is_tls(byte):
            hello = await client_hello(arrived.sock)
            waiting.reschedule(None)
            if hello is None:
                return
            name = normalise_host(hello.server_name or "")
            await self._tls(arrived, attachment, name, encrypted=hello.encrypted)
        elif arrived.to_link:
            waiting.reschedule(None)
            await self._speak(arrived, await accepted(arrived.sock, None), "http", None)
        else:
            name: str | None = None
            if self._vetted(arrived, attachment):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SPEAKS_FIRST_S):
                        name = await http_host(arrived.sock)
            waiting.reschedule(None)
            await self._direct_http(arrived, attachment, normalise_host(name or ""))

    async def _first_byte(self, arrived: _Arrived) -> int | None:
        """Wait for the first byte; None: there is none, or none comes before the server's own."""
        speaks_first = not arrived.to_link and arrived.to_port not in HTTP_PORTS
        if not speaks_first:
            byte = await first_byte(arrived.sock)
            if byte is None:
                raise GuestGone("nothing was asked")
            return byte
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SPEAKS_FIRST_S):
                return await first_byte(arrived.sock)
        return None

    async def _tls(self, arrived: _Arrived, attachment: Attachment, name: str | None, *, encrypted: bool) -> None:
        if name is None or self._is_network(arrived, attachment, name):
            await self._network(arrived, attachment, "no-server-name")
            return
        if not arrived.to_link and not self._vetted(arrived, attachment):
            await self._refuse(arrived, attachment, "direct-address", name)
            return
        decided = decide_host(attachment.policy, name, arrived.to_port)
        if decided.possible and decided.passthrough:
            if encrypted:
                await self._refuse(arrived, attachment, "encrypted-hello", name)
            else:
                await self._passthrough(arrived, attachment, name, decided.rule)
            return
        context = self._authority.context(name)
        wire = await accepted(arrived.sock, context)
        await self._speak(arrived, wire, "https", name)

    async def _direct_http(self, arrived: _Arrived, attachment: Attachment, name: str | None) -> None:
        """Plain HTTP to an address of the guest's choice. Where that may not be, the answer says so."""
        if self._vetted(arrived, attachment):
            if name is not None and decide_host(attachment.policy, name, arrived.to_port).possible:
                await self._speak(arrived, await accepted(arrived.sock, None), "http", None)
            else:
                await self._network(arrived, attachment)
            return
        wire = await accepted(arrived.sock, None)
        refusal = Denied("direct-address", "Connections go to names that the policy allows, not to addresses.")
        try:
            await Http1Guest(self._connection(arrived, "http", None), self._pipeline, wire).serve_refusal(refusal)
        finally:
            await wire.close()

    async def _speak(self, arrived: _Arrived, wire: Wire, scheme: str, name: str | None) -> None:
        connection = self._connection(arrived, scheme, name)
        http2 = scheme == "https" and wire.alpn() == "h2"
        served = asyncio.current_task()
        assert served is not None  # noqa: S101 - every connection has one
        leaving: list[asyncio.TimerHandle] = []

        def gone(_: object) -> None:
            served.cancel()

        def said_all(_: object) -> None:
            # Who closes looks the same as who has asked and waits; hardly any program of the second kind is left.
            leaving.append(asyncio.get_running_loop().call_later(HALF_CLOSED_S, served.cancel))

        wire.closed.add_done_callback(gone)  # nobody is there any more to wait for a server's answer
        wire.said_all.add_done_callback(said_all)
        try:
            guest = (Http2Guest if http2 else Http1Guest)(connection, self._pipeline, wire)
            await guest.serve()
        finally:
            wire.closed.remove_done_callback(gone)
            wire.said_all.remove_done_callback(said_all)
            for timer in leaving:
                timer.cancel()
            try:
                await connection.upstreams.close()
            finally:
                await wire.close()

    def _connection(self, arrived: _Arrived, scheme: str, name: str | None) -> Connection:
        upstreams = Upstreams(
            self._resolver, self._tls_http1, self._tls_http2, arrived.source.sandbox, self._to_servers
        )
        return Connection(arrived.source, arrived.address, arrived.to_port, scheme, name, upstreams, self._turns)

    # --- what is not looked into

    def _vetted(self, arrived: _Arrived, attachment: Attachment) -> bool:
        """Whether a rule for networks lets a connection to that address out."""
        address = ipaddress.ip_address(arrived.to_address)
        return self._resolver.permits(address) and decide_network(attachment.policy, address, arrived.to_port).allowed

    def _is_network(self, arrived: _Arrived, attachment: Attachment, name: str) -> bool:
        """Whether a connection is one that a rule for networks lets out, and of which no rule for hosts says more."""
        if arrived.to_link or not self._vetted(arrived, attachment):
            return False
        return not decide_host(attachment.policy, name, arrived.to_port).possible

    async def _network(self, arrived: _Arrived, attachment: Attachment, otherwise: str = "direct-address") -> None:
        """Connect with the address that the guest chose, if a rule for networks has it."""
        address = ipaddress.ip_address(arrived.to_address)
        decision = decide_network(attachment.policy, address, arrived.to_port)
        if arrived.to_link or not decision.allowed:
            await self._refuse(arrived, attachment, otherwise if decision.rule is None else "rule", None, decision.rule)
            return
        if not self._resolver.permits(address):
            await self._refuse(arrived, attachment, "address-refused", None, decision.rule)
            return
        record = _record(arrived, attachment, "tcp", decision.rule)
        await self._tunnel(
            arrived,
            record,
            lambda: self._resolver.dial_addresses([address], arrived.to_port),
            lambda now: decide_network(now.policy, address, arrived.to_port).allowed,
        )

    async def _passthrough(self, arrived: _Arrived, attachment: Attachment, name: str, rule: str | None) -> None:
        """Connect with the server of that name, as we resolve it; what is said on the connection is theirs."""

        def allowed(now: Attachment) -> bool:
            decided = decide_host(now.policy, name, arrived.to_port)
            return decided.possible and decided.passthrough

        record = _record(arrived, attachment, "tls", rule)
        record.host = name
        await self._tunnel(arrived, record, lambda: self._resolver.dial(name, arrived.to_port), allowed)

    async def _tunnel(
        self,
        arrived: _Arrived,
        record: Record,
        dial: Callable[[], Awaitable[socket.socket]],
        allowed: Callable[[Attachment], bool],
    ) -> None:
        began = time.perf_counter()
        counted = Counted()
        pipeline = self._pipeline
        try:
            server = await connected(await dial(), None, None)
            try:
                guest = await accepted(arrived.sock, None)
            except BaseException:
                server.abort()
                raise
            record.decision, record.first_byte_s = "allow", time.perf_counter() - began
            tunnel = Tunnel(arrived.source.sandbox, allowed, (guest, server))
            pipeline.tunnels.add(tunnel)
            try:
                connection = self._connection(arrived, "https", None)
                if not allowed(pipeline.attachments.of(arrived.source.sandbox)):
                    tunnel.end()  # the policy changed while it was dialled
                await join(guest, server, connection, counted)
            finally:
                pipeline.tunnels.remove(tunnel)
                guest.abort()
                server.abort()
        except NotCarriedOut as error:
            record.decision, record.reason = "deny" if error.denied else "error", error.reason
        finally:
            record.request_bytes, record.response_bytes = counted.up, counted.down
            record.duration_s = time.perf_counter() - began
            pipeline.metrics.count(record)
            await pipeline.audit.add(record)

    async def _refuse(
        self, arrived: _Arrived, attachment: Attachment, reason: str, name: str | None, rule: str | None = None
    ) -> None:
        """Close a connection that cannot be answered, and say in the audit why."""
        record = _record(arrived, attachment, "tls" if name else "tcp", rule)
        record.decision, record.reason, record.host = "deny", reason, name
        self._pipeline.metrics.count(record)
        await self._pipeline.audit.add(record)


def original_destination(sock: socket.socket) -> tuple[str, int]:
    """Return where the guest connected to before the kernel turned it aside; raise ``OSError`` when nothing did."""
    if sock.family == socket.AF_INET6:
        port, packed = _SOCKADDR_IN6.unpack(sock.getsockopt(_SOL_IPV6, _SO_ORIGINAL_DST, _SOCKADDR_IN6.size))
    else:
        port, packed = _SOCKADDR_IN.unpack(sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, _SOCKADDR_IN.size))
    return str(ipaddress.ip_address(packed)), port


def _record(arrived: _Arrived, attachment: Attachment, kind: str, rule: str | None) -> Record:
    record = Record(arrived.source.sandbox, attachment.project, kind, generation=attachment.generation)
    record.rule, record.reason, record.port = rule, "rule", arrived.to_port
    if not arrived.to_link:
        record.address = arrived.to_address
    return record

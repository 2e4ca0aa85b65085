"""What happens to every request, in this order: identify, decide, inject, resolve and pin, forward, scrub, audit.

One request sees one generation of its sandbox's policy. Nothing of it is asked of anybody before it was decided on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from space.egress import denials
from space.egress.attachments import Attachment, Attachments
from space.egress.audit import Audit, Record
from space.egress.decide import Asked, decide
from space.egress.denials import About, BadRequest, Denied, NotCarriedOut
from space.egress.inflate import readable
from space.egress.inject import Injected, Misplaced, inject
from space.egress.links import Links, Source
from space.egress.messages import Body, GuestGone, Join, Protocol, Request, Response, body_of, without
from space.egress.metrics import Metrics
from space.egress.scrub import Scrubber
from space.egress.signing import Held, sign
from space.egress.tunnels import Counted, Tunnel, Tunnels, join
from space.egress.turns import Turns
from space.egress.upstreams import Upstreams
from space.egress.wire import Wire

PATH_CHARS_MAX = 2048
"""How much of a path is recorded."""


@dataclass(slots=True)
class Connection:
    """One connection of a guest, and what is known of it whatever is said on it."""

    source: Source
    address: str
    """The guest's end."""
    port: int
    """Where it was connected to."""
    scheme: str
    tls_host: str | None
    """The name that TLS was terminated for."""
    upstreams: Upstreams
    turns: Turns
    held: Held = field(default_factory=Held)

    async def step(self) -> None:
        """Wait for the sandbox's turn to pass on one more chunk."""
        await self.turns.take(self.source.sandbox)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Carries out requests."""

    links: Links
    attachments: Attachments
    audit: Audit
    tunnels: Tunnels
    metrics: Metrics

    @asynccontextmanager
    async def carry_out(self, connection: Connection, request: Request) -> AsyncGenerator[Response]:
        """Yield the answer to a request: the server's, or why there is none.

        Raises ``GuestGone`` when the link is not that sandbox's any more, its end breaks, or a server breaks off an
        answer that has begun.
        """
        await connection.step()
        began = time.perf_counter()
        attachment = self._identify(connection)
        record = _record(connection, attachment, request)
        exchange = _Exchange(connection, request, record, Counted())
        try:
            try:
                injected = await exchange.decide(attachment)
                with self._under_way(exchange, injected, attachment):
                    async with connection.upstreams.exchange(request, connection.step) as response:
                        prepared = exchange.prepared(response, injected, self)
                        record.status, record.first_byte_s = response.status, time.perf_counter() - began
                        yield prepared
            except NotCarriedOut as error:
                if record.status is not None:
                    record.decision, record.reason = "error", error.reason
                    raise GuestGone(error.message) from error  # too late for another answer
                yield exchange.refusal(error)
        except (GuestGone, asyncio.CancelledError):
            if record.decision == "allow":
                record.reason = "guest-gone"
            raise
        finally:
            connection.held.count -= exchange.held
            record.request_bytes, record.response_bytes = exchange.counted.up, exchange.counted.down
            record.duration_s = time.perf_counter() - began
            self.metrics.count(record)
            await self.audit.add(record)

    @asynccontextmanager
    async def refuse(
        self,
        connection: Connection,
        error: NotCarriedOut,
        protocol: Protocol,
        method: str | None = None,
        target: str | None = None,
    ) -> AsyncGenerator[Response]:
        """Yield the answer to what is no proper request, or comes by a way on which none is answered."""
        await connection.step()
        attachment = self._identify(connection)
        record = Record(connection.source.sandbox, attachment.project, "http", generation=attachment.generation)
        record.protocol, record.port, record.host = protocol, connection.port, connection.tls_host
        record.method, record.path = method, _shown_path(target)
        try:
            yield _refusal(error, record)
        finally:
            self.metrics.count(record)
            await self.audit.add(record)

    @contextmanager
    def _under_way(self, exchange: _Exchange, injected: Injected, attachment: Attachment) -> Generator[None]:
        """End the request when it may not be any more. Raises ``GuestGone`` then: for another answer it is too late."""
        task = asyncio.current_task()
        now = self.attachments.of(exchange.connection.source.sandbox)
        tunnel = Tunnel(exchange.connection.source.sandbox, exchange.allowed(injected), task=task, judged=now)
        if now is not attachment and not tunnel.allowed(now):
            raise Denied("revoked", "The sandbox's policy changed while the request was made ready.")
        self.tunnels.add(tunnel)
        try:
            yield
        except asyncio.CancelledError:
            if task is None or not tunnel.cut or task.uncancel():
                raise
            exchange.record.decision, exchange.record.reason = "deny", "revoked"
            raise GuestGone("the policy forbids it by now") from None
        finally:
            self.tunnels.remove(tunnel)

    def _identify(self, connection: Connection) -> Attachment:
        """Return what holds for who has the link now."""
        source = self.links.source(connection.address)
        if source is None or source.sandbox != connection.source.sandbox:
            raise GuestGone("the link is another's")
        return self.attachments.of(source.sandbox)


@dataclass(slots=True)
class _Exchange:
    """One request on its way, and what becomes of it."""

    connection: Connection
    request: Request
    record: Record
    counted: Counted
    held: int = 0
    """How many bytes of its body are held."""
    asked: Asked | None = None
    """What was decided on: as the guest wrote it, without what was placed in it."""

    async def decide(self, attachment: Attachment) -> Injected:
        """Make the request what may be sent, or raise ``Denied``."""
        head, record = self.request.head, self.record
        if self.connection.tls_host not in {None, head.host}:
            raise Denied("authority-mismatch", "The request's Host is not the name that TLS was asked for.")
        if head.port != self.connection.port:
            raise Denied("authority-mismatch", "The request's Host has another port than it was sent to.")
        self.asked = Asked(head.host, head.port, head.method, head.target, head.scheme)
        decision = decide(attachment.policy, self.asked)
        record.rule, record.reason = decision.rule, decision.reason
        if not decision.allowed:
            raise Denied(decision.reason, _why(decision.reason, head.host), decision.rule)
        try:
            injected = inject(head, attachment.grants, time.time())
        except Misplaced as error:
            raise Denied(error.reason, str(error), decision.rule) from None
        record.decision, record.secrets = "allow", list(injected.secrets)
        self.request.body = _counted_up(self.request.body, self.counted)
        self.request.head = injected.head
        if injected.sign is not None:
            self.held = await sign(self.request, injected.sign, self.connection.held)
        return injected

    def prepared(self, response: Response, injected: Injected, pipeline: Pipeline) -> Response:
        """Make the server's answer what the guest gets. Raises ``Failed`` where that cannot be."""
        response.headers = without(response.headers, b"alt-svc")  # other ways to the server, past us
        if injected.masks:
            response = readable(response, self.request.head.method)
            scrubber = Scrubber(injected.masks)
            response.headers = [(name, scrubber.whole(value)) for name, value in response.headers]
            response.reason = scrubber.whole(response.reason)
            response.body = _scrubbed(response, response.body, scrubber)
        response.body = _counted_down(response.body, self.counted)
        if response.tunnel is not None:
            response.join = self._join(response.tunnel, injected, pipeline)
        return response

    def refusal(self, error: NotCarriedOut) -> Response:
        response = _refusal(error, self.record)
        response.body = _counted_down(response.body, self.counted)
        return response

    def allowed(self, injected: Injected) -> Callable[[Attachment], bool]:
        """Return what says whether the request, with the secrets that it was given, may be under another policy."""
        asked = self.asked

        def allowed(attachment: Attachment) -> bool:
            now = time.time()
            granted = {grant.secret for grant in attachment.grants if not grant.expired(now)}
            return (
                asked is not None and decide(attachment.policy, asked).allowed and granted.issuperset(injected.secrets)
            )

        return allowed

    def _join(self, server: Wire, injected: Injected, pipeline: Pipeline) -> Join:
        allowed = self.allowed(injected)

        async def run(guest: Wire) -> None:
            tunnel = Tunnel(self.connection.source.sandbox, allowed, (guest, server))
            pipeline.tunnels.add(tunnel)
            try:
                if not allowed(pipeline.attachments.of(tunnel.sandbox)):
                    tunnel.end()  # the policy changed while the server was asked
                scrubber = Scrubber(injected.masks) if injected.masks else None
                await join(guest, server, self.connection, self.counted, scrubber)
            finally:
                pipeline.tunnels.remove(tunnel)

        return run


def _record(connection: Connection, attachment: Attachment, request: Request) -> Record:
    head = request.head
    return Record(
        connection.source.sandbox,
        attachment.project,
        "http",
        generation=attachment.generation,
        host=head.host,
        port=head.port,
        method=head.method,
        path=_shown_path(head.target),
        protocol=f"{request.protocol}+{head.scheme}",
    )


def _shown_path(target: str | None) -> str | None:
    return None if target is None else target.partition("?")[0][:PATH_CHARS_MAX]


def _refusal(error: NotCarriedOut, record: Record) -> Response:
    """Return the answer that says why a request was not carried out, and note it."""
    record.decision, record.reason, record.status = "deny" if error.denied else "error", error.reason, error.status
    record.rule = error.rule or record.rule
    body = denials.body(error, About(record.host, record.method, record.path))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    return Response(error.status, headers, body_of(body), close=isinstance(error, BadRequest))


def _why(reason: str, host: str) -> str:
    match reason:
        case "default-deny":
            return f"No rule of the sandbox's policy lets this request to {host} out."
        case "rule":
            return f"A rule of the sandbox's policy refuses this request to {host}."
        case "ambiguous-path":
            return "The policy looks at paths, and servers may read this one in different ways."
        case _:
            return "The request cannot be decided on."


def _counted_up(body: Body | None, counted: Counted) -> Body | None:
    async def through(source: Body) -> Body:
        async for chunk in source:
            counted.up += len(chunk)
            yield chunk

    return None if body is None else through(body)


async def _counted_down(body: Body, counted: Counted) -> Body:
    async for chunk in body:
        counted.down += len(chunk)
        yield chunk


async def _scrubbed(response: Response, body: Body, scrubber: Scrubber) -> Body:
    async for chunk in body:
        if found := scrubber.feed(chunk) + scrubber.prompt():
            yield found
    if rest := scrubber.end():
        yield rest
    response.trailers = [(name, scrubber.whole(value)) for name, value in response.trailers]

"""The connections to servers that one guest's connection uses. Never shared: what a server ties to a connection stays
with who made it, and they end together.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from space.egress.denials import Failed
from space.egress.http2 import Step
from space.egress.messages import Request, Response
from space.egress.resolve import Resolver
from space.egress.upstream_http1 import Http1Upstream
from space.egress.upstream_http2 import Http2Upstream
from space.egress.wire import Wire, connected

IDLE_MAX = 8
"""However many servers there are: on one plain connection a guest may ask as many as there are names."""
CONNECTIONS_PER_SANDBOX, CONNECTIONS_MAX = 2048, 16384
"""To servers, in all of a sandbox's connections: with HTTP/2 each of these may ask for a hundred, and the host's kernel
remembers so many and no more."""
_Server = tuple[str, str, int]
"""Scheme, host, port."""


class Upstreams:
    """Dials servers and keeps their connections for the next request. ``close`` it after its use."""

    def __init__(
        self,
        resolver: Resolver,
        tls_http1: ssl.SSLContext,
        tls_http2: ssl.SSLContext,
        sandbox: str,
        count: Counter[str],
    ) -> None:
        """``count`` is how many connections each sandbox has to servers; it is kept up to date."""
        self._resolver = resolver
        self._sandbox, self._count = sandbox, count
        self._tls_http1, self._tls_http2 = tls_http1, tls_http2
        self._idle: dict[_Server, list[Http1Upstream]] = {}
        self._http2: dict[_Server, Http2Upstream] = {}
        self._dialling: dict[_Server, asyncio.Lock] = {}
        self._runs: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def exchange(self, request: Request, step: Step, *, again: bool = True) -> AsyncGenerator[Response]:
        """Have a request answered, on a connection that is there or a new one; ``step`` waits for the guest's turn.

        ``again``: once more, if it may be repeated and the connection was one that was there.
        """
        head = request.head
        server = (head.scheme, head.host, head.port)
        upstream = await self._get(server, request, step)
        answered = False
        try:
            async with upstream.exchange(request) as response:
                answered = True
                yield response
        except Failed as error:
            lost = again and not answered and error.reason == "server-closed" and upstream.used > 1
            if not lost or not _repeatable(request):
                raise
        finally:
            if isinstance(upstream, Http1Upstream):
                self._put_back(server, upstream)
        if not answered:
            # The server closed a connection that was kept in the very moment in which it was used again.
            async with self.exchange(request, step, again=False) as response:
                yield response

    async def close(self) -> None:
        """End all of them."""
        for upstreams in self._idle.values():
            for upstream in upstreams:
                upstream.abort()
        for run in self._runs:
            run.cancel()
        if self._runs:
            await asyncio.wait(self._runs)

    async def _get(self, server: _Server, request: Request, step: Step) -> Http1Upstream | Http2Upstream:
        if request.protocol == "h2" and server[0] == "https":
            async with self._dialling.setdefault(server, asyncio.Lock()):
                kept = self._http2.get(server)
                if kept is not None and kept.reusable:
                    return kept
                if (idle := self._take_idle(server)) is not None:
                    return idle  # a server that did not want HTTP/2 the last time
                return await self._dial(server, self._tls_http2, step)
        idle = self._take_idle(server)
        return idle or await self._dial(server, self._tls_http1, step)

    def _take_idle(self, server: _Server) -> Http1Upstream | None:
        kept = self._idle.pop(server, [])
        found: Http1Upstream | None = None
        while kept and found is None:
            upstream = kept.pop()
            if upstream.reusable:
                found = upstream
            else:
                upstream.abort()
        if kept:
            self._idle[server] = kept
        return found

    def _put_back(self, server: _Server, upstream: Http1Upstream) -> None:
        if not upstream.reusable:
            upstream.abort()
            return
        self._idle[server] = [*self._idle.pop(server, []), upstream]  # behind those that were used before
        if sum(map(len, self._idle.values())) > IDLE_MAX:
            oldest = next(iter(self._idle))
            self._idle[oldest].pop(0).abort()
            if not self._idle[oldest]:
                del self._idle[oldest]

    async def _dial(self, server: _Server, tls: ssl.SSLContext, step: Step) -> Http1Upstream | Http2Upstream:
        if self._count[self._sandbox] >= CONNECTIONS_PER_SANDBOX or self._count.total() >= CONNECTIONS_MAX:
            raise Failed("too-many-connections", 503, "The sandbox has too many connections to servers already.")
        self._count[self._sandbox] += 1
        try:
            wire = await self._connect(server, tls)
        except BaseException:
            self._one_less()
            raise
        wire.closed.add_done_callback(self._one_less)
        if server[0] == "https" and wire.alpn() == "h2":
            upstream = Http2Upstream(wire, step)
            run = asyncio.get_running_loop().create_task(upstream.run())
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)
            run.add_done_callback(lambda _: wire.abort())  # also where it was cancelled before it began
            try:
                await upstream.begin()  # what it says first goes out before anything is read
            except ConnectionError as error:
                raise Failed("server-closed", 502, "The server closed the connection.") from error
            self._http2[server] = upstream
            return upstream
        return Http1Upstream(wire)

    async def _connect(self, server: _Server, tls: ssl.SSLContext) -> Wire:
        scheme, host, port = server
        sock = await self._resolver.dial(host, port)
        try:
            return await connected(sock, tls if scheme == "https" else None, host if scheme == "https" else None)
        except ssl.SSLCertVerificationError as error:
            why = f"The server's certificate is not valid: {error.verify_message}."
            raise Failed("upstream-certificate", 502, why) from error
        except (OSError, TimeoutError) as error:
            raise Failed("upstream-tls", 502, "The server does not shake hands for TLS.") from error

    def _one_less(self, _: object = None) -> None:
        self._count[self._sandbox] -= 1
        if not self._count[self._sandbox]:
            del self._count[self._sandbox]


def _repeatable(request: Request) -> bool:
    """Whether a request may be sent again when nobody knows if it came (RFC 9110 §9.2.2)."""
    return request.body is None and request.head.method in {"GET", "HEAD", "OPTIONS", "PUT", "DELETE"}

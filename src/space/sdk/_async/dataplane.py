"""The short way to one sandbox: straight to its node with a short-lived token, or through the api where that fails."""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx

from space.errors import NotFound, RequestError, SpaceError, Unauthenticated, Unavailable
from space.sdk._async.transport import AsyncTransport
from space.sdk.backends import Disconnected
from space.sdk.backends.asyncio import Lock, Socket
from space.sdk.requests import UNREACHABLE, Endpoint, Request
from space.sdk.types import parse_time

TUNNEL_PROTOCOL = "space.tcp.v1"
RENEW_BEFORE_S = 60.0
AVOID_S = 30.0
# With these the node says that it did nothing: the api knows better why, and may wake the sandbox.
REFUSED_BY_NODE = frozenset({UNREACHABLE, "wrong-state", "not-ready", "sandbox-not-found", "command-not-found"})
T = TypeVar("T")


class AsyncDataPlane:
    """Exec, files and attaching for one sandbox."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._node: Endpoint | None = None
        self._renew_at = 0.0
        self._avoid_until = 0.0
        self._renewing = Lock()
        self._unused = True

    async def call(self, request: Request) -> Any:
        """Send a request to the node, or to the api; return the answer's JSON."""
        return await self._reach(request, lambda at: self._transport.call(request, at))

    async def exec(self, request: Request) -> Any:
        """As `call`, for requests that are small both ways.

        The first one goes through the api, to which there is a connection already: a token, and a connection to the
        node, are worth a request of their own only for those who come again.
        """
        if self._unused:
            self._unused = False
            return await self._transport.call(request)
        return await self.call(request)

    async def start(self, request: Request) -> httpx.Response:
        """As `call`, but return the answer with its body still to come. The caller closes it."""
        return await self._reach(request, lambda at: self._transport.start(request, at))

    async def attach(self, path: str, query: dict[str, str], offered: Endpoint | None = None) -> Socket:
        """Open a WebSocket where it was offered, else at the node, else at the api.

        Raises `Disconnected` when no way works now.
        """
        if offered and self._usable(offered):
            with suppress(Disconnected, Unauthenticated, NotFound):
                return await self._transport.attach(path, query, offered)
        at, lost = await self._endpoint(), None
        if at is not self._transport.api:
            try:
                return await self._transport.attach(path, query, at)
            except Disconnected as error:
                lost = error
                self._avoid_until = time.monotonic() + AVOID_S
            except Unauthenticated:
                self._node = None
        try:
            return await self._transport.attach(path, query, self._transport.api)
        except RequestError as refused:
            # An api that does not pass connections on says nothing about a node that is only away for a moment.
            if lost is None:
                raise
            self._avoid_until = 0.0
            raise lost from refused

    async def tunnel(self, path: str) -> Socket:
        """Open a WebSocket for a raw connection, at the node: nobody else relays those. It wakes the sandbox."""
        for left in (True, False):
            at = await self._endpoint()
            if at is self._transport.api:
                break
            try:
                return await self._transport.attach(path, {}, at, TUNNEL_PROTOCOL)
            except Disconnected as error:
                raise Unavailable(f"The node of the sandbox cannot be reached: {error}", code=UNREACHABLE) from error
            except Unauthenticated:
                self._node = None
                if not left:
                    raise
        raise Unavailable("The node of the sandbox cannot be reached from here.", code=UNREACHABLE)

    def offer(self, access: dict[str, Any] | None) -> None:
        """Take an access ``{url, token, expires_at}`` that came with another answer."""
        if access:
            self._take(access)

    async def _reach(self, request: Request, send: Callable[[Endpoint], Awaitable[T]]) -> T:
        at = await self._endpoint()
        if at is self._transport.api:
            return await send(at)
        try:
            return await send(at)
        except SpaceError as error:
            token_refused = isinstance(error, Unauthenticated)
            if not token_refused and error.code not in REFUSED_BY_NODE:
                raise
            if not request.rewindable and error.code != UNREACHABLE:
                raise
            if token_refused:
                self._node = None
            elif error.code == UNREACHABLE:
                self._avoid_until = time.monotonic() + AVOID_S
        return await send(self._transport.api)

    async def _endpoint(self) -> Endpoint:
        self._unused = False
        now = time.monotonic()
        if now < self._avoid_until:
            return self._transport.api
        if self._node is None or now >= self._renew_at:
            async with self._renewing:
                if self._node is None or now >= self._renew_at:
                    await self._renew()
        return self._node or self._transport.api

    async def _renew(self) -> None:
        request = Request(method="POST", path=f"/v1/sandboxes/{self._sandbox_id}/access", harmless=True)
        self._take(await self._transport.call(request))

    def _take(self, access: dict[str, Any]) -> None:
        expires_at = parse_time(access.get("expires_at"))
        left_s = (expires_at - datetime.now(UTC)).total_seconds() if expires_at else RENEW_BEFORE_S
        # A clock that differs from the server's must not make every call renew: half the time left is always used.
        self._renew_at = time.monotonic() + max(left_s - RENEW_BEFORE_S, left_s / 2, 1.0)
        node = Endpoint(access["url"].rstrip("/"), access["token"])
        if self._usable(node):
            self._node = node
        else:
            self._node = None
            self._avoid_until = self._renew_at

    def _usable(self, node: Endpoint) -> bool:
        # A far server's own loopback address would mean some other program on this machine.
        return self._transport.api.loopback or not node.loopback

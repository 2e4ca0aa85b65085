"""The client of the gateway's Unix socket: what each sandbox may reach, records of what it did, figures."""

import contextlib
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp

from space.control.peers import CONNECT_TIMEOUT_S, Peer, answer_of, lines_of
from space.errors import HostError, Unavailable

TELL_S = 5
METRICS_S = 5
SILENT_S_MAX = 60
"""Longer than several of the signs of life that the gateway gives whoever watches it."""

Attachment = dict[str, Any]
"""``{project, generation, policy, grants}``, values of secrets in it: never to be logged or shown."""


class Gateway(Peer):
    """The gateway of this host. Every call may be repeated, so an answer that was lost is ``Unavailable``, too."""

    name = "gateway"

    def unreachable(self) -> Unavailable:
        return Unavailable("The gateway is not reachable.", code="gateway-unavailable")

    def lost(self) -> Unavailable:
        return self.unreachable()

    def malformed(self, what: str) -> HostError:
        return HostError(f"The gateway's answer {what}.", code="gateway-protocol")

    async def put(self, sandbox: str, attachment: Attachment) -> None:
        """Have a sandbox's next requests be judged so; when this returns, they are."""
        await self.call("PUT", f"/sandboxes/{sandbox}", TELL_S, attachment)

    async def remove(self, sandbox: str) -> None:
        await self.call("DELETE", f"/sandboxes/{sandbox}", TELL_S)

    async def keep(self, sandboxes: Collection[str]) -> None:
        """Have no other sandboxes be known than these."""
        await self.call("PUT", "/sandboxes", TELL_S, {"sandboxes": [*sandboxes]})

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
        """Give the lines that the gateway writes as long as it lives; the first one comes at once."""
        async with self._lines("/watch", SILENT_S_MAX) as lines:
            yield lines

    async def egress(self, wanted: Mapping[str, str]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the records that fit ``wanted`` (the gateway's own query), newest last; with ``follow`` without end."""
        async with self._lines(f"/egress?{urlencode(wanted)}") as lines:
            async for line in lines:
                yield line

    async def metrics(self) -> bytes:
        """Return its figures as Prometheus text."""
        return await self.text("/metrics", METRICS_S)

    @contextlib.asynccontextmanager
    async def _lines(self, path: str, silent_s: float | None = None) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silent_s)
        async with self.open("GET", path, timeout) as response:
            if response.status != 200:
                await answer_of(self, response)
            async with contextlib.aclosing(lines_of(self, response.content)) as lines:
                yield lines

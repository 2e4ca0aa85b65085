"""TLS over a tunnel, for servers in a sandbox that speak nothing else."""

from __future__ import annotations

import asyncio
import ssl

from space.errors import GuestError
from space.node.ports.tunnel import Tunnel

HANDSHAKE_S = 10.0
READ_BYTES = 64 * 1024


async def secured(tunnel: Tunnel) -> Tunnel:
    """Return a tunnel through ``tunnel`` that TLS is spoken in. Raises ``GuestError`` where the server does not."""
    one = TlsTunnel(tunnel)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await one.shake_hands()
    except TimeoutError as error:
        raise GuestError("The server in the sandbox does not speak TLS.", code="bad-answer") from error
    return one


class TlsTunnel:
    """A tunnel whose bytes are encrypted on their way through another one."""

    def __init__(self, tunnel: Tunnel) -> None:
        context = ssl.create_default_context()
        # SAFETY: whoever is at the other end of the tunnel is the sandbox; no certificate could say more than that.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        self._tunnel = tunnel
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing)

    async def shake_hands(self) -> None:
        """Agree on keys."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._receive()
            except ssl.SSLError as error:
                raise GuestError("The server in the sandbox does not speak TLS.", code="bad-answer") from error
            else:
                await self._flush()
                return

    async def read(self) -> bytes:
        while True:
            try:
                return self._tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._receive()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            except ssl.SSLError as error:
                raise GuestError("What the server in the sandbox sent is no TLS.", code="bad-answer") from error

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            # Without renegotiation writing never waits for the other side; what it makes is passed on piece by piece.
            view = view[self._tls.write(view[:READ_BYTES]) :]
            await self._flush()

    async def end(self) -> None:
        """TLS has no half of a connection to close: the other side learns of the end when all of it is closed."""

    async def close(self) -> None:
        await self._tunnel.close()

    async def _flush(self) -> None:
        if data := self._outgoing.read():
            await self._tunnel.write(data)

    async def _receive(self) -> None:
        data = await self._tunnel.read()
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

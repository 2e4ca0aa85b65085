"""What every HTTP server of SPACE owes its host: bounded heads and bodies, and nothing in the clear to others.

uvicorn bounds neither the size of a head nor how long a client may take to send one; both come before any key or token
is looked at.
"""

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Generator
from typing import Any

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from space.errors import HostError, Unavailable

HEADER_BYTES_MAX = 64 * 1024
HEADER_TIMEOUT_S = 30.0
BODIES_BYTES_MAX = 256 * 1024 * 1024
SMALL_BODY_BYTES = 64 * 1024
_PEER = struct.Struct("3i")
"""`struct ucred`: pid, user and group (see unix(7))."""

log = structlog.get_logger(__name__)


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose request heads are bounded in size and time."""

    _head_bytes = 0
    _unparsed_bytes = 0
    """What came since the parser last made something of it: it keeps a header, however long, until that is whole."""
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._unparsed_bytes > HEADER_BYTES_MAX:
            self.transport.abort()
            return
        self._unparsed_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        if self._head_timer is None:
            self._await_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._unparsed_bytes = 0
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unparsed_bytes = 0
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        super().on_message_complete()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEADER_BYTES_MAX:
            self.transport.abort()
            raise ValueError("The request's head is too large")


def trusting(uids: frozenset[int]) -> type[BoundedProtocol]:
    """Return the protocol for the Unix socket: peers that run as somebody else than ``uids`` are cut off."""

    class TrustingProtocol(BoundedProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if peer_uid(transport) not in uids:
                log.warning("stranger-refused")
                transport.abort()

    return TrustingProtocol


def peer_uid(transport: asyncio.BaseTransport) -> int:
    """Return the user id of the process at the other end of a Unix socket, as the kernel saw it connect."""
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as peer:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return _PEER.unpack(credentials)[1]


class Bodies:
    """The request bodies that a server holds in memory at one time: bounded together, not only each.

    The first ``SMALL_BODY_BYTES`` of each are always taken (the number of connections bounds those), so that whoever
    fills the room keeps out large bodies alone.
    """

    def __init__(self, bytes_max: int = BODIES_BYTES_MAX) -> None:
        self.left = bytes_max
        """How many bytes there is room for."""

    @contextlib.contextmanager
    def one(self) -> Generator["Held"]:
        """Hold one body as long as the block lasts."""
        held = Held(self)
        try:
            yield held
        finally:
            held.release()


class Held:
    """One body that is being held."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0
        self._taken = 0

    def grow(self, count: int) -> None:
        """Hold ``count`` bytes more, or raise ``Unavailable``."""
        self._size += count
        more = max(self._size - SMALL_BODY_BYTES, 0) - self._taken
        if more > self._bodies.left:
            raise Unavailable("Too many large bodies are being received.", code="too-many-bodies")
        self._bodies.left -= more
        self._taken += more

    def release(self) -> None:
        """Hold nothing any more."""
        self._bodies.left += self._taken
        self._size = self._taken = 0


class Server(uvicorn.Server):
    """A server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def configured(app: Any, **fields: Any) -> uvicorn.Config:
    """Return how uvicorn is to serve an app, with what each server of ours says for itself: none logs requests, which
    carry tokens, believes what headers say of proxies, or tells what it is.
    """
    return uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, proxy_headers=False, server_header=False, **fields
    )


def check_address(process: str, host: str, *, allow_plaintext: bool) -> None:
    """Refuse to listen in the clear where others could listen in, unless the settings allow it in so many words.

    ``process`` is ``api`` or ``node``; the setting ``<process>_host`` says where it listens.
    """
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if loopback:
        return
    if not allow_plaintext:
        raise HostError(
            f"The {process} would listen on {host} without TLS. Put a TLS proxy before it and let it listen on "
            "127.0.0.1, or set allow_plaintext.",
            code="plaintext-refused",
            key=f"{process}_host",
        )
    log.warning("plaintext", process=process, host=host, detail="Keys and tokens travel unencrypted: use a TLS proxy.")

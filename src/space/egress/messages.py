"""A request and its answer between the two sides of the gateway, whatever version of HTTP either side speaks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from space.egress.inject import RequestHead
from space.egress.wire import Wire

Headers = list[tuple[bytes, bytes]]
Body = AsyncGenerator[bytes]
Protocol = Literal["h1", "h2"]

HEAD_BYTES_MAX = 64 * 1024
"""Largest head of a request or an answer."""
HEADERS_MAX = 512
"""Most headers in one: with 64 KiB of them that have a letter each nobody means anything, and each costs a moment."""
HEAD_PART_BYTES = 16 * 1024
"""So much at once is given to h11 while it waits for a head: it looks at the size of one that is incomplete alone."""
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""What concerns one connection alone (RFC 9110 §7.6.1), and so is not passed on."""


class GuestGone(ConnectionError):
    """The guest's end broke off, or said what makes no sense; there is nobody to answer."""


Join = Callable[[Wire], Awaitable[None]]


@dataclass(slots=True)
class Request:
    """One request of a guest; ``body`` is None where there is none. ``upgrade``: it asks for a WebSocket."""

    head: RequestHead
    body: Body | None
    protocol: Protocol
    upgrade: bool = False


@dataclass(slots=True)
class Response:
    """One answer. ``trailers`` are there once the body was read to its end."""

    status: int
    headers: Headers
    body: Body
    reason: bytes = b""
    trailers: Headers = field(default_factory=Headers)
    tunnel: Wire | None = None
    """With status 101: the server's end, of which the pipeline makes `join`."""
    join: Join | None = None
    """With status 101: connects a guest with the server until either is done."""
    close: bool = False
    """The guest's connection is of no use any more."""


def header(headers: Headers, name: bytes) -> bytes | None:
    """Return the first value of a header; names in ``headers`` are lower case."""
    return next((value for key, value in headers if key == name), None)


def without(headers: Headers, *names: bytes) -> Headers:
    return [(key, value) for key, value in headers if key not in names]


def end_to_end(headers: Headers) -> Headers:
    """Return what is passed on: without what concerns one connection, nor what ``Connection`` names as such."""
    named = {token.strip().lower() for key, value in headers if key == b"connection" for token in value.split(b",")}
    return [(key, value) for key, value in headers if key not in HOP_BY_HOP and key not in named]


async def no_body() -> Body:
    """Return a body without bytes."""
    return
    yield b""  # what makes it a generator


async def body_of(data: bytes) -> Body:
    if data:
        yield data

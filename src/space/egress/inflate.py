"""Answers as they can be looked through: compressed ones are unpacked on their way, in memory that does not grow."""

from __future__ import annotations

import zlib
from typing import Protocol

from space.egress.denials import Failed
from space.egress.messages import Body, Response, header, without

PART_BYTES_MAX, PIECE_BYTES = 256 * 1024, 16 * 1024
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


class _Inflater(Protocol):
    @property
    def unconsumed_tail(self) -> bytes: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def eof(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


def readable(response: Response, method: str) -> Response:
    """Return an answer whose body is as it was before the server compressed it.

    Raises ``Failed`` for what was asked for as it is and came in a form that cannot be looked through.
    """
    encoding = (header(response.headers, b"content-encoding") or b"identity").strip().lower()
    if encoding == b"identity" or method == "HEAD" or response.status in {101, 204, 304}:
        return response
    if encoding not in {b"gzip", b"x-gzip", b"deflate"}:
        raise Failed(
            "encoded-answer", 502, "The server compresses its answer in a way in which no secret could be found in it."
        )
    response.headers = without(response.headers, b"content-encoding", b"content-length")
    response.body = _inflated(response.body)
    return response


async def _inflated(body: Body) -> Body:
    inflater: _Inflater | None = None
    ended = False
    try:
        async for piece in _pieces(body):
            data = piece
            while data:
                if inflater is None:
                    data = data.lstrip(b"\0") if ended else data
                    if not data:
                        break
                    inflater = _inflater(data)
                part = inflater.decompress(data, PART_BYTES_MAX)
                if part:
                    yield part
                data = inflater.unconsumed_tail
                if inflater.eof:  # gzip may be several one after the other, and zeros
                    data, inflater, ended = inflater.unused_data, None, True
    except zlib.error as error:
        raise Failed("encoded-answer", 502, "The server's answer is not compressed as it says.") from error
    if inflater is not None:
        raise Failed("server-closed", 502, "The server broke off its answer.")


async def _pieces(body: Body) -> Body:
    """Cut a body small: of what there is many a time in one piece, the rest of the piece is copied each time."""
    async for chunk in body:
        for at in range(0, len(chunk), PIECE_BYTES):
            yield chunk[at : at + PIECE_BYTES]


def _inflater(data: bytes) -> _Inflater:
    """Return what unpacks a body that begins so: ``deflate`` is zlib's format, and for some servers the bare one."""
    zlib_head = len(data) < 2 or (data[0] & 0x0F == zlib.DEFLATED and int.from_bytes(data[:2]) % 31 == 0)
    bare = data[:1] != b"\x1f" and not zlib_head
    return zlib.decompressobj(-zlib.MAX_WBITS if bare else _GZIP_OR_ZLIB)

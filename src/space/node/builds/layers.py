"""Tar streams out of compressed files, in bounded memory: a thread decompresses, one piece ahead of its reader."""

from __future__ import annotations

import asyncio
import bz2
import hashlib
import lzma
import zlib
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import IO, Protocol

import zstandard

from space.errors import RequestError

PIECE_BYTES = 1024 * 1024
_READ_BYTES = 256 * 1024
_WINDOW_BYTES_MAX = 128 * 1024 * 1024
"""What a zstd frame may have its decoder keep; registries' own limit is 8 MiB."""
_XZ_MEMORY_MAX = 256 * 1024 * 1024
_GZIP, _BZIP2, _XZ, _ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_EMPTY_MAX = 1024
"""Parts of a compressed file, one after the other, in which there is nothing: whoever writes more means harm."""
BROKEN = (zlib.error, zstandard.ZstdError, lzma.LZMAError, EOFError, OSError, ValueError)


def compression_of(head: bytes) -> str | None:
    """Return by which program bytes were compressed, as their first ones tell; None: by none."""
    for magic, name in ((_GZIP, "gzip"), (_BZIP2, "bzip2"), (_XZ, "xz"), (_ZSTD, "zstd")):
        if head.startswith(magic):
            return name
    return None


async def plain_tar(path: Path, *, digest: str | None = None) -> AsyncGenerator[bytes]:
    """Yield what is in a file that may be compressed, piece by piece.

    Raises ``RequestError`` (``layer-damaged``) when it is cut off, damaged, or in the end not what ``digest`` says.
    """
    pieces = decompressed_file(path)
    hashed = hashlib.sha256()

    def following() -> bytes:
        try:
            piece = next(pieces, b"")
        except BROKEN as error:
            raise RequestError(f"Compressed data cannot be read: {error}", code="layer-damaged") from error
        hashed.update(piece)
        return piece

    async with aclosing(_ahead(following, pieces.close)) as ahead:
        async for piece in ahead:
            yield piece
    if digest is not None and f"sha256:{hashed.hexdigest()}" != digest:
        raise RequestError("A layer is not what the image's configuration says.", code="layer-damaged")


async def digest_of(path: Path) -> str:
    """Return the digest of a file's bytes."""

    def work() -> str:
        with path.open("rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()

    return await asyncio.to_thread(work)


async def _ahead(following: Callable[[], bytes], close: Callable[[], object]) -> AsyncGenerator[bytes]:
    """Yield what ``following`` returns, until it is empty; while one piece is used a thread makes the next."""
    loop = asyncio.get_running_loop()
    upcoming = loop.run_in_executor(None, following)
    try:
        while piece := await asyncio.shield(upcoming):
            upcoming = loop.run_in_executor(None, following)
            yield piece
    finally:
        await asyncio.wait([upcoming])
        if not upcoming.cancelled():
            upcoming.exception()  # Looked at, though nobody asks for it any more.
        close()


def decompressed_file(path: Path) -> Generator[bytes]:
    """Yield what is in a file, at most ``PIECE_BYTES`` at a time; raises one of ``BROKEN``."""
    with path.open("rb") as file:
        yield from decompressed(file)


def decompressed(file: IO[bytes]) -> Iterator[bytes]:
    """Yield what is in a file that can be sought in."""
    head = file.read(8)
    file.seek(0)
    match compression_of(head):
        case None:
            return iter(lambda: file.read(PIECE_BYTES), b"")
        case "gzip":
            return _inflated(file)
        case "bzip2":
            return _decoded(file, bz2.BZ2Decompressor)
        case "xz":
            return _decoded(file, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_MAX))
        case _:
            return _unzstd(file)


def _inflated(file: IO[bytes]) -> Iterator[bytes]:
    """All members of a gzip file, as one. Zeros behind them are padding."""
    data, empty = file.read(_READ_BYTES), 0
    while data.strip(b"\0"):
        member = zlib.decompressobj(wbits=31)
        empty = _check_empty(empty)
        while not member.eof:
            if piece := member.decompress(data, PIECE_BYTES):
                empty = 0
                yield piece
            data = member.unconsumed_tail
            if not data and not member.eof and not (data := file.read(_READ_BYTES)) and not piece:
                raise EOFError("it is cut off")
        data = member.unused_data or file.read(_READ_BYTES)


def _check_empty(empty: int) -> int:
    if empty >= _EMPTY_MAX:
        raise ValueError(f"more than {_EMPTY_MAX} parts of it are empty")
    return empty + 1


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


def _decoded(file: IO[bytes], fresh: Callable[[], _Decoder]) -> Iterator[bytes]:
    data, empty = file.read(_READ_BYTES), 0
    while data.strip(b"\0"):
        decoder = fresh()
        empty = _check_empty(empty)
        while not decoder.eof:
            if decoder.needs_input and not data and not (data := file.read(_READ_BYTES)):
                raise EOFError("it is cut off")
            piece, data = decoder.decompress(data, PIECE_BYTES), b""
            if piece:
                empty = 0
                yield piece
        data = decoder.unused_data or file.read(_READ_BYTES)


def _unzstd(file: IO[bytes]) -> Iterator[bytes]:
    decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    with decoder.stream_reader(file, read_size=_READ_BYTES, read_across_frames=True, closefd=False) as reader:
        while piece := reader.read(PIECE_BYTES):
            yield piece

"""Signs of life on a stream that has nothing to say, as often as its client asked for."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import TypeVar

HEADER = "keepalive-ping-interval"
DEFAULT_S = 90.0
SHORTEST_S = 1.0

T = TypeVar("T")


async def with_pings(source: AsyncGenerator[T], headers: Mapping[str, str]) -> AsyncGenerator[T | None]:
    """Yield what ``source`` does, and a None whenever that was silent for as long as the headers say."""
    every_s = _interval(headers.get(HEADER))
    coming = asyncio.ensure_future(anext(source))
    try:
        while True:
            await asyncio.wait((coming,), timeout=every_s)
            if not coming.done():
                yield None
                continue
            try:
                item = coming.result()
            except StopAsyncIteration:
                return
            coming = asyncio.ensure_future(anext(source))
            yield item
    finally:
        coming.cancel()
        await asyncio.wait((coming,))
        if not coming.cancelled():
            coming.exception()
        await source.aclose()


def _interval(text: str | None) -> float:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 6:
        return DEFAULT_S
    return max(SHORTEST_S, float(text))

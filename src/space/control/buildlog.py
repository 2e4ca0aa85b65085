"""The log of a build, as it comes from the node, and behind it how the build ended. Reading goes on across restarts."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from space.control import builds
from space.control.control import Control
from space.errors import HostError, NotFound, OutcomeUnknown, Unavailable
from space.model.build import OPEN, Build

QUIET_S = 15.0
AGAIN_S = 0.5
AGAIN_S_MAX = 120.0
"""How long a node that does not answer is asked again."""
TEXT_CHARS_MAX = 64 * 1024


async def read(control: Control, build: Build, start: int, *, follow: bool) -> AsyncGenerator[dict[str, Any] | None]:
    """Yield ``{type: log, n, at, stream, text}`` from line ``start`` on, and at last ``{type: end, next, …}``.

    With ``follow`` the end comes when the build has ended; None is yielded when there was nothing for a while. Raises
    ``Unavailable`` when the node does not answer for long.
    """
    failing_since: float | None = None
    while True:
        whole, was_over = False, build.state not in OPEN
        try:
            async for line in _with_quiet(control.node.build_log(build.id, start, follow=follow)):
                failing_since = None
                start = start if line is None else line["n"] + 1
                yield line
            whole = True
        except NotFound:
            whole = was_over  # The node does not know of it any more; else, not yet.
        except (Unavailable, OutcomeUnknown):
            failing_since = failing_since or time.monotonic()
            if not follow or time.monotonic() - failing_since > AGAIN_S_MAX:
                raise
        build = await builds.wait(control, build.project_id, build.id, AGAIN_S if follow else 0)
        if not follow or (whole and build.state not in OPEN):
            break
        yield None
    yield _end(build, start)


def _line(line: dict[str, Any]) -> dict[str, Any]:
    number, text = line.get("n"), line.get("text")
    if not isinstance(number, int) or not isinstance(text, str):
        raise HostError("The node's log of a build has a line that is none.", code="node-protocol")
    shown = {"n": number, "at": line.get("at"), "stream": str(line.get("stream")), "text": text[:TEXT_CHARS_MAX]}
    return {"type": "log", **shown}


def _end(build: Build, following: int) -> dict[str, Any]:
    return {
        "type": "end",
        "state": str(build.state),
        "digest": build.digest,
        "code": None if build.failure is None else build.failure.code,
        "next": following,
    }


async def _with_quiet(lines: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[dict[str, Any] | None]:
    """Yield the lines, and None whenever none has come for a while."""
    coming: asyncio.Future[dict[str, Any]] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(lines))
            await asyncio.wait([coming], timeout=QUIET_S)
            if not coming.done():
                yield None
                continue
            arrived, coming = coming, None
            try:
                line = _line(arrived.result())
            except StopAsyncIteration:
                return
            yield line
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait([coming])
        await lines.aclose()

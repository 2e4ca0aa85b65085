"""Following changes below a directory of a sandbox, as the node tells them, in E2B's words."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from space.control.control import Control
from space.control.peers import answer_of
from space.e2b import errors
from space.errors import LimitExceeded, OutcomeUnknown, SandboxError, SpaceError

LINE_BYTES_MAX = 64 * 1024
SHOWN_CHARS = 200
QUIET_S = 60.0
"""The node says every 15 s that it is still there."""
TYPES = {
    "create": "EVENT_TYPE_CREATE",
    "moved-to": "EVENT_TYPE_CREATE",
    "modify": "EVENT_TYPE_WRITE",
    "delete": "EVENT_TYPE_REMOVE",
    "moved-from": "EVENT_TYPE_RENAME",
    "attributes": "EVENT_TYPE_CHMOD",
}
WITH_ENTRY = frozenset({"EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE", "EVENT_TYPE_CHMOD"})


@dataclass(frozen=True, slots=True)
class Watched:
    """What is watched, and for whom. ``path`` is as the client gave it, ``full_path`` where that is."""

    sandbox_id: str
    path: str
    full_path: str
    owner: str
    recursive: bool
    with_entries: bool


async def follow(control: Control, watched: Watched, *, marks: bool = False) -> AsyncGenerator[dict[str, Any]]:
    """Yield ``{"event", "path", …}`` as the node tells it; first ``{"event": "watching"}``, from when on nothing is
    missed.

    Ends when what is watched is gone. Raises when the watch is broken off, such as by the end of the sandbox.
    """
    query = urlencode(
        {
            "path": watched.full_path,
            "user": "root",
            "owner": watched.owner,
            "recursive": "true" if watched.recursive else "false",
            "marks": "true" if marks else "false",
        },
        errors="surrogateescape",
    )
    path = f"/v1/sandboxes/{watched.sandbox_id}/files/watch?{query}"
    async with control.node.pass_on("GET", path, {}, None) as response:
        if response.status != 200:
            await answer_of(control.node, response)
        pending = bytearray()
        while True:
            try:
                async with asyncio.timeout(QUIET_S):
                    chunk = await response.content.readany()
            except TimeoutError as error:
                raise OutcomeUnknown("The node says nothing any more.") from error
            if not chunk:
                return
            pending += chunk
            *blocks, rest = pending.split(b"\n\n")
            pending = bytearray(rest)
            if len(pending) > LINE_BYTES_MAX:
                raise control.node.malformed("has too long a line")
            for block in blocks:
                if (event := _event(bytes(block))) is not None:
                    yield event


def _event(block: bytes) -> dict[str, Any] | None:
    if block == b": watching":
        return {"event": "watching"}
    fields: dict[bytes, bytes] = {}
    for line in block.split(b"\n"):
        name, _, value = line.partition(b": ")
        fields[name] = value
    if b"event" not in fields or b"data" not in fields:
        return None
    name, data = fields[b"event"].decode("latin-1"), json.loads(fields[b"data"])
    if name == "error":
        raise SandboxError(str(data.get("message")), code=str(data.get("code")))
    return {**data, "event": name}


def event_of(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return E2B's event for one of the node's; None for what E2B does not know.

    Raises ``LimitExceeded`` when from here on there is no telling what is missed: E2B has no event that says so.
    """
    kind = TYPES.get(told["event"])
    if told["event"] == "limit":
        where = str(told.get("path", ""))[:SHOWN_CHARS]
        message = f"More directories than can be watched: nothing in {where!r} is seen. Watch fewer of them."
        raise LimitExceeded(message, code="watch-limit")
    if told["event"] == "overflow":
        raise LimitExceeded("More happened than could be told, and some of it is lost. Watch anew.")
    return None if kind is None else {"name": str(told.get("path", "")), "type": kind}


def lost(error: SpaceError) -> SpaceError:
    """Return what a watch that was broken off is to its client."""
    return errors.gone("") if error.code in {"machine-lost", "wrong-state"} else error

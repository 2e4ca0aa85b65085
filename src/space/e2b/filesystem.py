"""E2B's filesystem RPC: each method is one call of the node's files, made as root for the user who is named."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlencode

from space.control.peers import answer_of
from space.e2b import connect, keys, watching
from space.e2b.call import Call, CutOff, stream
from space.e2b.entries import NAMESPACE, entry, in_order
from space.e2b.pings import with_pings
from space.e2b.watching import WITH_ENTRY, Watched
from space.errors import Conflict, InvalidRequest, LimitExceeded, NotFound, SpaceError
from space.model.sandbox import Sandbox

TIMEOUT_S = 60.0
REMOVE_TIMEOUT_S = 300.0
LIST_BYTES_MAX = 32 * 1024 * 1024
DEPTH_MAX = 64


def default_user(sandbox: Sandbox) -> str:
    """Return the user whose files and commands are meant where nobody is named: the template's."""
    defaults: dict[str, Any] = sandbox.details.get("template_defaults") or {}
    return str(defaults.get("user") or "root")


def owner_of(call: Call) -> str:
    return keys.username(call.headers.get("authorization")) or default_user(call.sandbox)


async def stat(call: Call) -> None:
    body = await call.json()
    await call.answer({"entry": await look(call, _path(body), owner_of(call))})


async def list_dir(call: Call) -> None:
    body, owner = await call.json(), owner_of(call)
    path, depth = _path(body), body.get("depth") or 1
    if type(depth) is not int or depth < 1:
        raise InvalidRequest("depth should be at least one")
    top = await look(call, path, owner)
    if top["type"] != "FILE_TYPE_DIRECTORY":
        raise InvalidRequest(f"path is not a directory: {top['path']}")
    found = await _listed(call, top["path"], owner, min(depth, DEPTH_MAX))
    found.sort(key=lambda told: in_order(told["path"]))
    base = top["path"].rstrip("/")
    await call.answer({"entries": [entry(told, f"{base}/{told['path']}") for told in found]})


async def make_dir(call: Call) -> None:
    body, owner = await call.json(), owner_of(call)
    path = _path(body)
    try:
        made = await _ask(call, "POST", "/mkdir", body={"path": path, "user": "root", "owner": owner})
    except Conflict as error:
        if error.code not in {"file-exists", "not-a-directory"}:
            raise
        raise InvalidRequest(f"path already exists but it is not a directory: {path}") from error
    if not made["created"]:
        raise Conflict(f"directory already exists: {made['full_path']}", code="file-exists")
    await call.answer({"entry": await look(call, made["full_path"], owner)})


async def move(call: Call) -> None:
    body, owner = await call.json(), owner_of(call)
    source, destination = _path(body, "source"), _path(body, "destination")
    wanted = {"source": source, "destination": destination, "user": "root", "owner": owner, "parents": True}
    await _ask(call, "POST", "/move", body=wanted)
    await call.answer({"entry": await look(call, destination, owner)})


async def remove(call: Call) -> None:
    body = await call.json()
    flags = {"recursive": "true", "missing_ok": "true"}
    await _ask(call, "DELETE", "", {**_place(_path(body), owner_of(call)), **flags}, timeout_s=REMOVE_TIMEOUT_S)
    await call.answer({})


async def create_watcher(call: Call) -> None:
    watcher = await call.parts.watchers.create(await _watched(call, await call.json()))
    await call.answer({"watcherId": watcher.id})


async def get_watcher_events(call: Call) -> None:
    """All that has happened since the last time, up to this very moment."""
    watcher = call.parts.watchers.get(call.sandbox.id, str((await call.json()).get("watcherId", "")))
    await watcher.catch_up(call.control)
    told = [watcher.events.popleft() for _ in range(len(watcher.events))]
    if not told and watcher.error is not None:
        raise watcher.error
    events = await asyncio.gather(*(_with_entry(call, watcher.watched, event) for event in told[:_ENTRIES_AT_ONCE]))
    for event in told[_ENTRIES_AT_ONCE:]:
        events.append(await _with_entry(call, watcher.watched, event))
    await call.answer({"events": events})


async def remove_watcher(call: Call) -> None:
    call.parts.watchers.remove(call.sandbox.id, str((await call.json()).get("watcherId", "")))
    await call.answer({})


async def watch_dir(call: Call) -> None:
    """What happens below a directory, as it happens."""
    watched = await _watched(call, connect.first(await call.body()))
    await stream(call, _frames(call, watched))


_ENTRIES_AT_ONCE = 16


async def _frames(call: Call, watched: Watched) -> AsyncGenerator[bytes]:
    begun = False
    try:
        async with aclosing(with_pings(watching.follow(call.control, watched), call.headers)) as all_told:
            async for told in all_told:
                if told is None:
                    yield connect.message({"keepalive": {}})
                elif told["event"] == "watching":
                    begun = True
                    yield connect.message({"start": {}})
                elif (event := watching.event_of(told)) is not None:
                    yield connect.message({"filesystem": await _with_entry(call, watched, event)})
    except SpaceError as error:
        if not begun or isinstance(error, LimitExceeded):
            raise  # The last frame says it: the sandbox is there, and what is missing is known.
        raise CutOff from error


async def look(call: Call, path: str, owner: str) -> dict[str, Any]:
    """Return the ``EntryInfo`` of what is at a path."""
    try:
        told = await _ask(call, "GET", "/stat", {**_place(path, owner), "namespace": NAMESPACE})
    except NotFound as error:
        raise NotFound(f"path not found: {path}") from error
    return entry(told, told["full_path"])


async def _with_entry(call: Call, watched: Watched, event: dict[str, Any]) -> dict[str, Any]:
    if not watched.with_entries or event["type"] not in WITH_ENTRY:
        return event
    path = f"{watched.full_path.rstrip('/')}/{event['name']}" if event["name"] else watched.full_path
    try:
        return {**event, "entry": await look(call, path, watched.owner)}
    except SpaceError:
        return event  # It is gone again.


async def _watched(call: Call, body: dict[str, Any]) -> Watched:
    path, owner = _path(body), owner_of(call)
    top = await look(call, path, owner)
    if top["type"] != "FILE_TYPE_DIRECTORY":
        raise InvalidRequest(f"path {top['path']} not a directory")
    recursive, entries = body.get("recursive") is True, body.get("includeEntry") is True
    return Watched(call.sandbox.id, path, top["path"], owner, recursive, entries)


async def _listed(call: Call, path: str, owner: str, depth: int) -> list[dict[str, Any]]:
    query = _query({**_place(path, owner), "depth": str(depth), "namespace": NAMESPACE})
    where = f"/v1/sandboxes/{call.sandbox.id}/files/list?{query}"
    body = bytearray()
    async with call.control.node.pass_on("GET", where, {}, None) as response:
        if response.status != 200:
            await answer_of(call.control.node, response)
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > LIST_BYTES_MAX:
                raise LimitExceeded("The directory has too many entries to be listed at once.", code="list-too-long")
    return (await asyncio.to_thread(json.loads, bytes(body)))["entries"]


async def _ask(
    call: Call,
    method: str,
    what: str,
    query: dict[str, str] | None = None,
    *,
    body: dict[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    path = f"/v1/sandboxes/{call.sandbox.id}/files{what}" + (f"?{_query(query)}" if query else "")
    try:
        return await call.control.node.call(method, path, timeout_s, body)
    except InvalidRequest as error:
        raise named(error, (query or body or {}).get("owner", "")) from error


def named(error: InvalidRequest, owner: str) -> InvalidRequest:
    """Return the error with E2B's words where it is the user that there is not."""
    if error.details.get("field") in {"user", "owner"}:
        return InvalidRequest(f"invalid username: '{owner}'", field="user")
    return error


def _place(path: str, owner: str) -> dict[str, str]:
    return {"path": path, "user": "root", "owner": owner}


def _query(fields: dict[str, str]) -> str:
    return urlencode(fields, errors="surrogateescape")


def _path(body: dict[str, Any], name: str = "path") -> str:
    """Return a path of a request; an empty one is the user's home."""
    path = body.get(name, "")
    if not isinstance(path, str) or "\0" in path:
        raise InvalidRequest(f"{name} must be a path")
    return path or "~"


METHODS = {
    "Stat": stat,
    "ListDir": list_dir,
    "MakeDir": make_dir,
    "Move": move,
    "Remove": remove,
    "CreateWatcher": create_watcher,
    "GetWatcherEvents": get_watcher_events,
    "RemoveWatcher": remove_watcher,
    "WatchDir": watch_dir,
}

"""Routes of files: raw bytes both ways, directories, tar archives, watches. Paths are the guest's own to resolve."""

from __future__ import annotations

import asyncio
import email.utils
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from space.errors import GuestError, SpaceError
from space.node.call import JSON_TYPE, BrokenOff, Call
from space.node.guests import Guest
from space.node.parse import (
    check_path,
    invalid,
    parse_flag,
    parse_mark,
    parse_metadata,
    parse_mode,
    parse_namespace,
    parse_owner,
    parse_path,
    parse_range,
    parse_user,
)
from space.node.transfers import Download, Upload
from space.protocol.checks import MessageError
from space.protocol.messages import check_file_line, check_watch_line, decode_json

if TYPE_CHECKING:
    from space.protocol.messages import FileInfo

BYTES_TYPE = "application/octet-stream"
TAR_TYPE = "application/x-tar"
SSE_TYPE = "text/event-stream"
LINE_BYTES_MAX = 64 * 1024
SSE_QUIET_S = 15.0
REMOVE_TIMEOUT_S = 300.0
DEPTH_MAX = 64


async def read(call: Call) -> None:
    """A file's bytes, all of them or one range."""
    guest, place = _guest(call), _at_path(call)
    asked = call.header("range")
    ranged: tuple[int, int] | None = None
    fields: dict[str, Any] = dict(place)
    if asked is not None:
        size = (await guest.request("stat", {**place, "follow": True}))["size"]
        ranged = parse_range(asked, size)
        if ranged is not None:
            fields["offset"], fields["length"] = ranged
    download = Download(guest)
    info = await download.open("file-read", fields)
    headers = {
        "content-type": BYTES_TYPE,
        "accept-ranges": "bytes",
        "last-modified": email.utils.formatdate(info["mtime_ns"] // 10**9, usegmt=True),
    }
    if ranged is not None:
        start, length = ranged
        headers["content-range"] = f"bytes {start}-{start + length - 1}/{info['size']}"
    else:
        # A size of 0 is not to be believed: /proc is full of files that are longer.
        length = info["size"] or None
    await _send_download(call, download, headers, status=206 if ranged else 200, length=length)


async def write(call: Call) -> None:
    """Write a file. When the body breaks off, a new file is removed again and an old one is as far as it came."""
    guest, fields = _guest(call), _at_path(call)
    fields["mode"] = parse_mode(call.query.get("mode"))
    fields["exclusive"] = parse_flag(call.query, "exclusive")
    fields["namespace"] = parse_namespace(call.query.get("namespace"))
    fields["metadata"] = parse_metadata(call.query.get("metadata"))
    size = call.header("content-length")
    if size is not None and size.isdecimal() and len(size) <= 18:
        fields["size"] = int(size)
    result = await Upload(guest).run("file-write", fields, call.chunks())
    written = {"size": result["size"], "created": result["created"], **_where(result)}
    await call.answer(written, 201 if result["created"] else 200)


async def remove(call: Call) -> None:
    """Remove a file or an empty directory, with ``recursive`` a directory and all in it."""
    fields = _at_path(call)
    fields["recursive"] = parse_flag(call.query, "recursive")
    fields["missing_ok"] = parse_flag(call.query, "missing_ok")
    await _guest(call).request("remove", fields, timeout_s=REMOVE_TIMEOUT_S)
    await call.answer_empty()


async def stat(call: Call) -> None:
    """What a path is; a link is itself unless ``follow`` is set."""
    fields = _at_path(call)
    fields["namespace"] = parse_namespace(call.query.get("namespace"))
    info = await _guest(call).request("stat", {**fields, "follow": parse_flag(call.query, "follow")})
    await call.answer(_file(info, fields["path"]))  # type: ignore[arg-type]


async def list_directory(call: Call) -> None:
    """What is in a directory, and with ``depth`` in those below; ``path`` of an entry is relative to the directory."""
    fields = _at_path(call)
    depth = call.query.get("depth", "1")
    if not (depth.isascii() and depth.isdecimal() and 1 <= int(depth[:4]) <= DEPTH_MAX):
        raise invalid("depth", f"must be a whole number from 1 to {DEPTH_MAX}")
    fields["depth"] = int(depth)
    fields["namespace"] = parse_namespace(call.query.get("namespace"))
    download = Download(_guest(call))
    await download.open("list-dir", fields)
    try:
        await call.body(1)
        await call.begin(200, {"content-type": JSON_TYPE})
        async with call.while_connected():
            await call.write(b'{"entries":[')
            first = True
            async for lines in _batches(download):
                entries = [json.dumps(_listed(line)) for line in lines]
                await call.write(((b"" if first else b",") + ",".join(entries).encode()) if entries else b"")
                first = first and not entries
            await call.write(b"]}")
        await call.finish()
    finally:
        download.close()


async def mkdir(call: Call) -> None:
    """Make a directory and those above it; one that exists is fine."""
    body = await call.json()
    fields = {
        "path": check_path(body.get("path"), "path"),
        "user": parse_user(body.get("user")),
        "owner": parse_owner(body.get("owner")),
        "mode": parse_mode(_text(body, "mode")),
        "parents": body.get("parents", True) is not False,
    }
    result = await _guest(call).request("mkdir", fields)
    await call.answer({"created": result["created"], **_where(result)}, 201 if result["created"] else 200)


async def move(call: Call) -> None:
    """Rename or move; a file at the destination is replaced."""
    body = await call.json()
    fields = {
        "source": check_path(body.get("source"), "source"),
        "target": check_path(body.get("destination"), "destination"),
        "user": parse_user(body.get("user")),
        "owner": parse_owner(body.get("owner")),
        "overwrite": body.get("overwrite", True) is not False,
        "parents": body.get("parents", False) is True,
    }
    await _guest(call).request("move", fields)
    await call.answer_empty()


async def read_archive(call: Call) -> None:
    """A directory's content as a tar archive."""
    download = Download(_guest(call))
    await download.open("archive-read", _at_path(call))
    await _send_download(call, download, {"content-type": TAR_TYPE}, status=200, length=None)


async def write_archive(call: Call) -> None:
    """Unpack a tar archive into a directory."""
    result = await Upload(_guest(call)).run("archive-write", _at_path(call), call.chunks())
    await call.answer(result)


async def watch(call: Call) -> None:
    """What happens to a file or directory, as server-sent events, until the client goes or the watch is over."""
    fields = _at_path(call)
    fields["recursive"] = parse_flag(call.query, "recursive")
    fields["marks"] = parse_flag(call.query, "marks")
    download = Download(_guest(call))
    await download.open("watch", fields)
    try:
        await call.body(1)
        await call.begin(200, {"content-type": SSE_TYPE, "cache-control": "no-store"})
        async with call.while_connected():
            await call.write(b": watching\n\n")
            async for text in _events(download):
                await call.write(text)
        await call.finish()
    finally:
        download.close()


async def mark_watches(call: Call) -> None:
    """Have each watch that was asked for with ``marks`` tell all that has happened by now, and then this mark."""
    mark = parse_mark(await call.json())
    await _guest(call).request("watch-mark", {"mark": mark})
    await call.answer_empty()


async def _send_download(
    call: Call, download: Download, headers: dict[str, str], *, status: int, length: int | None
) -> None:
    """Pass a stream on. A file that turns out shorter than it said ends as a broken-off answer, never a whole one."""
    if length is not None:
        headers["content-length"] = str(length)
    try:
        await call.body(1)
        left = length
        async with call.while_connected(), aclosing(download.chunks()) as chunks:
            await call.begin(status, headers)
            async for chunk in chunks:
                data = chunk if left is None else chunk[:left]
                if data:
                    await call.write(data)
                left = None if left is None else left - len(data)
        if left:
            raise BrokenOff
        await call.finish()
    finally:
        download.close()


async def _batches(download: Download, *, quiet_s: float | None = 120.0) -> AsyncIterator[list[bytes]]:
    """Yield the whole lines of each chunk; a line without end is the guest's fault and ends the stream."""
    rest = b""
    async for chunk in download.chunks(quiet_s=quiet_s):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            raise GuestError("The guest sent a line that is too long.")
        yield [line for line in lines if line]


async def _events(download: Download) -> AsyncIterator[bytes]:
    """Yield server-sent events, and a comment now and then so that all on the way see a living connection."""
    batches = aiter(_batches(download, quiet_s=None))
    coming = asyncio.ensure_future(anext(batches))
    try:
        while True:
            await asyncio.wait((coming,), timeout=SSE_QUIET_S)
            if not coming.done():
                yield b": still here\n\n"
                continue
            try:
                lines = coming.result()
            except (StopAsyncIteration, SpaceError) as error:
                if isinstance(error, SpaceError):
                    yield _sse("error", {"code": error.code, "message": error.message})
                return
            coming = asyncio.ensure_future(anext(batches))
            for line in lines:
                event = _checked(check_watch_line, line)
                yield _sse(event.pop("event"), event)
    finally:
        coming.cancel()


def _sse(event: str, data: dict[str, Any]) -> bytes:
    return f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()


def _listed(line: bytes) -> dict[str, Any]:
    info = _checked(check_file_line, line)
    return _file(info, info["path"])


def _checked(check: Any, line: bytes) -> dict[str, Any]:
    try:
        return check(decode_json(line))
    except MessageError as error:
        raise GuestError(f"The guest's answer is malformed: {error}") from error


def _file(info: FileInfo | dict[str, Any], path: str) -> dict[str, Any]:
    return {
        "name": info["name"],
        "path": path,
        "type": info["type"],
        "size": info["size"],
        "mode": f"{info['mode']:04o}",
        "user": info["owner"],
        "group": info["group"],
        "uid": info["uid"],
        "gid": info["gid"],
        "modified_at": _time(info["mtime_ns"]),
        "target": info["target"],
        **_where(info),
        **{name: value for name in ("leads_to", "metadata") if (value := info.get(name)) is not None},
    }


def _where(info: FileInfo | dict[str, Any]) -> dict[str, Any]:
    """Where a file is, absolute: told where an owner was named."""
    return {} if info.get("full_path") is None else {"full_path": info["full_path"]}  # type: ignore[typeddict-item]


def _time(nanoseconds: int) -> str | None:
    try:
        moment = datetime.fromtimestamp(nanoseconds / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat().replace("+00:00", "Z")


def _at_path(call: Call) -> dict[str, Any]:
    query = call.query
    return {
        "path": parse_path(query),
        "user": parse_user(query.get("user")),
        "owner": parse_owner(query.get("owner")),
    }


def _guest(call: Call) -> Guest:
    return call.node.machines.guest(call.params["sandbox"])


def _text(body: dict[str, Any], field: str) -> str | None:
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise invalid(field, "must be a string")
    return value

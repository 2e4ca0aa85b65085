"""E2B's files over HTTP: raw bytes out, raw bytes or a form in. Streamed both ways, any size."""

import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

from space.control.peers import answer_of
from space.e2b.call import Call, ClientGone, CutOff, while_connected
from space.e2b.entries import NAMESPACE
from space.e2b.filesystem import default_user, named
from space.e2b.uploads import Form, in_pieces, unzipped
from space.errors import Conflict, InvalidRequest, NotFound, SpaceError, Unauthenticated

PASSED_ON = ("content-length", "content-range", "accept-ranges", "last-modified")
METADATA_HEADER = "x-metadata-"
FIELD = "file"


async def read(call: Call) -> None:
    """A file's bytes to its end, whatever its size is said to be; or a range of them."""
    path, owner = _path(call.query.get("path")), _owner(call)
    headers = {"range": call.headers["range"]} if "range" in call.headers else {}
    await call.body()

    async def pass_on() -> None:
        where = f"/v1/sandboxes/{call.sandbox.id}/files?{_query(path, owner)}"
        async with call.control.node.pass_on("GET", where, headers, None) as response:
            if response.status >= 300:
                await answer_of(call.control.node, response)
            kept = {name: response.headers[name] for name in PASSED_ON if name in response.headers}
            # What a guest has written must not act as a page of this origin in somebody's browser.
            kept |= {"content-type": "application/octet-stream", "content-security-policy": "sandbox"}
            await call.begin(response.status, kept)
            async for chunk in response.content.iter_any():
                await call.write(chunk)
            await call.finish()

    try:
        await while_connected(call, pass_on())
    except SpaceError as error:
        if call.status:
            raise CutOff from error
        raise _told(error, path, owner) from error


async def write(call: Call) -> None:
    """Write one file or several, as the user who is named; each is there as a whole when this is answered."""
    owner, given = _owner(call), call.query.get("path")
    content_type = call.headers.get("content-type", "")
    if content_type.startswith("multipart/"):
        written = await _write_form(call, content_type, given, owner)
    else:
        encoding = call.headers.get("content-encoding", "identity")
        if encoding not in {"identity", "gzip"}:
            raise InvalidRequest("The body may be plain, or compressed by gzip.")
        chunks = unzipped(call.chunks()) if encoding == "gzip" else call.chunks()
        written = [await _write_one(call, _path(given), owner, chunks)]
    await call.answer(written)


async def _write_form(call: Call, content_type: str, given: str | None, owner: str) -> list[dict[str, Any]]:
    form = Form(content_type, call.chunks())
    written: list[dict[str, Any]] = []
    while (head := await form.next()) is not None:
        if head.field != FIELD:
            async for _ in form.data():
                pass
            continue
        if given is not None and written:
            raise InvalidRequest("With a path in the query there can be one file only.")
        path = _path(given if given is not None else head.filename)
        written.append(await _write_one(call, path, owner, form.data()))
    if not written:
        raise InvalidRequest("The form has no file.")
    return written


async def _write_one(call: Call, path: str, owner: str, chunks: AsyncIterator[bytes]) -> dict[str, Any]:
    metadata = _metadata(call)
    query = _query(path, owner, namespace=NAMESPACE, metadata=json.dumps(metadata))
    where = f"/v1/sandboxes/{call.sandbox.id}/files?{query}"
    source = _Source(chunks)
    try:
        async with call.control.node.pass_on("PUT", where, {}, source.pieces()) as response:
            answer = await answer_of(call.control.node, response)
    except SpaceError as error:
        if source.broke is not None:
            raise source.broke from error
        raise _told(error, path, owner) from error
    full_path = str(answer["full_path"])
    shown = {"path": full_path, "name": full_path.rpartition("/")[2], "type": "file"}
    return shown | ({"metadata": metadata} if metadata else {})


class _Source:
    """A file's bytes on their way, and why there were no more of them: the node is told only that there are none."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self.broke: Exception | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in in_pieces(self._chunks):
                yield piece
        except (SpaceError, ClientGone) as error:
            self.broke = error
            raise


def _told(error: SpaceError, path: str, owner: str) -> SpaceError:
    """Return the error with E2B's words, where it has some."""
    if isinstance(error, NotFound) and error.code == "file-not-found":
        return NotFound(f"path '{path}' does not exist")
    if isinstance(error, Conflict) and error.code in {"is-a-directory", "not-a-file", "not-a-directory"}:
        return InvalidRequest(f"path '{path}' is a directory" if error.code == "is-a-directory" else error.message)
    if isinstance(error, InvalidRequest) and error.details.get("field") in {"user", "owner"}:
        return Unauthenticated(named(error, owner).message)
    return error


def _metadata(call: Call) -> dict[str, str]:
    return {
        name.removeprefix(METADATA_HEADER): value
        for name, value in call.headers.items()
        if name.startswith(METADATA_HEADER) and name != METADATA_HEADER
    }


def _owner(call: Call) -> str:
    return call.query.get("username") or default_user(call.sandbox)


def _query(path: str, owner: str, **more: str) -> str:
    return urlencode({"path": path, "user": "root", "owner": owner, **more}, errors="surrogateescape")


def _path(given: str | None) -> str:
    if not given or "\0" in given:
        raise InvalidRequest("A path is needed.")
    return given

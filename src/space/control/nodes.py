"""The client of a node's Unix socket: lifecycle calls, the machine events, and requests passed on as they are."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from pathlib import Path
from typing import Any, cast

import aiohttp
from yarl import URL

from space import error_wire
from space.errors import HostError, NotFound, OutcomeUnknown, SpaceError, Unavailable

CONNECT_TIMEOUT_S = 5
COMMAND_TIMEOUT_S = 30
ANSWER_BYTES_MAX = 16 * 1024 * 1024
EVENT_BYTES_MAX = 4 * 1024 * 1024
READ_BUFFER_BYTES = 512 * 1024


class Node:
    """One node. Every call is bounded; who cannot be reached is ``Unavailable``, a lost answer ``OutcomeUnknown``."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def boot(self, machine: str, wanted: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        return await self._call("PUT", f"/machines/{machine}", timeout_s, wanted)

    async def act(self, machine: str, verb: str, wanted: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Pause, resume, suspend, wake, stop or start a machine; returns ``{timings, ready}`` when that is done."""
        return await self._call("POST", f"/machines/{machine}/{verb}", timeout_s, wanted)

    async def destroy(self, machine: str, timeout_s: float) -> dict[str, Any]:
        return await self._call("DELETE", f"/machines/{machine}", timeout_s)

    async def inspect(self, machine: str) -> dict[str, Any]:
        """Return ``{machine, state, cause?, usage?}``; a machine that the node does not know is ``absent``."""
        try:
            return await self._call("GET", f"/machines/{machine}", 10)
        except NotFound:
            return {"machine": machine, "state": "absent"}

    async def machines(self) -> list[dict[str, Any]]:
        return _objects(await self._call("GET", "/machines", 30), "machines")

    async def templates(self) -> list[dict[str, Any]]:
        return _objects(await self._call("GET", "/templates", 30), "templates")

    async def doctor(self) -> list[dict[str, Any]]:
        return _objects(await self._call("GET", "/doctor", 60), "checks")

    async def set_token_key(self, pem: bytes) -> None:
        async with self._open("PUT", "/token-key", 10, data=pem) as response:
            await _answer(response)

    async def create_command(self, sandbox_id: str, command_id: str, body: bytes) -> dict[str, Any]:
        """Reserve a command under that id and return its description. Asked again with the id, it is the same one."""
        headers = {**_JSON, "X-Space-Command": command_id}
        path = f"/v1/sandboxes/{sandbox_id}/commands"
        async with self._open("POST", path, COMMAND_TIMEOUT_S, data=body, headers=headers) as response:
            answer = await _answer(response)
        shown: Any = answer.get("command", answer)
        if not isinstance(shown, dict):
            raise HostError("The node's answer describes no command.", code="node-protocol")
        return cast("dict[str, Any]", shown)

    async def command(self, command_id: str) -> dict[str, Any]:
        return await self._call("GET", f"/v1/commands/{command_id}", COMMAND_TIMEOUT_S)

    async def commands(self, sandbox_id: str) -> list[dict[str, Any]]:
        """Return the sandbox's commands that the node remembers."""
        return _objects(await self._call("GET", f"/v1/sandboxes/{sandbox_id}/commands", COMMAND_TIMEOUT_S), "items")

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield what the node reports about its machines until the connection ends."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=None)
        async with self._open("GET", "/machines/events", timeout) as response:
            if response.status != 200:
                await _answer(response)
            async for event in _lines(response.content):
                yield event

    @contextlib.asynccontextmanager
    async def pass_on(
        self,
        method: str,
        path_and_query: str,
        headers: Mapping[str, str],
        body: bytes | AsyncIterable[bytes] | None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request as it is and give the response as it comes; neither body is held in memory.

        ``path_and_query`` is sent as it stands: the caller builds the path from parts it has checked.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=None)
        async with self._open(method, path_and_query, timeout, data=body, headers=headers) as response:
            yield response

    async def _call(
        self, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        async with self._open(method, path, timeout_s, data=data, headers=_JSON) as response:
            return await _answer(response)

    @contextlib.asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        timeout: float | aiohttp.ClientTimeout,
        *,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        if not isinstance(timeout, aiohttp.ClientTimeout):
            timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT_S)
        url = URL(f"http://node{path}", encoded=True)
        try:
            async with self._connected().request(method, url, data=data, headers=headers, timeout=timeout) as response:
                yield response
        except aiohttp.ClientConnectorError as error:
            raise Unavailable("The node is not reachable.", code="node-unavailable") from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise OutcomeUnknown("The node's answer was lost.") from error

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self._socket), limit=0),
                auto_decompress=False,
                read_bufsize=READ_BUFFER_BYTES,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers={"User-Agent", "Content-Type"},
                raise_for_status=False,
            )
        return self._session


_JSON = {"Content-Type": "application/json"}


async def _answer(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the object that the node answered, or raise the error that it is."""
    body = await response.content.read(ANSWER_BYTES_MAX)
    while not response.content.at_eof() and len(body) < ANSWER_BYTES_MAX:
        body += await response.content.read(ANSWER_BYTES_MAX - len(body))
    try:
        answer = json.loads(body) if body else {}
    except ValueError as error:
        raise HostError("The node's answer is not JSON.", code="node-protocol") from error
    if response.status >= 400:
        raise _error(response.status, answer)
    # Lists travel bare or in an object; callers name the one they expect.
    return cast("dict[str, Any]", answer if isinstance(answer, dict) else {"": answer})


def _error(status: int, answer: Any) -> SpaceError:
    described = answer.get("error") if isinstance(answer, dict) else None
    return error_wire.parse(described, error_wire.class_of_status(status))


def _objects(answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    listed: Any = answer.get(name, answer.get(""))
    if not isinstance(listed, list):
        raise HostError(f"The node's answer has no list of {name}.", code="node-protocol")
    return [cast("dict[str, Any]", item) for item in cast("list[Any]", listed) if isinstance(item, dict)]


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[dict[str, Any]]:
    """Yield the objects of an NDJSON stream; a line that is too long or no object ends it with an error."""
    pending = bytearray()
    while chunk := await content.readany():
        pending += chunk
        *lines, rest = pending.split(b"\n")
        pending = bytearray(rest)
        if len(pending) > EVENT_BYTES_MAX:
            raise HostError("The node's event is too long.", code="node-protocol")
        for line in lines:
            if not line.strip():
                continue
            try:
                event: Any = json.loads(line)
            except ValueError as error:
                raise HostError("The node's event is not JSON.", code="node-protocol") from error
            if isinstance(event, dict):
                yield cast("dict[str, Any]", event)
        await asyncio.sleep(0)

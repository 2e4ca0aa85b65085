"""Calls of another process of SPACE over its Unix socket: HTTP with JSON, streams of lines, all of it bounded."""

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import aiohttp
from yarl import URL

from space import error_wire, tracing
from space.errors import HostError, SpaceError, Unavailable

CONNECT_TIMEOUT_S = 5
ANSWER_BYTES_MAX = 16 * 1024 * 1024
SOCKET_BYTES_MAX = 1024 * 1024
LINE_BYTES_MAX = 4 * 1024 * 1024
READ_BUFFER_BYTES = 512 * 1024
JSON = {"Content-Type": "application/json"}


class Peer(ABC):
    """One process that serves the api. What it refuses is raised as the error that it says."""

    name: ClassVar[str]

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    @abstractmethod
    def unreachable(self) -> Unavailable:
        """Return the error for a socket that nobody answers at."""

    @abstractmethod
    def lost(self) -> SpaceError:
        """Return the error for an answer that did not come."""

    @abstractmethod
    def malformed(self, what: str) -> HostError:
        """Return the error for an answer that makes no sense: ``what`` goes on behind "The answer"."""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(
        self, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send an object, or nothing, and return the object that is answered."""
        data = None if body is None else json.dumps(body).encode()
        async with self.open(method, path, timeout_s, data=data, headers=JSON) as response:
            return await answer_of(self, response)

    async def text(self, path: str, timeout_s: float) -> bytes:
        """Return what is at a path as it is, cut off where it gets too long."""
        async with self.open("GET", path, timeout_s) as response:
            if response.status != 200:
                await answer_of(self, response)
            return await _read(response)

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        timeout: float | aiohttp.ClientTimeout,
        *,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request and give the response as it comes."""
        if not isinstance(timeout, aiohttp.ClientTimeout):
            timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT_S)
        url = URL(f"http://{self.name}{path}", encoded=True)
        try:
            with tracing.Span(f"{self.name} {method}", "client"):
                sent = {**(headers or {}), **tracing.headers()}
                async with self._connected().request(method, url, data=data, headers=sent, timeout=timeout) as response:
                    yield response
        except aiohttp.ClientConnectorError as error:
            raise self.unreachable() from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise self.lost() from error

    @contextlib.asynccontextmanager
    async def socket(self, path: str, protocol: str) -> AsyncGenerator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket. A handshake that is refused is raised as the error that it is, without its text."""
        url = URL(f"http://{self.name}{path}", encoded=True)
        try:
            async with self._connected().ws_connect(
                url,
                protocols=(protocol,),
                headers=tracing.headers(),
                max_msg_size=SOCKET_BYTES_MAX,
            ) as opened:
                yield opened
        except aiohttp.WSServerHandshakeError as error:
            refused = error_wire.class_of_status(error.status)
            raise refused(None) from error
        except aiohttp.ClientConnectorError as error:
            raise self.unreachable() from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise self.lost() from error

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


async def answer_of(peer: Peer, response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the object that was answered, or raise the error that it is."""
    body = await _read(response)
    try:
        answer = json.loads(body) if body else {}
    except ValueError as error:
        raise peer.malformed("is not JSON") from error
    if response.status >= 400:
        described = answer.get("error") if isinstance(answer, dict) else None
        raise error_wire.parse(described, error_wire.class_of_status(response.status))
    # Lists travel bare or in an object; callers name the one they expect.
    return cast("dict[str, Any]", answer if isinstance(answer, dict) else {"": answer})


async def lines_of(peer: Peer, content: aiohttp.StreamReader) -> AsyncGenerator[dict[str, Any]]:
    """Yield the objects of an NDJSON stream; a line that is too long or no object ends it with an error."""
    pending = bytearray()
    while chunk := await content.readany():
        pending += chunk
        *lines, rest = pending.split(b"\n")
        pending = bytearray(rest)
        if len(pending) > LINE_BYTES_MAX:
            raise peer.malformed("has too long a line")
        for line in lines:
            if not line.strip():
                continue
            try:
                event: Any = json.loads(line)
            except ValueError as error:
                raise peer.malformed("has a line that is not JSON") from error
            if isinstance(event, dict):
                yield cast("dict[str, Any]", event)
        await asyncio.sleep(0)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = await response.content.read(ANSWER_BYTES_MAX)
    while not response.content.at_eof() and len(body) < ANSWER_BYTES_MAX:
        body += await response.content.read(ANSWER_BYTES_MAX - len(body))
    return body

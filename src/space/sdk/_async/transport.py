"""Requests over one pool of connections: timeouts, retries, and answers turned into values or errors."""

import json
import socket
import ssl
from contextlib import suppress
from typing import Any

import httpx
from tenacity import AsyncRetrying

from space.errors import HostError, OutcomeUnknown, SpaceError, Unavailable
from space.sdk.attach import SUBPROTOCOL
from space.sdk.backends.asyncio import Socket
from space.sdk.config import Credentials
from space.sdk.errors import from_answer
from space.sdk.requests import CONNECTION_LOST, UNREACHABLE, Endpoint, Request, retry_policy

CONNECT_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 60.0
POOL_TIMEOUT_S = 60.0
_LIMITS = httpx.Limits(max_connections=200, max_keepalive_connections=50, keepalive_expiry=60.0)
# An answer may be hours away while a command runs; keep-alive packets tell that apart from a host that is gone.
_SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
        if hasattr(socket, name)
    ),
]


class AsyncTransport:
    """The connections of one client. ``api`` is the endpoint of its API."""

    def __init__(self, credentials: Credentials) -> None:
        self.api = Endpoint(credentials.url, credentials.api_key)
        self._use_proxy = not self.api.loopback
        # Without authorities nothing is trusted; they take long to load and are loaded for the first https address.
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._authorities = False
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(verify=self._tls, limits=_LIMITS, socket_options=_SOCKET_OPTIONS),
            verify=self._tls,
            limits=_LIMITS,
            trust_env=self._use_proxy,
            headers={"user-agent": "space-python"},
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def call(self, request: Request, at: Endpoint | None = None) -> Any:
        """Send a request, with retries where that is safe; return the JSON of the answer (None when it has no body)."""
        response = await self._send_patiently(request, at or self.api, stream=False)
        if not response.content:
            return None
        try:
            return json.loads(response.content)
        except ValueError as error:
            raise HostError(
                f"The answer to {request.method} {request.path} is not JSON.", code="unexpected-answer"
            ) from error

    async def start(self, request: Request, at: Endpoint | None = None) -> httpx.Response:
        """Send a request and return its answer with the body still to come. The caller closes it."""
        return await self._send_patiently(request, at or self.api, stream=True)

    async def attach(self, path: str, query: dict[str, str], at: Endpoint, protocol: str = SUBPROTOCOL) -> Socket:
        """Open a WebSocket that speaks ``protocol``. Raises `Disconnected` when that may work later."""
        url = f"{at.websocket_url}{path}" + (f"?{httpx.QueryParams(query)}" if query else "")
        return await Socket.open(
            url,
            {"authorization": f"Bearer {at.secret}"},
            protocol=protocol,
            tls=self._trusted() if url.startswith("wss:") else None,
            use_proxy=self._use_proxy,
        )

    async def _send_patiently(self, request: Request, at: Endpoint, *, stream: bool) -> httpx.Response:
        async for attempt in AsyncRetrying(**retry_policy(request, only_way=at is self.api)):
            with attempt:
                return await self._send(request, at, stream=stream)
        raise AssertionError  # The last attempt raises its own error.

    async def _send(self, request: Request, at: Endpoint, *, stream: bool) -> httpx.Response:
        if at.url.startswith("https:"):
            self._trusted()
        built = self._http.build_request(
            request.method,
            at.url + request.path,
            params=request.params or None,
            headers=self._headers(request, at),
            content=request.content if request.body is None else json.dumps(request.body).encode(),
            timeout=httpx.Timeout(
                connect=CONNECT_TIMEOUT_S, read=request.read_s, write=WRITE_TIMEOUT_S, pool=POOL_TIMEOUT_S
            ),
        )
        try:
            response = await self._http.send(built, stream=stream)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise Unavailable(
                f"{at.url} cannot be reached ({error or type(error).__name__}).", code=UNREACHABLE, url=at.url
            ) from error
        except httpx.TransportError as error:
            raise lost(request, error) from error
        if response.status_code >= 400:
            raise await _refusal(response)
        return response

    def _headers(self, request: Request, at: Endpoint) -> dict[str, str]:
        headers = {"authorization": f"Bearer {at.secret}", **request.headers}
        if request.body is not None:
            headers["content-type"] = "application/json"
        return headers

    def _trusted(self) -> ssl.SSLContext:
        if not self._authorities:
            self._tls.load_default_certs()
            self._authorities = True
        return self._tls


async def _refusal(response: httpx.Response) -> SpaceError:
    body = b""
    with suppress(httpx.TransportError):
        body = await response.aread()
    await response.aclose()
    error = from_answer(response.status_code, body)
    with suppress(KeyError, ValueError):
        error.details["retry_after_s"] = float(response.headers["retry-after"])
    return error


def lost(request: Request, error: Exception) -> SpaceError:
    """Return the error for an answer that did not come, or not whole."""
    reason = str(error) or type(error).__name__
    cls = Unavailable if request.method in {"GET", "HEAD"} else OutcomeUnknown
    return cls(f"The connection was lost during {request.method} {request.path} ({reason}).", code=CONNECTION_LOST)

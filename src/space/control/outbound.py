"""Requests to addresses that customers name: to public ones only, whatever a name resolves to, and no further.

Names are resolved here, every address is looked at, and the connection goes to an address that was. No proxy, no
redirect, no cookie; of the answer only the status is read, and what it says where that is asked for, up to a bound.
"""

import asyncio
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import AddrInfoType
from yarl import URL

from space.errors import InvalidRequest
from space.model.addresses import Allowed, as_address, is_public

TIMEOUT_S = 10.0
URL_CHARS_MAX = 2000
NAME_CHARS_MAX = 253
RESOLVERS = 32
ANSWER_BYTES_MAX = 64 * 1024

_LABEL = re.compile(r"[a-z0-9_-]{1,63}", re.ASCII | re.IGNORECASE)


class AddressRefused(OSError):
    """An address that is not public, nor one that the operator allows."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a request: the status of its answer, or why there was none.

    ``body`` is what the answer says, where that was asked for; it may hold secrets and is not shown.
    """

    status: int | None
    reason: str | None
    seconds: float
    body: bytes = field(default=b"", repr=False)

    @property
    def good(self) -> bool:
        return self.reason is None


def is_numeric(host: str) -> bool:
    """Whether a URL's host is no name, and so is connected to without being resolved; it may be no address either."""
    return ":" in host or host.replace(".", "").isdigit()


def check_url(text: str, allowed: Allowed) -> None:
    """Raise ``InvalidRequest`` unless requests may go to that URL as far as can be told before a name is resolved."""
    try:
        url = URL(text)
        port = url.explicit_port
    except ValueError:
        raise _invalid("It is not a URL.") from None
    host = url.host
    if len(text) > URL_CHARS_MAX or not host or not text.isascii() or any(c <= " " for c in text):
        raise _invalid(f"It must be an absolute URL of at most {URL_CHARS_MAX} ASCII characters, without spaces.")
    if url.user is not None or url.password is not None or url.raw_fragment or "#" in text:
        raise _invalid("It must have no user, password or fragment.")
    if port == 0:
        raise _invalid("Its port must be 1 to 65535.")
    if url.scheme != "https" and not (url.scheme == "http" and allowed.host(host)):
        raise _invalid("It must begin with https://.")
    if not is_numeric(host):
        if len(host) > NAME_CHARS_MAX or not all(map(_LABEL.fullmatch, host.removesuffix(".").split("."))):
            raise _invalid("Its host is neither a name nor an address.")
        return
    literal = as_address(host)
    if literal is None or not (is_public(literal) or allowed.address(literal)):
        raise _invalid("Its address is not public. The operator can allow hosts by `webhook_private_hosts`.")


class Sender:
    """Sends requests. Everything is bounded: time, threads, and what is read of an answer."""

    def __init__(self, private_hosts: Sequence[str], ca_file: Path | None = None) -> None:
        """``ca_file`` has certificates that are trusted beside the system's."""
        self.allowed = Allowed(private_hosts)
        self._ca_file = ca_file
        self._tls: ssl.SSLContext | None = None
        self.testing = 0
        """Tests of webhooks that are under way."""
        # Of its own: a name server that does not answer must hold up nobody else's threads.
        self._resolving = ThreadPoolExecutor(RESOLVERS, "webhook-resolver")

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Sent:
        """Post ``body`` to a URL that was checked when it was given. Never raises but for cancellation."""
        return await self._send(url, headers, body, answer_bytes_max=0)

    async def ask(self, url: str, headers: Mapping[str, str], body: bytes) -> Sent:
        """As ``post``, and read the answer, whatever its status."""
        return await self._send(url, headers, body, answer_bytes_max=ANSWER_BYTES_MAX)

    def close(self) -> None:
        self._resolving.shutdown(wait=False, cancel_futures=True)

    async def _send(self, url: str, headers: Mapping[str, str], body: bytes, *, answer_bytes_max: int) -> Sent:
        began = time.perf_counter()
        status, said = None, b""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, said = await self._post(URL(url), headers, body, answer_bytes_max)
            reason = None if 200 <= status < 300 else "status"
        except TimeoutError:
            reason = "timeout"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = _reason(error)
        return Sent(status, reason, time.perf_counter() - began, said)

    async def _post(
        self, url: URL, headers: Mapping[str, str], body: bytes, answer_bytes_max: int
    ) -> tuple[int, bytes]:
        host = url.host or ""
        if url.scheme != "https" and not self.allowed.host(host):
            raise AddressRefused
        way = _Way(host, self.allowed, self._resolving)
        if is_numeric(host):
            way.check(host)
        connector = aiohttp.TCPConnector(
            resolver=way,
            socket_factory=way.socket,
            use_dns_cache=False,
            force_close=True,
            limit=1,
            ssl=self._trusting(),
        )
        async with (
            aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False) as session,
            session.post(url, data=body, headers=headers, allow_redirects=False) as response,
        ):
            said = b""
            while len(said) < answer_bytes_max and (more := await response.content.read(answer_bytes_max - len(said))):
                said += more
            return response.status, said

    def _trusting(self) -> ssl.SSLContext | bool:
        """Return how servers are verified: as always, or with the operator's certificates besides."""
        if self._ca_file is None:
            return True
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.load_verify_locations(self._ca_file)
        return self._tls


class _Way(AbstractResolver):
    """The way to one host: names are resolved as the system does, and only to addresses that are permitted."""

    def __init__(self, host: str, allowed: Allowed, threads: ThreadPoolExecutor) -> None:
        self._allowed = allowed
        self._named = allowed.name(host)
        self._threads = threads

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return a name's addresses, or raise ``AddressRefused`` when one of them is not permitted."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        )
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        results: list[ResolveResult] = []
        for of, _, protocol, _, where in found:
            self.check(str(where[0]))
            results.append(
                ResolveResult(
                    hostname=host, host=str(where[0]), port=int(where[1]), family=of, proto=protocol, flags=numeric
                )
            )
        return results

    def socket(self, info: AddrInfoType) -> socket.socket:
        """Make the socket for a connection to exactly this address: what nobody has resolved passes here, too."""
        family, kind, protocol, _, where = info
        self.check(str(where[0]))
        return socket.socket(family, kind, protocol)

    async def close(self) -> None:
        """Nothing is held."""

    def check(self, text: str) -> None:
        """Raise ``AddressRefused`` unless connections may go to that address."""
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            # "127.1" and 2130706433 are addresses to the kernel, and none that could be judged here.
            raise AddressRefused from None
        if not (self._named or is_public(address) or self._allowed.address(address)):
            raise AddressRefused


def _reason(error: Exception) -> str:
    """Say in a word why a request got no answer."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, AddressRefused):
            return "address-refused"
        if isinstance(cause, socket.gaierror):
            return "name-unknown"
        cause = cause.__cause__ or getattr(cause, "os_error", None)
    match error:
        case aiohttp.ClientSSLError():
            return "tls"
        case aiohttp.ClientConnectorError() | ConnectionError():
            return "connect"
        case _:
            return "protocol"


def _invalid(why: str) -> InvalidRequest:
    return InvalidRequest(f"url: {why}", field="url")

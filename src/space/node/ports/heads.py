"""Heads of requests and answers on their way between a client and a server in a sandbox. Pure.

What concerns one connection alone never passes, what is the platform's own neither. Framing is never passed on: each
side is told anew how long a body is, by who writes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from starlette.types import Scope

from space.errors import RequestError
from space.node.ports.target import Target

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"),
    }
)
_OURS = frozenset({b"host", b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"forwarded"})
_NOT_FROM_GUESTS = frozenset({b"alt-svc"})
"""It would lead clients to another server for this host."""
_NOT_IN_COMMON = frozenset(
    {b"set-cookie", b"set-cookie2", b"clear-site-data", b"strict-transport-security", b"service-worker-allowed"}
)
"""What a server may not say for a host that is not its own."""
_AS_A_DOCUMENT = (b"content-security-policy", b"sandbox; default-src 'none'")
"""What a guest has written must not act as a page of an origin that it shares."""
_PLATFORM = b"x-space-"
_KEY = b"bearer sk_"
_FORWARDED_BYTES_MAX = 1024


def for_server(scope: Scope, target: Target, *, upgrade: bool = False) -> Headers:
    """Return the headers that the server is sent for a request; raise ``RequestError`` for an ambiguous one."""
    given: Headers = scope["headers"]
    dropped = _HOP_BY_HOP | _OURS | target.drop | _named_in_connection(given)
    host = first(given, b"host") or b""
    # Kept exactly as it came: how long the body is was read from it.
    framing = [(name, value) for name, value in given if name in {b"content-length", b"transfer-encoding"}]
    if len(framing) > 1:
        raise RequestError("The request's length is given in two ways.", code="ambiguous-length")
    kept: Headers = [(b"host", _host_for(target, host))]
    for name, value in given:
        if name in dropped or name.startswith(_PLATFORM) or name == b"content-length":
            continue
        if name == b"authorization" and value.lower().startswith(_KEY):
            continue
        if name == b"cookie":
            value = _without(value, target.drop_cookies) if target.cookies else b""  # noqa: PLW2901
            if not value:
                continue
        kept.append((name, value))
    kept += _forwarded(scope, given, host)
    if upgrade:
        return [*kept, (b"upgrade", b"websocket"), (b"connection", b"upgrade")]
    if framing:
        chunked = framing[0][0] == b"transfer-encoding"
        kept.append((b"transfer-encoding", b"chunked") if chunked else framing[0])
    return [*kept, (b"connection", b"close")]


def for_client(status: int, given: Iterable[tuple[bytes, bytes]], target: Target, *, upgrade: bool = False) -> Headers:
    """Return the headers of an answer for the client. Names are in lower case, as h11 gives them."""
    headers = list(given)
    dropped = _HOP_BY_HOP | _NOT_FROM_GUESTS | _named_in_connection(headers)
    if not target.cookies:
        dropped |= _NOT_IN_COMMON
    names = {name for name, _ in headers}
    if status in {204, 304} or b"transfer-encoding" in names or upgrade:
        dropped |= {b"content-length"}
    kept: Headers = []
    for name, value in headers:
        if name in dropped or name.startswith(_PLATFORM):
            continue
        if name == b"set-cookie":
            cookie = _own_cookie(value, target.drop_cookies)
            if cookie is not None:
                kept.append((name, cookie))
            continue
        kept.append((name, value))
    if upgrade:
        return [*kept, (b"upgrade", b"websocket"), (b"connection", b"upgrade")]
    return kept if target.cookies else [*kept, _AS_A_DOCUMENT]


def path_for_server(scope: Scope, target: Target) -> bytes:
    """Return what to ask the server for, as it goes on the wire."""
    if target.path is not None:
        return target.path
    query: bytes = scope["query_string"]
    return scope["raw_path"] + (b"?" + query if query else b"")


def first(headers: Headers, name: bytes) -> bytes | None:
    """Return the first value of a header."""
    return next((value for found, value in headers if found == name), None)


def cookies_named(headers: Headers, wanted: bytes) -> Iterator[bytes]:
    """Yield the values of all cookies of that name. There may be several: others may set some, too."""
    for name, value in headers:
        if name == b"cookie":
            for pair in value.split(b";"):
                found, _, content = pair.strip().partition(b"=")
                if found.strip() == wanted:
                    yield content


def _named_in_connection(headers: Headers) -> frozenset[bytes]:
    named = (word for name, value in headers if name == b"connection" for word in value.split(b","))
    # A client that names these would have the server not see who it is, or a body that nobody measures.
    return frozenset(word.strip().lower() for word in named) - {b"host", b"content-length", b"cookie", b"authorization"}


def _host_for(target: Target, host: bytes) -> bytes:
    if target.host is None:
        return host
    return target.host.replace("${PORT}", str(target.port)).encode("latin-1")


def _without(cookies: bytes, names: frozenset[bytes]) -> bytes:
    pairs = [pair.strip() for pair in cookies.split(b";")]
    return b"; ".join(pair for pair in pairs if pair and pair.partition(b"=")[0].strip() not in names)


def _own_cookie(value: bytes, reserved: frozenset[bytes]) -> bytes | None:
    """Return a cookie so that it is for the host that set it alone; None for one that may not be set."""
    pair, *attributes = value.split(b";")
    if pair.partition(b"=")[0].strip() in reserved:
        return None
    kept = [one for one in attributes if one.partition(b"=")[0].strip().lower() != b"domain"]
    return b";".join([pair, *kept])


def _forwarded(scope: Scope, given: Headers, host: bytes) -> Headers:
    client = scope.get("client")
    peer = client[0].encode("latin-1", "replace") if client else b""
    before = b", ".join(value for name, value in given if name == b"x-forwarded-for")[-_FORWARDED_BYTES_MAX:]
    chain = b", ".join(part for part in (before, peer) if part)
    proto = first(given, b"x-forwarded-proto")
    if proto not in {b"http", b"https"}:
        secure = scope.get("scheme") in {"https", "wss"}
        proto = b"https" if secure else b"http"
    found = [(b"x-forwarded-host", host), (b"x-forwarded-proto", proto)]
    return [(b"x-forwarded-for", chain), *found] if chain else found

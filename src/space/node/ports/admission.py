"""Who may ask a port: by a token in a header, once in the address, then in a cookie; or everybody where it is public.

A cookie is sent by browsers whoever wrote the page that asks. Pages of one sandbox must not use another's: a request
whose only proof is a cookie has to come from a page of the same sandbox, or be somebody's going there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from starlette.types import Scope

from space.errors import Forbidden, SpaceError, Unauthenticated
from space.node.ports import heads
from space.node.tokens import Grant

HEADER = b"x-space-token"
COOKIE = b"space_preview"
QUERY = b"space_token"
_HOST = re.compile(rb"([0-9]{1,5})-(sbx[a-z2-7]{16})\.(.+)")
_TOKEN = re.compile(rb"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_COOKIES_MAX = 4
"""Cookies of our name that are looked at: others may have set some for all hosts of the domain."""


@dataclass(frozen=True, slots=True)
class Admission:
    """How a request got in, and what of it was only for that."""

    query: bytes
    """The request's query without the token."""
    drop: frozenset[bytes]
    """Headers that the server must not see."""
    by_query: tuple[str, int] | None = None
    """The token and when it expires, where it came in the address: it is better kept in a cookie."""


def preview_of(scope: Scope, domain: str) -> tuple[str, int] | None:
    """Return the sandbox and port that a request's host names, ``{port}-{sandbox}.{domain}``; None for any other."""
    found = _HOST.fullmatch(_without_port((heads.first(scope["headers"], b"host") or b"").lower()))
    if found is None or found[3] != _without_port(domain.lower().encode()):
        return None
    return found[2].decode(), int(found[1])


def admit(
    scope: Scope, *, public: bool, check: Callable[[str], Grant], opens: Callable[[Grant], bool], own_host: bool
) -> Admission:
    """Return how the request may go on, or raise ``Unauthenticated`` or ``Forbidden``.

    ``check`` verifies a token, ``opens`` says whether one is for this port. Without ``own_host`` there are no cookies.
    """
    headers: heads.Headers = scope["headers"]
    query, in_query = _split_query(scope["query_string"])
    bearer = _bearer(headers)
    drop = frozenset({HEADER})
    if bearer is not None and _verified(check, bearer) is not None:
        drop |= {b"authorization"}  # Ours, whether or not it opens anything here.
    refusal: SpaceError | None = None
    for token in filter(None, (heads.first(headers, HEADER), bearer, in_query)):
        grant = _verified(check, token)
        if grant is None:
            continue
        problem = _problem(grant, opens)
        if problem is None:
            by_query = (token.decode(), int(grant.expires_at)) if token is in_query and own_host else None
            return Admission(query, drop, by_query)
        refusal = refusal or problem
    if public:
        return Admission(query, drop)
    if own_host and _by_cookie(headers, check, opens):
        if not _from_itself(headers, scope.get("method", "GET")):
            raise Forbidden("A page of another origin may not use this port.", code="cross-origin")
        return Admission(query, drop)
    raise refusal or Unauthenticated("A token for this port is needed: `space port` shows one.", code="token-needed")


def cookie(token: str, seconds: int, *, secure: bool) -> bytes:
    """Return a cookie that holds the token for the host that sets it, and for nobody's script."""
    tail = "; Secure" if secure else ""
    name = COOKIE.decode()
    return f"{name}={token}; Path=/; Max-Age={max(0, seconds)}; HttpOnly; SameSite=Lax{tail}".encode()


def location(scope: Scope, query: bytes) -> bytes:
    """Return the address of a request on its own host, without what its query had for us."""
    # More than one slash in front would name another host.
    path = b"/" + scope["raw_path"].lstrip(b"/\\")
    return quote(path, safe="/:@!$&'()*+,;=-._~%").encode() + (b"?" + query if query else b"")


def is_navigation(headers: heads.Headers) -> bool:
    """Whether somebody is going to this address, so that it will be seen."""
    mode = heads.first(headers, b"sec-fetch-mode")
    if mode is not None:
        return mode == b"navigate"
    return b"text/html" in (heads.first(headers, b"accept") or b"")


def _problem(grant: Grant, opens: Callable[[Grant], bool]) -> SpaceError | None:
    if grant.expired:
        return Unauthenticated("The token has expired: `space port` shows a new one.", code="token-expired")
    return None if opens(grant) else Forbidden("The token is not for this port, or was revoked.", code="wrong-token")


def _by_cookie(headers: heads.Headers, check: Callable[[str], Grant], opens: Callable[[Grant], bool]) -> bool:
    found = list(heads.cookies_named(headers, COOKIE))[:_COOKIES_MAX]
    grants = [grant for token in found if (grant := _verified(check, token)) is not None]
    return any(_problem(grant, opens) is None for grant in grants)


def _from_itself(headers: heads.Headers, method: str) -> bool:
    """Whether a request with a cookie comes from a page of the same sandbox, or of nobody."""
    host = heads.first(headers, b"host") or b""
    origin = heads.first(headers, b"origin")
    if origin is not None:
        try:
            asking = urlsplit(origin).netloc
        except ValueError:  # no URL, which no browser sends
            return False
        return asking.lower() == host.lower() or _sandbox_of(asking) == (_sandbox_of(host) or b"-")
    site = heads.first(headers, b"sec-fetch-site")
    if site in {None, b"same-origin", b"none"}:
        return True
    going = heads.first(headers, b"sec-fetch-mode") == b"navigate" and method in {"GET", "HEAD"}
    return going and heads.first(headers, b"sec-fetch-dest") == b"document"


def _sandbox_of(host: bytes) -> bytes | None:
    found = _HOST.fullmatch(_without_port(host.lower()))
    return None if found is None else found[2] + b"." + found[3]


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.rpartition(b":")
    return (name if colon and port.isdigit() else host).rstrip(b".")


def _verified(check: Callable[[str], Grant], token: bytes) -> Grant | None:
    if _TOKEN.fullmatch(token) is None:
        return None
    try:
        return check(token.decode("ascii"))
    except Unauthenticated:
        return None


def _bearer(headers: heads.Headers) -> bytes | None:
    scheme, _, token = (heads.first(headers, b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def _split_query(query: bytes) -> tuple[bytes, bytes | None]:
    """Return a query without the token in it, and the token."""
    kept: list[bytes] = []
    token: bytes | None = None
    for part in _parts(query):
        if part.startswith(QUERY + b"="):
            token = part.partition(b"=")[2]
        else:
            kept.append(part)
    return (query, None) if token is None else (b"&".join(kept), token)


def _parts(query: bytes) -> Iterator[bytes]:
    yield from query.split(b"&") if query else ()

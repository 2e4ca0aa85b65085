"""Puts secrets into requests that were granted them, and keeps placeholders from going anywhere else. Pure."""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote, unquote_plus, unquote_to_bytes

from space.egress.scrub import masks_of
from space.egress.sigv4 import Signing, Unsignable, signing
from space.egress.targets import DEFAULT_PORTS
from space.model.grant import PLACEHOLDER, Grant, Placement
from space.model.hosts import normalise_host

PLACED_MAX = 8
"""Secrets in one request: its answer is looked through for every form of each of them."""

_PLACEHOLDER = re.compile(PLACEHOLDER.pattern.encode())
_BASIC = re.compile(rb"\s*basic\s+([A-Za-z0-9+/=_-]+)\s*", re.IGNORECASE)
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_DECODINGS = 3
# Their answers repeat the request by its nature.
_ECHOES = frozenset(("TRACE", "TRACK"))

Header = tuple[bytes, bytes]


@dataclass(slots=True)
class RequestHead:
    """What a request begins with. ``target`` is path and query; names of headers are lower case.

    There is no ``host`` among the headers, nor what concerns one connection alone.
    """

    method: str
    scheme: str
    host: str
    port: int
    target: str
    headers: list[Header] = field(repr=False)

    @property
    def authority(self) -> bytes:
        """What names the server in the request that is sent: without the port where it is the scheme's own."""
        return (self.host if self.port == DEFAULT_PORTS[self.scheme] else f"{self.host}:{self.port}").encode("ascii")


@dataclass(frozen=True, slots=True, repr=False)
class Injected:
    """The head to send. ``secrets`` are the names of those placed, ``masks`` what is taken out of the answer.

    With ``sign`` the head is to be signed last, and only then sent.
    """

    head: RequestHead
    secrets: tuple[str, ...] = ()
    masks: tuple[bytes, ...] = ()
    sign: Signing | None = None


class Misplaced(Exception):
    """A request that is not sent: a placeholder is where its grant is not for, or it cannot be signed.

    ``reason``: ``placeholder-misplaced``, ``placeholder-unknown``, ``grant-expired``, ``not-signable`` or
    ``too-many-secrets``. ``secret`` is the name of the secret, where it is known.
    """

    def __init__(self, reason: str, message: str, secret: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.secret = secret


def inject(head: RequestHead, grants: Sequence[Grant], now: float) -> Injected:
    """Return the head with the secrets that it was granted at ``now``, seconds since 1970. Raises ``Misplaced``.

    The policy has allowed the request. What the guest sent in a secret's place is gone; where the answer is to be
    scrubbed, it is asked for in a form that can be read.
    """
    host = normalise_host(head.host)
    covering = [grant for grant in grants if host is not None and _covers(grant, head, host)]
    present = [grant for grant in covering if not grant.expired(now)]
    _check_placeholders(placeholders(head), grants, covering, present)
    if not present:
        return Injected(head)
    placing = _Placing(head)
    # Those that fill a place come first, so that what is swapped is not what they throw away.
    for grant in sorted(present, key=lambda one: one.placement is Placement.PLACEHOLDER):
        placing.place(grant)
    return placing.done()


def placeholders(head: RequestHead) -> set[str]:
    """Return every placeholder in a head: as it is, in capitals, escaped for a URL, or in a Basic authorization."""
    pieces = [head.target.encode("latin-1", "replace"), f"{head.host} {head.method}".encode("latin-1", "replace")]
    for name, value in head.headers:
        pieces += (name, value)
    return {
        found.decode()
        for piece in pieces
        for reading in _readings(piece)
        for found in _PLACEHOLDER.findall(reading.lower())
    }


def _readings(piece: bytes) -> Iterator[bytes]:
    """Yield a text as it is, and as whoever decodes it may read it."""
    yield piece
    for text in _unescaped(piece):
        if text is not piece:
            yield text
        match = _BASIC.match(text)
        if match is not None:
            yield from _unescaped(_from_base64(match[1]))


def _unescaped(text: bytes) -> Iterator[bytes]:
    yield text
    for _ in range(_DECODINGS):
        if b"%" not in text:
            return
        text = unquote_to_bytes(text)
        yield text


def _from_base64(text: bytes) -> bytes:
    """Decode as lenient readers do; nothing where even they cannot."""
    text = text.translate(_URL_SAFE).rstrip(b"=")
    try:
        return binascii.a2b_base64(text[: len(text) - (len(text) % 4 == 1)] + b"==")
    except binascii.Error:
        return b""


def _covers(grant: Grant, head: RequestHead, host: str) -> bool:
    return head.method.upper() not in _ECHOES and grant.covers(
        scheme=head.scheme, host=host, port=head.port, method=head.method, target=head.target
    )


def _check_placeholders(
    found: Iterable[str], grants: Sequence[Grant], covering: Sequence[Grant], present: Sequence[Grant]
) -> None:
    for placeholder in sorted(found):
        if any(grant.placeholder == placeholder for grant in present):
            continue
        expired = next((grant for grant in covering if grant.placeholder == placeholder), None)
        if expired is not None:
            raise Misplaced("grant-expired", f"The grant of the secret {expired.secret!r} has expired.", expired.secret)
        known = next((grant for grant in grants if grant.placeholder == placeholder), None)
        if known is None:
            raise Misplaced("placeholder-unknown", "The request has a placeholder of a grant that there is no more.")
        raise Misplaced(
            "placeholder-misplaced",
            f"The request has the placeholder of the secret {known.secret!r}, whose grant is not for such a request.",
            known.secret,
        )


class _Placing:
    """One head while secrets are placed in it. A place is filled once: the first grant has it."""

    def __init__(self, head: RequestHead) -> None:
        self._head = replace(head, headers=[*head.headers])
        self._filled: set[str] = set()
        self._secrets: list[str] = []
        self._masks: dict[bytes, None] = {}
        self._sign: Signing | None = None

    def place(self, grant: Grant) -> None:
        match grant.placement:
            case Placement.HEADER:
                self._header(grant, grant.name or "", _filled_in(grant))
            case Placement.BEARER:
                self._header(grant, "authorization", f"Bearer {grant.value.text}", sent=grant.value.text)
            case Placement.BASIC:
                pair = _pair(grant)
                self._header(grant, "authorization", f"Basic {base64.b64encode(pair.encode()).decode()}", sent=pair)
            case Placement.QUERY:
                self._query(grant)
            case Placement.AWS_SIGV4:
                self._signature(grant)
            case Placement.PLACEHOLDER:
                self._swap(grant)

    def done(self) -> Injected:
        head = self._head
        if self._masks:
            kept = [pair for pair in head.headers if pair[0] not in {b"accept-encoding", b"sec-websocket-extensions"}]
            head.headers = [*kept, (b"accept-encoding", b"identity")]
        return Injected(head, tuple(dict.fromkeys(self._secrets)), tuple(self._masks), self._sign)

    def _header(self, grant: Grant, name: str, value: str, *, sent: str | None = None) -> None:
        if not self._fill(f"header {name}"):
            return
        kept = [pair for pair in self._head.headers if pair[0] != name.encode()]
        self._head.headers = [*kept, (name.encode(), value.encode())]
        self._placed(grant, sent or value)

    def _query(self, grant: Grant) -> None:
        name, value = grant.name or "", _filled_in(grant)
        if not self._fill(f"query {name}"):
            return
        path, _, query = self._head.target.partition("?")
        kept = [part for part in query.split("&") if part and unquote_plus(part.partition("=")[0]) != name]
        kept.append(quote(name, safe="") + "=" + quote(value, safe=""))
        self._head.target = path + "?" + "&".join(kept)
        self._placed(grant, value)

    def _signature(self, grant: Grant) -> None:
        try:
            sign = signing(self._head, grant)
        except Unsignable as error:
            raise Misplaced("not-signable", f"The request cannot be signed anew: {error}", grant.secret) from None
        if sign is not None and self._fill("header authorization"):
            self._sign = sign
            self._placed(grant, "")

    def _swap(self, grant: Grant) -> None:
        placeholder, value = (grant.placeholder or "").encode(), grant.value.text.encode()
        head = self._head
        target = head.target.replace(placeholder.decode(), quote(value, safe=""))
        headers = [(name, _swapped(text, placeholder, value)) for name, text in head.headers]
        if target != head.target or headers != head.headers:
            head.target, head.headers = target, headers
            self._placed(grant, grant.value.text)
            for _, text in headers:
                self._mask_basic(grant, text, value)

    def _mask_basic(self, grant: Grant, text: bytes, value: bytes) -> None:
        """Take out of the answer a Basic authorization that holds the value, too."""
        match = _BASIC.fullmatch(text)
        if grant.scrub and match is not None and value in _from_base64(match[1]):
            self._masks[match[1].rstrip(b"=")] = None

    def _fill(self, place: str) -> bool:
        if place in self._filled:
            return False
        self._filled.add(place)
        return True

    def _placed(self, grant: Grant, sent: str) -> None:
        if len(self._secrets) == PLACED_MAX:
            raise Misplaced("too-many-secrets", f"A request can be given {PLACED_MAX} secrets.", grant.secret)
        self._secrets.append(grant.secret)
        if grant.scrub:
            self._masks.update(dict.fromkeys(masks_of(grant.value, sent)))


def _filled_in(grant: Grant) -> str:
    return grant.template.replace("{}", grant.value.text)


def _pair(grant: Grant) -> str:
    if grant.value.kind == "basic":
        return f"{grant.value.fields['username']}:{grant.value.fields['password']}"
    return _filled_in(grant)


def _swapped(text: bytes, placeholder: bytes, value: bytes) -> bytes:
    text = text.replace(placeholder, value)
    match = _BASIC.fullmatch(text)
    if match is None:
        return text
    decoded = _from_base64(match[1])
    if placeholder not in decoded:
        return text
    return b"Basic " + base64.b64encode(decoded.replace(placeholder, value))

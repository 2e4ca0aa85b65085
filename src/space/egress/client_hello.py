"""What a TLS client says before anything is encrypted, read without taking it from the socket.

Formats: RFC 8446 §4.1.2 (ClientHello), RFC 6066 §3 (server_name), RFC 7301 §3.1 (ALPN), RFC 9849 (encrypted
ClientHello, type 0xfe0d; 0xffce was its predecessor ESNI). Everything here comes from a guest.
"""

from __future__ import annotations

from dataclasses import dataclass

RECORD_HANDSHAKE = 22
CLIENT_HELLO = 1
SERVER_NAME, ALPN = 0, 16
ENCRYPTED = frozenset({0xFE0D, 0xFFCE})
HELLO_BYTES_MAX = 16 * 1024
"""Real ones have 200 to 2000 bytes."""
_RECORD_HEAD, _HANDSHAKE_HEAD = 5, 4


class NotAHello(ValueError):
    """The bytes are not the beginning of a TLS connection."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """``server_name`` is what the client sent, not normalised; None: it named nobody."""

    server_name: str | None
    alpn: tuple[str, ...]
    encrypted: bool
    """Whether it carries an encrypted hello, which may name somebody else (or is there to look as if)."""


def parse_client_hello(data: bytes) -> ClientHello | None:
    """Return what ``data`` begins with, None while more has to come, or raise ``NotAHello``."""
    return HelloReader().read(data)


class HelloReader:
    """Reads one as it comes. What was read before is not read again: it may come byte by byte, each in its record."""

    def __init__(self) -> None:
        self._message = bytearray()
        self._at = 0
        """Where the record begins that is not there whole."""

    def read(self, data: bytes) -> ClientHello | None:
        """As `parse_client_hello`; ``data`` begins with all that it was the last time."""
        while True:
            at = self._at
            if len(data) < at + _RECORD_HEAD:
                return _more(data, at)
            kind, major, length = data[at], data[at + 1], int.from_bytes(data[at + 3 : at + 5])
            if kind != RECORD_HANDSHAKE or major != 3 or not 0 < length <= HELLO_BYTES_MAX:
                raise NotAHello("record")
            end = at + _RECORD_HEAD + length
            message = self._message
            if len(data) >= end:
                message += data[at + _RECORD_HEAD : end]
                self._at = end
            else:
                message = message + data[at + _RECORD_HEAD :]
            if len(message) >= _HANDSHAKE_HEAD:
                size = int.from_bytes(message[1:4])
                if message[0] != CLIENT_HELLO or size > HELLO_BYTES_MAX:
                    raise NotAHello("handshake")
                if len(message) >= _HANDSHAKE_HEAD + size:
                    return _parse_body(bytes(message[_HANDSHAKE_HEAD : _HANDSHAKE_HEAD + size]))
            if len(data) < end:
                return _more(data, end)


def _more(data: bytes, at: int) -> None:
    if at > HELLO_BYTES_MAX or len(data) > HELLO_BYTES_MAX or (data and data[0] != RECORD_HANDSHAKE):
        raise NotAHello("length")


class _Fields:
    """Reads length-prefixed fields and raises `NotAHello` where they go beyond their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise NotAHello("field")
        found = self._data[self._at : end]
        self._at = end
        return found

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count))

    def vector(self, count: int) -> _Fields:
        return _Fields(self.take(self.number(count)))

    def rest(self) -> bytes:
        return self._data[self._at :]


def _parse_body(body: bytes) -> ClientHello:
    fields = _Fields(body)
    fields.take(2 + 32)  # version, random
    fields.vector(1)  # session id
    fields.vector(2)  # cipher suites
    fields.vector(1)  # compression methods
    name: str | None = None
    alpn: tuple[str, ...] = ()
    encrypted = False
    seen: set[int] = set()
    extensions = fields.vector(2) if fields else _Fields(b"")
    while extensions:
        kind = extensions.number(2)
        content = extensions.vector(2)
        if kind in seen:
            raise NotAHello("the same extension twice")
        seen.add(kind)
        if kind == SERVER_NAME:
            name = _server_name(content)
        elif kind == ALPN:
            alpn = _alpn(content)
        elif kind in ENCRYPTED:
            encrypted = True
    return ClientHello(name, alpn, encrypted)


def _server_name(content: _Fields) -> str:
    entries = content.vector(2)
    kind, name = entries.number(1), entries.vector(2).rest()
    if kind != 0 or entries or content or not name.isascii():
        raise NotAHello("server name")
    return name.decode("ascii")


def _alpn(content: _Fields) -> tuple[str, ...]:
    entries = content.vector(2)
    found: list[str] = []
    while entries:
        found.append(entries.vector(1).rest().decode("latin-1"))
    return tuple(found)

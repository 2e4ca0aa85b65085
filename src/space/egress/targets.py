"""What a request is for: its authority and its target, in every form that HTTP has for them, each read in one way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from space.egress.denials import BadRequest
from space.model.hosts import normalise_host

TARGET_CHARS_MAX = 16 * 1024
DEFAULT_PORTS = {"http": 80, "https": 443}
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+")


@dataclass(frozen=True, slots=True)
class Authority:
    """A normalised host name and a port."""

    host: str
    port: int


def parse_authority(value: bytes, scheme: str) -> Authority:
    """Read ``host[:port]``; raise ``BadRequest`` for an address, and for anything that is no host name."""
    try:
        text = value.decode("ascii")
    except UnicodeDecodeError:
        raise BadRequest("bad-host", "The Host is not a host name.") from None
    name, colon, port = text.partition(":")
    host = normalise_host(name)
    if host is None:
        raise BadRequest("bad-host", "The Host is not a host name; addresses cannot be asked for by HTTP.")
    if not colon:
        return Authority(host, DEFAULT_PORTS[scheme])
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise BadRequest("bad-host", "The Host's port is not one.")
    return Authority(host, int(port))


def parse_target(target: bytes, method: str, scheme: str, authority: Authority) -> str:
    """Return the path with query. An absolute target must name the same server as Host does."""
    if len(target) > TARGET_CHARS_MAX or not _TARGET.fullmatch(target) or b"#" in target or b"\\" in target:
        raise BadRequest("bad-target", "The request's target is not a path, or longer than 16384 characters.")
    try:
        text = target.decode("ascii")
    except UnicodeDecodeError:
        raise BadRequest("bad-target", "The request's target has characters that are not percent-encoded.") from None
    if text.startswith("/"):
        return text
    if text == "*" and method == "OPTIONS":
        return text
    if not re.match(r"https?://", text, re.IGNORECASE):
        raise BadRequest("bad-target", "The request's target is neither a path nor a URL.")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise BadRequest("bad-target", "The request's target is no URL.") from None
    if parts.scheme.lower() != scheme or parse_authority(parts.netloc.encode("ascii"), scheme) != authority:
        raise BadRequest("authority-mismatch", "The request's URL and its Host name different servers.")
    path = parts.path or "/"
    return f"{path}?{parts.query}" if "?" in text else path

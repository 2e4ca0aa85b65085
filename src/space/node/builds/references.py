"""References to images, and whether their registry may be asked. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from space.errors import Forbidden, InvalidRequest

REFERENCE_CHARS_MAX = 512
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """``host`` (with port, lower case) is None where the reference names none; a ``digest`` goes before a ``tag``."""

    text: str
    host: str | None
    path: str
    tag: str | None
    digest: str | None

    @property
    def repository(self) -> str:
        return self.path if self.host is None else f"{self.host}/{self.path}"

    @property
    def source(self) -> str:
        """How skopeo is told of it."""
        selector = f"@{self.digest}" if self.digest else f":{self.tag or 'latest'}"
        return f"docker://{self.repository}{selector}"

    def at(self, digest: str) -> str:
        """How skopeo is told of exactly this content."""
        return f"docker://{self.repository}@{digest}"

    @property
    def on_loopback(self) -> bool:
        """Whether the registry is on this very host, where a connection in the clear is not overheard."""
        name = (self.host or "").rpartition(":")[0] if _has_port(self.host or "") else (self.host or "")
        if name == "localhost":
            return True
        try:
            return ipaddress.ip_address(name.strip("[]")).is_loopback
        except ValueError:
            return False


def parse_reference(text: str, field: str = "reference") -> ImageReference:
    """Read ``[host[:port]/]path[:tag][@sha256:…]``; raise ``InvalidRequest`` (``invalid-reference``)."""
    wrong = InvalidRequest(
        f"{text[:100]!r} is no reference to an image: it must be [host[:port]/]name[:tag][@sha256:…].",
        code="invalid-reference",
        field=field,
    )
    if len(text) > REFERENCE_CHARS_MAX:
        raise wrong
    rest, at, digest = text.partition("@")
    if at and _DIGEST.fullmatch(digest) is None:
        raise wrong
    first, slash, after = rest.partition("/")
    host = first.lower() if slash and ("." in first or ":" in first or first == "localhost") else None
    path, colon, tag = (after if host is not None else rest).partition(":")
    named = _PATH.fullmatch(path) is not None and (not colon or _TAG.fullmatch(tag) is not None)
    if not named or (host is not None and _HOST.fullmatch(host) is None):
        raise wrong
    return ImageReference(text, host, path, tag if colon else None, digest if at else None)


def check_trusted(reference: ImageReference, trusted: tuple[str, ...] | None) -> None:
    """Raise ``Forbidden`` (``registry-not-trusted``) unless the operator trusts the registry; None: any."""
    if trusted is None or reference.host in {host.lower() for host in trusted}:
        return
    if reference.host is None:
        raise Forbidden(
            f"{reference.text!r} names no registry, and only some are trusted here: write the registry's host.",
            code="registry-not-trusted",
            registry=None,
        )
    raise Forbidden(
        f"This installation does not take images from {reference.host}: the operator may add it to "
        "trusted_template_registries.",
        code="registry-not-trusted",
        registry=reference.host,
    )


def _has_port(host: str) -> bool:
    return re.search(r":[0-9]{1,5}$", host) is not None

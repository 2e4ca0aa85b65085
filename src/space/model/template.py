"""What a template is: a starting root filesystem, known by its content's digest, and defaults."""

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

TAG_DEFAULT = "latest"
_REFERENCE = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]{0,62})(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,62}))?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Template:
    """One published release: ``name:tag`` points to ``digest``. ``defaults`` has ``env``, ``workdir`` and ``user``."""

    name: str
    tag: str
    digest: str
    seen_at: datetime
    defaults: dict[str, Any] = field(default_factory=dict)
    driver: str | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reference:
    """How a caller names a template: by ``digest``, or by ``name`` and ``tag``."""

    name: str | None = None
    tag: str | None = None
    digest: str | None = None


def parse_reference(text: str) -> Reference | None:
    """Read ``name``, ``name:tag`` or ``sha256:…``; None when it is none of them. No tag means ``latest``."""
    if _DIGEST.fullmatch(text):
        return Reference(digest=text)
    match = _REFERENCE.fullmatch(text)
    if match is None:
        return None
    return Reference(name=match["name"], tag=match["tag"] or TAG_DEFAULT)

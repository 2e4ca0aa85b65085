"""Which of E2B's two planes a request is for: the control plane, or a port of one sandbox. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

ENVD_PORT = 49983
PORT_MAX = 65535
_HOST = re.compile(r"([0-9]{1,5})-([a-z0-9]{1,64})\.")
_ID = re.compile(r"[a-z0-9]{1,64}")


@dataclass(frozen=True, slots=True)
class Target:
    """A port of a sandbox. ``sandbox_id`` None: the sandbox by whose token the request is signed."""

    sandbox_id: str | None
    port: int


def target_of(headers: Mapping[str, str], path: str, query: Mapping[str, str]) -> Target | None:
    """Return the port that a request is for, or None for the control plane.

    The host's name decides (``{port}-{id}.{domain}``), then the two headers that the clients send with everything for a
    sandbox. A signed URL of a file names no sandbox where the clients were given one URL for all of them.
    """
    by_host = _HOST.match(headers.get("host", "").lower())
    if by_host is not None:
        return Target(by_host[2], _port(by_host[1]))
    named = headers.get("e2b-sandbox-id")
    if named is not None:
        return Target(id_of(named), _port(headers.get("e2b-sandbox-port", str(ENVD_PORT))))
    if path == "/files" and "signature" in query:
        return Target(None, ENVD_PORT)
    return None


def id_of(text: str) -> str:
    """Return the sandbox id in ``{id}`` or ``{id}-{anything}``; what cannot be one names no sandbox: empty."""
    first = text.partition("-")[0]
    return first if _ID.fullmatch(first) else ""


def _port(text: str) -> int:
    """Return a port; 0, which nobody listens on, for what is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= PORT_MAX else 0

"""Where a request to a server in a sandbox goes, and what that server is to see of it."""

from __future__ import annotations

from dataclasses import dataclass

from space.node.ports.tunnel import Dial


@dataclass(frozen=True, slots=True)
class Target:
    """One port of one sandbox, as one caller of ``proxy.serve`` wants it seen."""

    dial: Dial
    port: int
    path: bytes | None = None
    """Path and query to ask for, as they go on the wire; None: those of the request."""
    host: str | None = None
    """What the server sees as ``Host``, where ``${PORT}`` stands for the port; None: what the client has sent."""
    tls: bool = False
    """Whether the server speaks TLS. Its certificate is not looked at: the way to it leads through nobody else."""
    cookies: bool = True
    """Whether cookies pass, both ways. Not where several sandboxes are answered for under one host."""
    drop: frozenset[bytes] = frozenset()
    """Names, in lower case, of headers that were for the caller and not for the server."""
    drop_cookies: frozenset[bytes] = frozenset()
    """Names of cookies that are the caller's own: the server neither sees nor sets them."""

"""Signs requests last, when their body is known, where what was granted is a key to sign with."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from space.egress.denials import Denied
from space.egress.messages import Body, Request, body_of
from space.egress.sigv4 import Signing

BODY_BYTES_MAX = 8 * 1024 * 1024
BODIES_BYTES_MAX = 16 * 1024 * 1024
"""Of all requests on one connection, of which there may be a hundred."""


@dataclass(slots=True)
class Held:
    """How many bytes of bodies are held for one connection."""

    count: int = 0


async def sign(request: Request, signing: Signing, held: Held) -> int:
    """Sign the request in place. A body whose hash is part of the signature is held in memory until it was sent.

    Returns how many bytes of ``held`` it has: they are to be given back when the request is over.
    """
    body_sha256: str | None = None
    body = b""
    if signing.payload is None:
        body = b"" if request.body is None else await _collected(request.body, held)
        body_sha256 = hashlib.sha256(body).hexdigest()
        request.body = body_of(body) if body else None
    request.head = signing.sign(request.head, time.time(), body_sha256)
    return len(body)


async def _collected(body: Body, held: Held) -> bytes:
    collected = bytearray()
    try:
        async for chunk in body:
            collected += chunk
            held.count += len(chunk)
            _check_size(len(collected), held)
    except BaseException:
        held.count -= len(collected)
        raise
    return bytes(collected)


def _check_size(size: int, held: Held) -> None:
    if held.count > BODIES_BYTES_MAX:
        raise Denied(
            "body-too-large-to-sign",
            f"The requests on one connection that are signed with their bodies have at most {BODIES_BYTES_MAX} "
            "bytes of them at a time.",
        )
    if size > BODY_BYTES_MAX:
        raise Denied(
            "body-too-large-to-sign",
            f"A request that is signed with its body has at most {BODY_BYTES_MAX} bytes of it. For larger ones have"
            " the client send UNSIGNED-PAYLOAD.",
        )

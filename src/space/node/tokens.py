"""Who may use the data plane: tokens signed by the api, each for one sandbox, or one command or port of it.

The node holds only the public key. Tokens are never logged or stored; what is kept of one is its SHA-256.
"""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
import structlog
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from space.errors import InvalidRequest, Unauthenticated
from space.model.ids import is_id

log = structlog.get_logger(__name__)

TOKEN_BYTES_MAX = 4096
KEY_BYTES_MAX = 4096
LEEWAY_S = 5


@dataclass(frozen=True, slots=True)
class Grant:
    """What one valid signature allows: all of a sandbox, or one command or one port of it where that is set.

    ``expired`` is the caller's to judge: what was attached with this very token (``fingerprint``) may be again. A token
    for a port is good as long as that is exposed under ``key``.
    """

    sandbox_id: str
    command_id: str | None
    expired: bool
    fingerprint: str
    expires_at: float
    port: int | None = None
    key: str | None = None

    @property
    def whole(self) -> bool:
        """Whether it is for all of the sandbox."""
        return self.command_id is None and self.port is None


class TokenVerifier:
    """Verifies tokens with the key last set; the key is kept in ``path`` so that a restart can verify at once.

    A file that a power cut has spoiled is as good as none: the api sends its key whenever it meets the node.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key: Ed25519PublicKey | None = None
        if path.exists():
            try:
                self._key = _parse_key(path.read_bytes())
            except InvalidRequest as error:
                log.warning("token-key-damaged", reason=error.message)

    @property
    def has_key(self) -> bool:
        return self._key is not None

    def set_key(self, pem: bytes) -> None:
        """Take a new public key (PEM, Ed25519), or raise ``InvalidRequest``. Tokens of the old key are void at once."""
        key = _parse_key(pem)
        draft = self._path.with_suffix(".new")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        draft.replace(self._path)
        self._key = key

    def verify(self, token: str) -> Grant:
        """Return what the token allows, or raise ``Unauthenticated``. Expiry is reported, not judged."""
        if self._key is None or len(token) > TOKEN_BYTES_MAX:
            raise Unauthenticated
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key,
                algorithms=["EdDSA"],
                options={"require": ["exp", "sub"], "verify_exp": False},
            )
        except (jwt.InvalidTokenError, ValueError) as error:
            raise Unauthenticated from error
        return _grant(claims, token)


def _grant(claims: dict[str, Any], token: str) -> Grant:
    sandbox_id, scope, command_id, expires = claims["sub"], claims.get("scope"), claims.get("cmd"), claims["exp"]
    port, key = claims.get("port"), claims.get("key")
    well_formed = (
        isinstance(sandbox_id, str)
        and is_id("sbx", sandbox_id)
        and isinstance(expires, int | float)
        and (
            (scope == "sandbox" and command_id is None and port is None)
            or (scope == "command" and isinstance(command_id, str) and is_id("cmd", command_id) and port is None)
            or (scope == "port" and command_id is None and type(port) is int and isinstance(key, str))
        )
    )
    if not well_formed:
        raise Unauthenticated
    return Grant(
        sandbox_id=sandbox_id,
        command_id=command_id,
        expired=time.time() > expires + LEEWAY_S,
        fingerprint=hashlib.sha256(token.encode()).hexdigest(),
        expires_at=expires,
        port=port,
        key=key,
    )


def _parse_key(pem: bytes) -> Ed25519PublicKey:
    if len(pem) > KEY_BYTES_MAX:
        raise InvalidRequest("The key is too long.", field="body")
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidRequest("The body is not a public key in PEM.", field="body") from error
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidRequest("The key is not an Ed25519 key.", field="body")
    return key

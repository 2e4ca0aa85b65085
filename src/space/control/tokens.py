"""Signing of data-plane tokens, each good for one sandbox, or one command or port of it. The node verifies them."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from space.control.keyfile import kept
from space.errors import HostError

SANDBOX_TOKEN_S = 3600
COMMAND_TOKEN_S = 60


@dataclass(frozen=True, slots=True)
class Token:
    """A signed token and when it ends. Never logged, never stored."""

    text: str
    expires_at: datetime


class Signer:
    """Signs with one Ed25519 key, which stays in this process and its file."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @property
    def public_pem(self) -> bytes:
        return self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def for_sandbox(self, sandbox_id: str, now: datetime) -> Token:
        return self._sign({"sub": sandbox_id, "scope": "sandbox"}, now, SANDBOX_TOKEN_S)

    def for_command(self, sandbox_id: str, command_id: str, now: datetime) -> Token:
        return self._sign({"sub": sandbox_id, "cmd": command_id, "scope": "command"}, now, COMMAND_TOKEN_S)

    def for_port(self, sandbox_id: str, port: int, key: str, now: datetime, lifetime_s: int) -> Token:
        """Return a token for one port, as long as that is exposed under ``key``."""
        return self._sign({"sub": sandbox_id, "scope": "port", "port": port, "key": key}, now, lifetime_s)

    def _sign(self, claims: dict[str, str | int], now: datetime, lifetime_s: int) -> Token:
        expires_at = now.replace(microsecond=0) + timedelta(seconds=lifetime_s)
        text = jwt.encode({**claims, "exp": int(expires_at.timestamp())}, self._key, algorithm="EdDSA")
        return Token(text, expires_at)


def load_signer(path: Path) -> Signer:
    """Load the key from ``path``, or make one there (mode 0600) when the file is absent."""
    pem = kept(path, _new_pem)
    try:
        key = load_pem_private_key(pem, password=None)
    except ValueError as error:
        raise HostError(f"{path} is not a private key in PEM.", code="invalid-token-key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise HostError(f"{path} is not an Ed25519 key.", code="invalid-token-key")
    return Signer(key)


def _new_pem() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

"""Signing of data-plane tokens: short-lived, each good for one sandbox or one command. The node verifies them."""

import os
import secrets
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

    def _sign(self, claims: dict[str, str], now: datetime, lifetime_s: int) -> Token:
        expires_at = now.replace(microsecond=0) + timedelta(seconds=lifetime_s)
        text = jwt.encode({**claims, "exp": int(expires_at.timestamp())}, self._key, algorithm="EdDSA")
        return Token(text, expires_at)


def load_signer(path: Path) -> Signer:
    """Load the key from ``path``, or make one there (mode 0600) when the file is absent."""
    try:
        pem = path.read_bytes()
    except FileNotFoundError:
        pem = _create(path)
    try:
        key = load_pem_private_key(pem, password=None)
    except ValueError as error:
        raise HostError(f"{path} is not a private key in PEM.", code="invalid-token-key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise HostError(f"{path} is not an Ed25519 key.", code="invalid-token-key")
    return Signer(key)


def _create(path: Path) -> bytes:
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())
    try:
        # A link, not a rename: of two processes that start at once, the first one's key stays.
        path.hardlink_to(draft)
    except FileExistsError:
        return path.read_bytes()
    finally:
        draft.unlink()
    return pem

"""E2B's credentials, made of ours: API keys in E2B's form, tokens of sandboxes, signatures of URLs. Pure.

A sandbox's tokens are derived from a key of the installation and the sandbox's id: they are stored nowhere, and stay
the same over pause and resume.
"""

import base64
import binascii
import hashlib
import hmac
import re
import time
from pathlib import Path

from space.control.keyfile import kept
from space.errors import HostError, Unauthenticated

KEY_BYTES = 32
_E2B_KEY = re.compile(r"e2b_([0-9a-f]{64})")


def api_key(text: str) -> str:
    """Return our API key for one in E2B's form, ``e2b_`` and the same 32 bytes in hexadecimal; others as they are."""
    match = _E2B_KEY.fullmatch(text)
    if match is None:
        return text
    return "sk_" + base64.urlsafe_b64encode(bytes.fromhex(match[1])).rstrip(b"=").decode()


class Tokens:
    """Derives and checks the tokens of sandboxes."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def access(self, sandbox_id: str) -> str:
        """Return the token for the sandbox's envd."""
        return self._derive("envd", sandbox_id)

    def traffic(self, sandbox_id: str) -> str:
        """Return the token for ports of a sandbox that are not public."""
        return self._derive("traffic", sandbox_id)

    def check_access(self, sandbox_id: str, given: str | None) -> None:
        """Raise ``Unauthenticated`` unless ``given`` is the sandbox's envd token."""
        if given is None or not same(given, self.access(sandbox_id)):
            raise Unauthenticated("A valid X-Access-Token is needed.")

    def is_traffic(self, sandbox_id: str, given: str) -> bool:
        """Whether ``given`` is the token for the sandbox's ports."""
        return same(given, self.traffic(sandbox_id))

    def upload(self, key_id: str, files_hash: str, expires: int) -> str:
        """Return the token by which files of that hash may be sent until ``expires`` (seconds since 1970) for the
        project of an API key.
        """
        return f"{expires}.{key_id}.{files_hash}.{self._derive('upload', f'{key_id}:{files_hash}:{expires}')}"

    def check_upload(self, token: str) -> tuple[str, str]:
        """Return the id of the key and the hash that a token is for. Raises ``Unauthenticated``."""
        expires, _, rest = token.partition(".")
        key_id, _, rest = rest.partition(".")
        files_hash = rest.partition(".")[0]
        if not _is_time(expires) or not same(token, self.upload(key_id, files_hash, int(expires))):
            raise Unauthenticated("This is not a URL for an upload.")
        if int(expires) < time.time():
            raise Unauthenticated("The URL for this upload has expired: ask for another one.")
        return key_id, files_hash

    def volume(self, key_id: str, volume_id: str) -> str:
        """Return the token for what is in a volume: good as long as the API key is that it was asked for with."""
        return f"{key_id}.{self._derive('volume', f'{key_id}:{volume_id}')}"

    def check_volume(self, volume_id: str, token: str) -> str:
        """Return the id of the key that a volume's token was asked for with. Raises ``Unauthenticated``."""
        key_id = token.partition(".")[0]
        if not same(token, self.volume(key_id, volume_id)):
            raise Unauthenticated("A token of the volume is needed.")
        return key_id

    def _derive(self, use: str, of: str) -> str:
        return hmac.new(self._key, f"{use}:{of}".encode(), hashlib.sha256).hexdigest()


def load_tokens(path: Path) -> Tokens:
    """Load the installation's key from ``path``, or make it there (mode 0600)."""
    import secrets

    key = kept(path, lambda: secrets.token_bytes(KEY_BYTES))
    if len(key) != KEY_BYTES:
        raise HostError(f"{path} is not a key of {KEY_BYTES} bytes.", code="invalid-e2b-key")
    return Tokens(key)


def signature(path: str, operation: str, username: str, token: str, expiration: str | None) -> str:
    """Return the signature of a file's URL, as E2B's clients make it; ``path`` as it stands in the query."""
    text = f"{path}:{operation}:{username}:{token}"
    if expiration is not None:
        text += f":{expiration}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return "v1_" + base64.b64encode(digest).rstrip(b"=").decode()


def check_signature(given: str | None, expected: str, expiration: str | None) -> None:
    """Raise ``Unauthenticated`` with E2B's own words unless a URL's signature is right and in time."""
    if given is None:
        raise Unauthenticated("missing signature query parameter")
    if not same(given, expected):
        raise Unauthenticated("invalid signature")
    if expiration is not None and (not _is_time(expiration) or int(expiration) < time.time()):
        raise Unauthenticated("signature is already expired")


def username(authorization: str | None) -> str | None:
    """Return the user that a Basic authorization selects; it proves nothing. None: the default one.

    Raises ``Unauthenticated`` when it cannot be read.
    """
    if authorization is None:
        return None
    scheme, _, encoded = authorization.partition(" ")
    try:
        if scheme.lower() != "basic":
            raise ValueError  # noqa: TRY301 - handled with every other form that is none
        name = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")[0]
    except (ValueError, binascii.Error) as error:
        raise Unauthenticated("Authorization must be Basic, with a user of the sandbox and no password.") from error
    return name or None


def _is_time(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def same(one: str, other: str) -> bool:
    """Compare in a time that tells nothing."""
    return hmac.compare_digest(one.encode("utf-8", "surrogateescape"), other.encode())

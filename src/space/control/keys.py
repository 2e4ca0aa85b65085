"""API keys: making, revoking, and telling whose request it is.

A key is ``sk_`` and 43 url-safe characters, 256 random bits. The store has its SHA-256 alone, which needs no salt or
stretching at that length. Looked-up keys are remembered for a second at most, and not at all past a revocation here.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import Connection

from space.errors import Unauthenticated
from space.model.ids import new_id
from space.model.project import Key, Role
from space.store import keys
from space.store.database import Database

REMEMBER_S = 1.0
REMEMBERED_MAX = 10_000
USED_RESOLUTION = timedelta(minutes=1)
_PATTERN = re.compile(r"sk_[A-Za-z0-9_-]{43}")


class Keyring:
    """Tells the owner of a key, quickly."""

    def __init__(self, store: Database, now: Callable[[], datetime]) -> None:
        self._store = store
        self._now = now
        self._known: dict[str, tuple[Key, float]] = {}
        self._used: set[str] = set()
        self._generation = 0

    async def authenticate(self, secret: str) -> Key:
        """Return the key's record, or raise ``Unauthenticated`` without saying why."""
        if not _PATTERN.fullmatch(secret):
            raise Unauthenticated
        digest = _digest(secret)
        known = self._known.get(digest)
        if known is not None and known[1] > time.monotonic():
            key = known[0]
        else:
            key = await self._look_up(digest)
        self._used.add(key.id)
        return key

    async def unrevoked(self, key_id: str) -> Key:
        """Return the record of a key of that id, or raise ``Unauthenticated`` when none is good any more."""
        key = await self._store.read(lambda connection: keys.get(connection, key_id))
        if key is None or key.revoked_at is not None:
            raise Unauthenticated
        return key

    def forget(self) -> None:
        """Trust nothing remembered, also not an answer of the store that is on its way."""
        self._generation += 1
        self._known.clear()

    async def note_used(self) -> None:
        """Write down which keys were used since the last call, to the minute."""
        used, self._used = self._used, set()
        now = self._now()

        def note(connection: Connection) -> None:
            for key_id in sorted(used):
                keys.touch(connection, key_id, now, now - USED_RESOLUTION)

        if used:
            await self._store.write(note)

    async def _look_up(self, digest: str) -> Key:
        generation = self._generation
        key = await self._store.read(lambda connection: keys.by_hash(connection, digest))
        if key is None or key.revoked_at is not None or not hmac.compare_digest(key.hash, digest):
            raise Unauthenticated
        if generation == self._generation:
            if len(self._known) >= REMEMBERED_MAX:
                self._known.clear()
            self._known[digest] = (key, time.monotonic() + REMEMBER_S)
        return key


def new_key(project_id: str, name: str, role: Role, now: datetime) -> tuple[Key, str]:
    """Return a fresh key's record and the key itself, which is in nobody else's hands."""
    secret = "sk_" + secrets.token_urlsafe(32)
    return Key(new_id("key"), project_id, name, role, _digest(secret), now), secret


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

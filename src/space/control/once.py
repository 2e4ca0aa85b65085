"""Idempotency keys: the same request sent again gets what the first one made."""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from space.errors import Conflict
from space.store import idempotency
from space.store.idempotency import Record

KEPT = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Once:
    """One request that may come several times: the caller's key, and what the request says."""

    key: str
    fingerprint: str


def fingerprint(method: str, path: str, body: Any) -> str:
    """Return the SHA-256 of what a request says; the order of an object's members does not count."""
    text = json.dumps([method, path, body], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def first(
    connection: Connection,
    once: Once | None,
    project_id: str,
    *,
    subject_id: str,
    now: datetime,
    operation_id: str | None = None,
) -> Record | None:
    """Claim the key for what this request is about to make; the earlier request's record if there was one.

    Raises ``Conflict`` when the earlier request said something else.
    """
    if once is None:
        return None
    record = Record(project_id, once.key, once.fingerprint, subject_id, operation_id, now)
    return _same(idempotency.claim(connection, record, expired_before=now - KEPT), once)


def seen(connection: Connection, once: Once | None, project_id: str, now: datetime) -> Record | None:
    """Return the earlier request's record if there was one, and claim nothing: for who has to look further first."""
    if once is None:
        return None
    earlier = idempotency.get(connection, project_id, once.key)
    return None if earlier is None or earlier.created_at < now - KEPT else _same(earlier, once)


def _same(earlier: Record | None, once: Once) -> Record | None:
    if earlier is not None and earlier.fingerprint != once.fingerprint:
        raise Conflict(
            "This Idempotency-Key was used for another request. Use a new key for a new request.",
            code="idempotency-key-reused",
        )
    return earlier

"""Cursors: where a page ended, as text that means nothing to a caller."""

import base64
import binascii
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any, Protocol

from fastapi import Query

from space.errors import InvalidRequest
from space.store.paging import Position
from space.store.tables import EPOCH, MICROSECOND

LIMIT_MAX = 200
LIMIT_DEFAULT = 50
CURSOR_CHARS_MAX = 300

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="How many items at most.")]
Cursor = Annotated[str | None, Query(description="`next_cursor` of the page before.")]


class Placed(Protocol):
    """An item that has a place in a list."""

    @property
    def id(self) -> str: ...
    @property
    def created_at(self) -> Any: ...


def position(cursor: str | None) -> Position | None:
    """Return where a cursor points, or raise ``InvalidRequest``."""
    if cursor is None:
        return None
    match parse(cursor):
        case [int(micros), str(item_id)] if 0 <= micros < 1 << 53 and item_id.isalnum():
            return Position(EPOCH + timedelta(microseconds=micros), item_id)
        case _:
            raise _invalid()


def names(cursor: str | None) -> tuple[str, str] | None:
    """Return the pair of names a cursor points to, or raise ``InvalidRequest``."""
    if cursor is None:
        return None
    match parse(cursor):
        case [str(name), str(tag)] if "\0" not in name + tag:
            return name, tag
        case _:
            raise _invalid()


def number(cursor: str | None) -> int | None:
    """Return the number a cursor points to, or raise ``InvalidRequest``."""
    if cursor is None:
        return None
    match parse(cursor):
        case [int(value)] if 0 <= value < 1 << 53:
            return value
        case _:
            raise _invalid()


def next_cursor(items: Sequence[Placed], limit: int) -> str | None:
    """Return the cursor behind a page; None when it was the last one for certain."""
    if len(items) < limit:
        return None
    return render([(items[-1].created_at - EPOCH) // MICROSECOND, items[-1].id])


def render(value: list[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).decode().rstrip("=")


def parse(cursor: str) -> Any:
    if len(cursor) > CURSOR_CHARS_MAX:
        raise _invalid()
    try:
        return json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise _invalid() from error


def _invalid() -> InvalidRequest:
    return InvalidRequest("cursor: This is not a cursor of ours.", field="cursor")

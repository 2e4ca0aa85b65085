"""E2B's lists of sandboxes: filters, order and pages, as its clients write them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote

from space.e2b import query as queries
from space.e2b import shapes
from space.e2b.call import Call
from space.errors import InvalidRequest
from space.model.sandbox import Sandbox, State
from space.store.paging import Position

LIMIT_MAX = 100
PAGE = 200
"""Rows that are read at a time."""
ALL_MAX = 10_000
FILTERS_MAX = 64


class Placed(Protocol):
    """What has its place in a list."""

    @property
    def created_at(self) -> datetime: ...
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=Placed)


async def everything(page: Callable[[Position | None], Awaitable[Sequence[T]]]) -> list[T]:
    """Return all that there is, up to ``ALL_MAX``, of what ``page`` reads ``PAGE`` rows of behind a place: the orders
    and filters of the clients are not those of the store.
    """
    found: list[T] = []
    after: Position | None = None
    while len(found) < ALL_MAX:
        rows = await page(after)
        found += rows
        if len(rows) < PAGE:
            break
        after = Position(rows[-1].created_at, rows[-1].id)
    return found


async def answer(call: Call, found: Sequence[T], show: Callable[[T], dict[str, Any]]) -> None:
    """Answer with the page that is asked for of what is found, as ``show`` shows it."""
    part, token = page(call.query, ordered(call.query, found))
    headers = {"x-next-token": token} if token is not None else {}
    await call.answer([show(one) for one in part], 200, headers)


def states(query: Mapping[str, str]) -> frozenset[State]:
    """Return the states that are meant by ``state=running,paused``; both, where nothing is said."""
    wanted: frozenset[State] = frozenset()
    for name in filter(None, query.get("state", "").split(",")):
        if name not in shapes.STATES:
            raise InvalidRequest("state must be running, paused, or both with a comma between them.")
        wanted |= shapes.STATES[name]
    return wanted or shapes.RUNNING | shapes.PAUSED


def metadata(query: Mapping[str, str]) -> dict[str, str]:
    """Return what the metadata must have. The clients escape names and values, then all of it, then the query."""
    try:
        pairs = parse_qsl(query.get("metadata", ""), keep_blank_values=True, max_num_fields=FILTERS_MAX)
    except ValueError as error:
        raise InvalidRequest(f"metadata may name at most {FILTERS_MAX} keys.") from error
    return {unquote(name): unquote(value) for name, value in pairs}


def matches(query: Mapping[str, str], found: Sandbox) -> bool:
    """Whether a sandbox is from the template that is asked for, and began when it had to."""
    template = query.get("template")
    if template is not None and template not in {shapes.template_id(found), found.template.partition(":")[0]}:
        return False
    after = query.get("startedAfter")
    return after is None or found.created_at >= moment(after)


def ordered(query: Mapping[str, str], found: Sequence[T]) -> list[T]:
    """Return them newest first, or oldest first where that is asked for."""
    order = query.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise InvalidRequest("order must be asc or desc.")
    return sorted(found, key=lambda one: (one.created_at, one.id), reverse=order == "desc")


def page(query: Mapping[str, str], found: Sequence[T]) -> tuple[list[T], str | None]:
    """Return one page of what is in order, and the token of the next one where there is one.

    A token is the place of what the page ended with, so that it holds whatever is made or deleted meanwhile.
    """
    limit, token = queries.limit(query, LIMIT_MAX), query.get("nextToken")
    if token:
        after = _place(token)
        down = query.get("order", "desc") == "desc"
        found = [one for one in found if (_key(one) < after if down else _key(one) > after)]
    part = list(found[:limit])
    return part, _token(part[-1]) if len(found) > limit else None


def _key(one: Placed) -> tuple[int, str]:
    return round(one.created_at.timestamp() * 1_000_000), one.id


def _token(one: Placed) -> str:
    at, name = _key(one)
    return f"{at}-{name}"


def _place(token: str) -> tuple[int, str]:
    at, _, name = token.partition("-")
    if not (at.isascii() and at.isdigit() and len(at) <= 18):
        raise InvalidRequest("nextToken is not one of this list.")
    return int(at), name


def moment(text: str) -> datetime:
    """Read a time as the clients write it."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequest("startedAfter must be a time, as 2026-01-31T12:00:00Z.") from error
    if found.tzinfo is None:
        raise InvalidRequest("startedAfter must have a time zone.")
    return found

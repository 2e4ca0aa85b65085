"""E2B's logs of a sandbox: what was done with it, by SPACE. What its programs write is with their commands."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from space.control import operations
from space.e2b import listing, shapes
from space.e2b import query as queries
from space.e2b.call import Call
from space.e2b.sandboxes import owned
from space.errors import InvalidRequest
from space.model.operation import Operation, OperationState
from space.store.paging import Position

LEVELS = ("debug", "info", "warn", "error")
LINES_MAX = 1000
MS_DIGITS_MAX = 14


async def v1(call: Call) -> None:
    """Lines from ``start`` on, as text and as entries."""
    shown = await _entries(call, cursor_ms(call.query, "start"), queries.limit(call.query, LINES_MAX, least=0))
    lines = [{"timestamp": one["timestamp"], "line": one["message"]} for one in shown]
    await call.answer({"logs": lines, "logEntries": shown})


async def v2(call: Call) -> None:
    """Lines from ``cursor`` on, forwards or backwards, of a level and above, with a text in them."""
    query = call.query
    shown = await _entries(call, cursor_ms(query, "cursor"), queries.limit(query, LINES_MAX, least=0))
    await call.answer({"logs": shown})


def cursor_ms(query: Mapping[str, str], name: str) -> int | None:
    """Return a place in a log, in milliseconds since 1970."""
    return queries.number(query, name, "milliseconds since 1970", MS_DIGITS_MAX)


def backwards(query: Mapping[str, str]) -> bool:
    """Whether the newest lines are asked for, the newest first."""
    direction = query.get("direction", "forward")
    if direction not in {"forward", "backward"}:
        raise InvalidRequest("direction must be forward or backward.")
    return direction == "backward"


def levels_of(query: Mapping[str, str]) -> frozenset[str]:
    """Return the levels that are asked for: one, and what is above it."""
    level = query.get("level", LEVELS[0])
    if level not in LEVELS:
        raise InvalidRequest(f"level must be one of {', '.join(LEVELS)}.")
    return frozenset(LEVELS[LEVELS.index(level) :])


def entry(one: Operation) -> dict[str, Any]:
    """Return a ``SandboxLogEntry`` of an operation: when it ended, or was asked for while it has not. Pure."""
    failed = one.state == OperationState.FAILED
    message = f"{one.kind}: {one.state}"
    if failed and one.error is not None:
        message += f": {one.error.message}"
    return {
        "timestamp": shapes.time(_at(one).astimezone(UTC)),
        "message": message,
        "level": "error" if failed else "info",
        "fields": {"operation": one.id, "kind": one.kind, "state": str(one.state)},
    }


async def _entries(call: Call, cursor: int | None, limit: int) -> list[dict[str, Any]]:
    back, levels, text = backwards(call.query), levels_of(call.query), call.query.get("search", "")
    sandbox = await owned(call)

    async def page(after: Position | None) -> list[Operation]:
        return await operations.page(
            call.control, call.project_id, sandbox_id=sandbox.id, states=(), after=after, limit=listing.PAGE
        )

    shown: list[tuple[datetime, dict[str, Any]]] = []
    for one in await listing.everything(page):
        told = entry(one)
        ms = int(_at(one).timestamp() * 1000)
        if cursor is not None and (ms > cursor if back else ms < cursor):
            continue
        if told["level"] in levels and text in told["message"]:
            shown.append((_at(one), told))
    shown.sort(key=lambda placed: placed[0], reverse=back)
    return [told for _, told in shown[:limit]]


def _at(one: Operation) -> datetime:
    return one.finished_at or one.created_at

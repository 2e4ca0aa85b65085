"""Lists, newest first, cut into pages by the position (creation time, id) of the last row seen."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, and_, or_


@dataclass(frozen=True, slots=True)
class Position:
    """Where a page ended; the next one starts behind it."""

    created_at: datetime
    id: str


def newest_first(query: Select[Any], table: Table, after: Position | None, limit: int) -> Select[Any]:
    """Order ``query`` and cut it to one page behind ``after``."""
    if after is not None:
        query = query.where(_behind(table, after))
    return query.order_by(table.c.created_at.desc(), table.c.id.desc()).limit(limit)


def _behind(table: Table, after: Position) -> ColumnElement[bool]:
    return or_(
        table.c.created_at < after.created_at,
        and_(table.c.created_at == after.created_at, table.c.id < after.id),
    )

"""One row as keyword arguments."""

from typing import Any

from sqlalchemy import RowMapping


def arguments(row: RowMapping) -> dict[str, Any]:
    """Return the row by column name; values still are what the database returns (text for enums, dicts for JSON)."""
    return {str(name): value for name, value in row.items()}

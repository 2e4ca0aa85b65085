"""One row as keyword arguments, and back."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping

from space.model.sandbox import Failure, Resources


def arguments(row: RowMapping) -> dict[str, Any]:
    """Return the row by column name; values still are what the database returns (text for enums, dicts for JSON)."""
    return {str(name): value for name, value in row.items()}


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by column name as the database takes them: a failure and resources as objects of JSON."""
    return {name: asdict(value) if isinstance(value, (Failure, Resources)) else value for name, value in values.items()}

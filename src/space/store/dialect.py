"""The few places where SQLite and PostgreSQL need different constructs for the same statement."""

from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert_new(connection: Connection, table: Table, **values: Any) -> bool:
    """Insert a row; False, and nothing done, when a unique key of it is taken."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    result = connection.execute(insert(table).values(**values).on_conflict_do_nothing())
    return result.rowcount == 1


def insert_or_update(connection: Connection, table: Table, **values: Any) -> None:
    """Insert a row, or overwrite the one with the same primary key."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    primary = [column.name for column in table.primary_key.columns]
    changed = {name: value for name, value in values.items() if name not in primary}
    connection.execute(insert(table).values(**values).on_conflict_do_update(index_elements=primary, set_=changed))

"""Rows of the templates that the installation brings along, a copy of what the node last reported."""

from collections.abc import Collection
from dataclasses import asdict

from sqlalchemy import Connection, RowMapping, delete, exists, select, tuple_

from space.model.template import Reference, Template
from space.store.dialect import insert_or_update
from space.store.rows import arguments
from space.store.tables import templates


def replace(connection: Connection, present: Collection[Template]) -> None:
    """Make the table say what ``present`` says; of a digest that was there already, ``seen_at`` stays as it was."""
    rows = [_template(row) for row in connection.execute(select(templates)).mappings()]
    seen_at = {(row.name, row.tag, row.digest): row.seen_at for row in rows}
    for template in present:
        since = seen_at.get((template.name, template.tag, template.digest), template.seen_at)
        insert_or_update(connection, templates, **{**asdict(template), "seen_at": since})
    named = tuple_(templates.c.name, templates.c.tag)
    connection.execute(delete(templates).where(named.not_in([(t.name, t.tag) for t in present])))


def find(connection: Connection, reference: Reference) -> Template | None:
    """Return what a reference points to now."""
    query = select(templates)
    if reference.digest is not None:
        query = query.where(templates.c.digest == reference.digest).order_by(templates.c.name, templates.c.tag)
    else:
        query = query.where(templates.c.name == reference.name, templates.c.tag == reference.tag)
    row = connection.execute(query.limit(1)).mappings().one_or_none()
    return None if row is None else _template(row)


def has_name(connection: Connection, name: str) -> bool:
    """Whether there is any tag of that name."""
    return bool(connection.execute(select(exists().where(templates.c.name == name))).scalar_one())


def page(connection: Connection, *, after: tuple[str, str] | None, limit: int) -> list[Template]:
    """Return templates by name and tag, those behind ``after``."""
    named = tuple_(templates.c.name, templates.c.tag)
    query = select(templates).order_by(templates.c.name, templates.c.tag).limit(limit)
    if after is not None:
        query = query.where(named > after)
    return [_template(row) for row in connection.execute(query).mappings()]


def _template(row: RowMapping) -> Template:
    return Template(**arguments(row))

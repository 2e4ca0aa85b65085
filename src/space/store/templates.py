"""Rows of templates, a copy of what the node last reported."""

from collections.abc import Collection
from dataclasses import asdict

from sqlalchemy import RowMapping, delete, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from space.model.template import Reference, Template
from space.store.dialect import insert_or_update
from space.store.rows import arguments
from space.store.tables import templates


async def replace(connection: AsyncConnection, present: Collection[Template]) -> None:
    """Make the table say what ``present`` says."""
    for template in present:
        await insert_or_update(connection, templates, **asdict(template))
    named = tuple_(templates.c.name, templates.c.tag)
    await connection.execute(delete(templates).where(named.not_in([(t.name, t.tag) for t in present])))


async def find(connection: AsyncConnection, reference: Reference) -> Template | None:
    """Return what a reference points to now."""
    query = select(templates)
    if reference.digest is not None:
        query = query.where(templates.c.digest == reference.digest).order_by(templates.c.name, templates.c.tag)
    else:
        query = query.where(templates.c.name == reference.name, templates.c.tag == reference.tag)
    row = (await connection.execute(query.limit(1))).mappings().one_or_none()
    return None if row is None else _template(row)


async def page(connection: AsyncConnection, *, after: tuple[str, str] | None, limit: int) -> list[Template]:
    """Return templates by name and tag, those behind ``after``."""
    named = tuple_(templates.c.name, templates.c.tag)
    query = select(templates).order_by(templates.c.name, templates.c.tag).limit(limit)
    if after is not None:
        query = query.where(named > after)
    return [_template(row) for row in (await connection.execute(query)).mappings()]


def _template(row: RowMapping) -> Template:
    return Template(**arguments(row))

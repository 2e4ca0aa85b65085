"""Rows of tags, and of what has become of them: a tag moves, and that is never forgotten while its name is in use."""

from dataclasses import fields
from datetime import datetime

from sqlalchemy import Connection, delete, func, insert, select, tuple_

from space.model.template import Tag, TagMove
from space.store import releases
from space.store.dialect import insert_or_update
from space.store.rows import arguments
from space.store.tables import tag_moves, tags

_TAG = [tags.c[field.name] for field in fields(Tag)]
_MOVE = [tag_moves.c[field.name] for field in fields(TagMove)]


def get(connection: Connection, project_id: str, name: str, tag: str) -> Tag | None:
    query = select(*_TAG).where(tags.c.project_id == project_id, tags.c.name == name, tags.c.tag == tag)
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else Tag(**arguments(row))


def of_project(connection: Connection, project_id: str, digest: str | None = None) -> list[Tag]:
    """Return a project's tags by name and tag: all, or those that point to a release."""
    query = select(*_TAG).where(tags.c.project_id == project_id).order_by(tags.c.name, tags.c.tag)
    if digest is not None:
        query = query.where(tags.c.digest == digest)
    return [Tag(**arguments(row)) for row in connection.execute(query).mappings()]


def count(connection: Connection, project_id: str) -> int:
    """Return how many a project has; call it under the project's lock where that must not change."""
    query = select(func.count()).select_from(tags).where(tags.c.project_id == project_id)
    return connection.execute(query).scalar_one()


def move(connection: Connection, to: Tag, build_id: str | None = None) -> Tag | None:
    """Let a tag point to a release of its project, and note it; return where it pointed before.

    One that points there already stays, and nothing is noted. Call it under the project's lock: moves are numbered.
    """
    before = get(connection, to.project_id, to.name, to.tag)
    if before is not None and before.digest == to.digest:
        return before
    values = {name: getattr(to, name) for name in ("project_id", "name", "tag", "digest", "moved_at")}
    insert_or_update(connection, tags, **values)
    _note(connection, to, to.digest, None if before is None else before.digest, build_id)
    return before


def remove(connection: Connection, gone: Tag, now: datetime) -> None:
    """Take a tag away, and note it. Call it under the project's lock."""
    mine = (tags.c.project_id == gone.project_id, tags.c.name == gone.name, tags.c.tag == gone.tag)
    connection.execute(delete(tags).where(*mine))
    _note(connection, Tag(gone.project_id, gone.name, gone.tag, gone.digest, now), None, gone.digest, None)


def history(connection: Connection, project_id: str, name: str, *, before: int | None, limit: int) -> list[TagMove]:
    """Return what became of a name's tags, newest first, those below the number ``before``."""
    query = select(*_MOVE).where(tag_moves.c.project_id == project_id, tag_moves.c.name == name)
    if before is not None:
        query = query.where(tag_moves.c.number < before)
    rows = connection.execute(query.order_by(tag_moves.c.number.desc()).limit(limit))
    return [TagMove(**arguments(row)) for row in rows.mappings()]


def sweep(connection: Connection, each_max: int) -> None:
    """Forget all but the newest ``each_max`` moves of each name."""
    key = (tag_moves.c.project_id, tag_moves.c.name)
    place = func.row_number().over(partition_by=key, order_by=tag_moves.c.number.desc())
    numbered = select(*key, tag_moves.c.number, place.label("place")).subquery()
    old = select(numbered.c.project_id, numbered.c.name, numbered.c.number).where(numbered.c.place > each_max)
    connection.execute(delete(tag_moves).where(tuple_(*key, tag_moves.c.number).in_(old)))


def _note(connection: Connection, at: Tag, digest: str | None, previous: str | None, build_id: str | None) -> None:
    mine = (tag_moves.c.project_id == at.project_id, tag_moves.c.name == at.name)
    latest = connection.execute(select(func.max(tag_moves.c.number)).where(*mine)).scalar_one()
    connection.execute(
        insert(tag_moves).values(
            project_id=at.project_id,
            name=at.name,
            number=(latest or 0) + 1,
            tag=at.tag,
            digest=digest,
            previous=previous,
            build_id=build_id,
            created_at=at.moved_at,
        )
    )
    for changed in {digest, previous} - {None}:
        releases.note_tagged(connection, at.project_id, str(changed), at.moved_at)

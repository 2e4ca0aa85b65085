"""Rows of releases: what projects have published, each by its digest.

Whoever changes a project's releases or tags, or begins something from one, does so under the project's lock.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, RowMapping, delete, exists, func, null, select, update

from space.model.sandbox import State
from space.model.template import Release
from space.store.dialect import insert_new
from space.store.rows import arguments
from space.store.tables import releases, sandboxes, snapshots, tags

_NAMES = tuple(field.name for field in fields(Release))
_ALL = [releases.c[name] for name in _NAMES]
# Lists leave the packages out: there may be thousands of each release.
_FEWER = [null().label(name) if name == "packages" else releases.c[name] for name in _NAMES]
_ALIVE = releases.c.deleted_at.is_(None)
_PROVENANCE = ("defaults", "source", "base", "lineage", "packages", "build_id")


def keep(connection: Connection, release: Release) -> None:
    """Add a release. One that is there already is told to come from where it came from now, and gets the
    defaults that it was given now; a deleted one is new.
    """
    row = asdict(release)
    if insert_new(connection, releases, **row):
        return
    mine = update(releases).where(*_is(release.project_id, release.digest))
    connection.execute(mine.where(_ALIVE).values({name: row[name] for name in _PROVENANCE}))
    connection.execute(mine.where(releases.c.deleted_at.is_not(None)).values(row))


def get(connection: Connection, project_id: str, digest: str) -> Release | None:
    """Return a release of a project, deleted ones included as long as they are remembered."""
    row = connection.execute(select(*_ALL).where(*_is(project_id, digest))).mappings().one_or_none()
    return None if row is None else _release(row)


def among(connection: Connection, project_id: str, wanted: Collection[str]) -> dict[str, Release]:
    """Return those of a project's releases, by digest."""
    mine = (releases.c.project_id == project_id, releases.c.digest.in_(sorted(wanted)))
    return {row["digest"]: _release(row) for row in connection.execute(select(*_FEWER).where(*mine)).mappings()}


def page_untagged(connection: Connection, project_id: str, *, after: str | None, limit: int) -> list[Release]:
    """Return a project's releases that no tag points to, by digest, those behind ``after``."""
    query = select(*_FEWER).where(releases.c.project_id == project_id, _ALIVE, releases.c.untagged_at.is_not(None))
    if after is not None:
        query = query.where(releases.c.digest > after)
    return [_release(row) for row in connection.execute(query.order_by(releases.c.digest).limit(limit)).mappings()]


def of_project(connection: Connection, project_id: str) -> dict[str, Release]:
    """Return all releases of a project, by digest."""
    rows = connection.execute(select(*_FEWER).where(releases.c.project_id == project_id, _ALIVE)).mappings()
    return {row["digest"]: _release(row) for row in rows}


def count(connection: Connection, project_id: str) -> int:
    """Return how many a project has; call it under the project's lock where that must not change."""
    mine = (releases.c.project_id == project_id, _ALIVE)
    return connection.execute(select(func.count()).select_from(releases).where(*mine)).scalar_one()


def digests(connection: Connection) -> set[str]:
    """Return the digests of all releases of everybody."""
    return {row[0] for row in connection.execute(select(releases.c.digest).distinct().where(_ALIVE))}


def known(connection: Connection, wanted: Collection[str]) -> set[str]:
    """Return those of the digests that somebody has released, or had."""
    query = select(releases.c.digest).distinct().where(releases.c.digest.in_(sorted(wanted)))
    return {row[0] for row in connection.execute(query)}


def owners(connection: Connection, digest: str) -> list[str]:
    """Return the projects that have released it."""
    rows = connection.execute(select(releases.c.project_id).where(releases.c.digest == digest, _ALIVE))
    return [row[0] for row in rows]


def remove(connection: Connection, project_id: str, digest: str, now: datetime) -> None:
    """Mark a release as deleted. Its tags must have gone before."""
    mine = _is(project_id, digest)
    connection.execute(update(releases).where(*mine).values(deleted_at=now, untagged_at=now))


def note_tagged(connection: Connection, project_id: str, digest: str, now: datetime) -> None:
    """Note whether any tag points to a release."""
    tagged = exists().where(tags.c.project_id == releases.c.project_id, tags.c.digest == releases.c.digest)
    mine = _is(project_id, digest)
    connection.execute(update(releases).where(*mine, tagged).values(untagged_at=None))
    connection.execute(update(releases).where(*mine, ~tagged, releases.c.untagged_at.is_(None)).values(untagged_at=now))


def untagged_since(connection: Connection, before: datetime, limit: int) -> Sequence[tuple[str, str]]:
    """Return project and digest of what no tag has pointed to since then, and nothing of the project is made from."""
    used = (
        exists().where(
            sandboxes.c.project_id == releases.c.project_id,
            sandboxes.c.template_digest == releases.c.digest,
            sandboxes.c.state != State.DELETED,
        ),
        exists().where(
            snapshots.c.project_id == releases.c.project_id,
            snapshots.c.template_digest == releases.c.digest,
            snapshots.c.dropped.is_(False),
        ),
    )
    query = select(releases.c.project_id, releases.c.digest).where(
        _ALIVE, releases.c.untagged_at < before, *(~one for one in used)
    )
    return [(row[0], row[1]) for row in connection.execute(query.order_by(releases.c.untagged_at).limit(limit))]


def sweep(connection: Connection, before: datetime) -> None:
    """Forget releases that were deleted before ``before``."""
    connection.execute(delete(releases).where(releases.c.deleted_at < before))


def _is(project_id: str, digest: str) -> tuple[ColumnElement[bool], ...]:
    return (releases.c.project_id == project_id, releases.c.digest == digest)


def _release(row: RowMapping) -> Release:
    return Release(**arguments(row))

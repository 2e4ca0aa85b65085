"""Which templates nobody needs, and the note that the node is being told to drop one.

Between "nobody needs it" and its being gone somebody may publish the same content again. So the note is made in the
transaction that looks, and whoever publishes looks for it.
"""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, Exists, Update, delete, exists, or_, select, update

from space.model.build import OPEN
from space.model.sandbox import State
from space.store.dialect import insert_new
from space.store.tables import builds, releases, sandboxes, snapshots, template_drops, templates


def unneeded(connection: Connection, digests: Collection[str]) -> list[str]:
    """Return those of the digests that no release, sandbox, snapshot or build of anybody needs, nor the installation.

    What was never released may be what a build has just made: while any goes on, none of that is among them.
    """
    wanted = _by_builds(connection)
    building = bool(connection.execute(select(_building())).scalar_one())
    return [
        digest
        for digest in sorted(digests)
        if digest not in wanted
        and not connection.execute(select(_needed(digest))).scalar_one()
        and (not building or connection.execute(select(_released(digest))).scalar_one())
    ]


def begin(connection: Connection, digest: str, now: datetime) -> bool:
    """Note that a template is being dropped, if nobody needs it (as ``unneeded`` says)."""
    _lock(connection, digest)
    if not unneeded(connection, [digest]):
        return False
    connection.execute(_of(digest).values(began_at=now, ended_at=None))
    return True


def end(connection: Connection, digest: str, now: datetime) -> None:
    """Note that the node has answered, whatever it said."""
    connection.execute(_of(digest).values(ended_at=now))


def interferes(connection: Connection, digest: str, since: datetime) -> bool:
    """Whether a template is being dropped, or was after ``since``; if not, none begins to be in this transaction."""
    began_at, ended_at = _lock(connection, digest)
    return began_at is not None and (ended_at is None or ended_at >= since)


def sweep(connection: Connection, before: datetime) -> None:
    """Forget drops that began before ``before``; their callers have given up waiting long since."""
    old = or_(template_drops.c.began_at.is_(None), template_drops.c.began_at < before)
    connection.execute(delete(template_drops).where(old))


def _lock(connection: Connection, digest: str) -> tuple[datetime | None, datetime | None]:
    """Let nobody else begin or look until this transaction ends; return when the last drop began and ended."""
    insert_new(connection, template_drops, digest=digest)
    query = select(template_drops.c.began_at, template_drops.c.ended_at).where(template_drops.c.digest == digest)
    row = connection.execute(query.with_for_update()).one()
    return row[0], row[1]


def _of(digest: str) -> Update:
    return update(template_drops).where(template_drops.c.digest == digest)


def _by_builds(connection: Connection) -> set[str]:
    rows = connection.execute(select(builds.c.digests).where(builds.c.state.in_(sorted(OPEN))))
    return {digest for row in rows for digest in row[0]}


def _building() -> Exists:
    return exists().where(builds.c.state.in_(sorted(OPEN)))


def _released(digest: str) -> Exists:
    return exists().where(releases.c.digest == digest)


def _needed(digest: str) -> ColumnElement[bool]:
    return or_(
        exists().where(templates.c.digest == digest),
        exists().where(releases.c.digest == digest, releases.c.deleted_at.is_(None)),
        exists().where(sandboxes.c.template_digest == digest, sandboxes.c.state != State.DELETED),
        exists().where(snapshots.c.template_digest == digest, snapshots.c.dropped.is_(False)),
    )

"""Rows of samples: what each sandbox used when. Thinned out as they grow older, so that a day takes little."""

from collections.abc import Iterable
from dataclasses import asdict, fields
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, exists, func, select
from sqlalchemy.dialects import postgresql, sqlite

from space.model.usage import Sample
from space.store.tables import EPOCH, samples

SLOT = timedelta(seconds=15)
"""One sample of a sandbox is kept of each."""
SPARSE = 20
"""Of older ones, one in so many slots: 5 minutes."""
THINNED_SLOTS = 480
"""How far back a sweep looks for what to thin out: 2 hours."""

_COLUMNS = [samples.c[field.name] for field in fields(Sample)]


def slot_of(at: datetime) -> int:
    return (at - EPOCH) // SLOT


def add(connection: Connection, taken: Iterable[tuple[str, Sample]]) -> None:
    """Keep samples by sandbox id; of several in one slot the first."""
    rows = [{"sandbox_id": of, "slot": slot_of(sample.at), **asdict(sample)} for of, sample in taken]
    if not rows:
        return
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    connection.execute(insert(samples).on_conflict_do_nothing(), rows)


def of(connection: Connection, sandbox_id: str, *, since: datetime, until: datetime, every: int) -> list[Sample]:
    """Return a sandbox's samples from ``since`` to ``until``, oldest first: of each ``every`` slots the last one."""
    chosen = (
        select(func.max(samples.c.slot).label("slot"))
        .where(samples.c.sandbox_id == sandbox_id, samples.c.at >= since, samples.c.at <= until)
        .group_by(samples.c.slot - samples.c.slot % every)
        .subquery()
    )
    rows = connection.execute(
        select(*_COLUMNS)
        .join(chosen, chosen.c.slot == samples.c.slot)
        .where(samples.c.sandbox_id == sandbox_id)
        .order_by(samples.c.slot)
    )
    return [Sample(*row) for row in rows]


def sweep(connection: Connection, *, dense_since: datetime, kept_since: datetime) -> None:
    """Remove what is older than ``kept_since``; before ``dense_since``, all but the last of each ``SPARSE`` slots."""
    connection.execute(delete(samples).where(samples.c.slot < slot_of(kept_since)))
    before = slot_of(dense_since) // SPARSE * SPARSE
    later = samples.alias("later")
    group_end = samples.c.slot - samples.c.slot % SPARSE + SPARSE
    followed = exists().where(
        later.c.sandbox_id == samples.c.sandbox_id, later.c.slot > samples.c.slot, later.c.slot < group_end
    )
    # What is older still was thinned out before.
    connection.execute(
        delete(samples).where(samples.c.slot < before, samples.c.slot >= before - THINNED_SLOTS, followed)
    )

"""Rows of webhooks and of the attempts to deliver to them; who delivers holds a lease."""

from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, and_, delete, func, insert, or_, select, update

from space.model.webhook import Delivery, Webhook
from space.store.paging import Position, newest_first
from space.store.rows import arguments
from space.store.tables import deliveries, projects, webhooks

_COLUMNS = [webhooks.c[field.name] for field in fields(Webhook)]
_DELIVERY = [deliveries.c[field.name] for field in fields(Delivery)]


@dataclass(frozen=True, slots=True)
class Due:
    """What can be delivered now, when more will be, and whether there are webhooks at all."""

    webhooks: list[Webhook]
    next_at: datetime | None
    any: bool


def add(connection: Connection, webhook: Webhook) -> None:
    connection.execute(insert(webhooks).values(asdict(webhook) | {"events": list(webhook.events)}))


def get(connection: Connection, webhook_id: str) -> Webhook | None:
    row = connection.execute(select(*_COLUMNS).where(webhooks.c.id == webhook_id)).mappings().one_or_none()
    return None if row is None else _webhook(row)


def count(connection: Connection, project_id: str) -> int:
    """Return how many a project has; call it under the project's lock where that must not change."""
    return connection.execute(
        select(func.count()).select_from(webhooks).where(webhooks.c.project_id == project_id)
    ).scalar_one()


def lock_project(connection: Connection, project_id: str) -> int:
    """Let nobody else add to a project until the transaction ends; return the number of its latest event."""
    return connection.execute(
        select(projects.c.last_event).where(projects.c.id == project_id).with_for_update()
    ).scalar_one()


def page(connection: Connection, project_id: str, *, after: Position | None, limit: int) -> list[Webhook]:
    query = select(*_COLUMNS).where(webhooks.c.project_id == project_id)
    return [_webhook(row) for row in connection.execute(newest_first(query, webhooks, after, limit)).mappings()]


def remove(connection: Connection, webhook_id: str, project_id: str) -> bool:
    result = connection.execute(
        delete(webhooks).where(webhooks.c.id == webhook_id, webhooks.c.project_id == project_id)
    )
    return result.rowcount == 1


def due(connection: Connection, now: datetime, limit: int) -> Due:
    """Return webhooks with events to deliver now that nobody delivers to, those waiting longest first."""
    behind = and_(webhooks.c.disabled_at.is_(None), webhooks.c.cursor < projects.c.last_event)
    joined = select(*_COLUMNS).join(projects, projects.c.id == webhooks.c.project_id).where(behind)
    free = or_(webhooks.c.lease_until.is_(None), webhooks.c.lease_until <= now)
    ready = or_(webhooks.c.next_at.is_(None), webhooks.c.next_at <= now)
    rows = connection.execute(
        joined.where(free, ready).order_by(webhooks.c.next_at, webhooks.c.created_at, webhooks.c.id).limit(limit)
    )
    found = [_webhook(row) for row in rows.mappings()]
    times = connection.execute(
        select(
            func.min(webhooks.c.next_at).filter(webhooks.c.next_at > now),
            func.min(webhooks.c.lease_until).filter(webhooks.c.lease_until > now),
            func.count(),
        ).where(webhooks.c.disabled_at.is_(None))
    ).one()
    return Due(found, min((time for time in times[:2] if time is not None), default=None), times[2] > 0)


def claim(connection: Connection, seen: Webhook, now: datetime, until: datetime) -> Webhook | None:
    """Lease a webhook until then, unless somebody else has meanwhile."""
    row = connection.execute(
        update(webhooks)
        .where(
            webhooks.c.id == seen.id,
            webhooks.c.disabled_at.is_(None),
            or_(webhooks.c.lease_until.is_(None), webhooks.c.lease_until <= now),
        )
        .values(lease_until=until)
        .returning(*_COLUMNS)
    )
    found = row.mappings().one_or_none()
    return None if found is None else _webhook(found)


def save(connection: Connection, held: Webhook, **values: Any) -> Webhook | None:
    """Change a webhook whose lease still is ``held``'s; None when it is not, or the webhook is gone."""
    row = connection.execute(
        update(webhooks)
        .where(webhooks.c.id == held.id, webhooks.c.lease_until == held.lease_until)
        .values(**values)
        .returning(*_COLUMNS)
    )
    found = row.mappings().one_or_none()
    return None if found is None else _webhook(found)


def revive(connection: Connection, webhook_id: str) -> None:
    """Let what is still to be delivered be delivered now: the receiver works."""
    connection.execute(
        update(webhooks)
        .where(webhooks.c.id == webhook_id)
        .values(failures=0, failing_since=None, next_at=None, disabled_at=None, disabled_reason=None)
    )


def note(connection: Connection, delivery: Delivery) -> None:
    connection.execute(insert(deliveries).values(asdict(delivery)))


def page_deliveries(connection: Connection, webhook_id: str, *, after: Position | None, limit: int) -> list[Delivery]:
    query = select(*_DELIVERY).where(deliveries.c.webhook_id == webhook_id)
    rows = connection.execute(newest_first(query, deliveries, after, limit))
    return [Delivery(**arguments(row)) for row in rows.mappings()]


def sweep(connection: Connection, before: datetime, each_max: int) -> None:
    """Forget attempts older than ``before``, and of each webhook all but the newest ``each_max``."""
    place = func.row_number().over(
        partition_by=deliveries.c.webhook_id, order_by=(deliveries.c.created_at.desc(), deliveries.c.id.desc())
    )
    numbered = select(deliveries.c.id, deliveries.c.created_at, place.label("place")).subquery()
    old = select(numbered.c.id).where(or_(numbered.c.created_at < before, numbered.c.place > each_max))
    connection.execute(delete(deliveries).where(deliveries.c.id.in_(old)))


def _webhook(row: RowMapping) -> Webhook:
    return replace(Webhook(**arguments(row)), events=tuple(row["events"]))

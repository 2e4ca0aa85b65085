"""Delivering events to webhooks: in order for each, at least once, again and again until they are a day old.

What is done is written down after each attempt, so a process that is killed loses nothing; the next one goes on when
the lease has lapsed. Without webhooks nothing is looked at: this sleeps until somebody makes one.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy import Connection

from space import tracing
from space.control.changes import EVERYTHING, WEBHOOKS
from space.control.control import Control
from space.control.webhooks import attempt, message_of
from space.errors import SpaceError
from space.model.event import Event
from space.model.webhook import Delivery, Webhook, type_of
from space.store import events, webhooks

log = structlog.get_logger(__name__)

AT_ONCE = 16
OF_A_PROJECT = 4
BATCH = 20
TURN_S = 10.0
"""How long one webhook may be served before another gets the place."""
LEASE = timedelta(seconds=20)
"""Longer than one attempt can take: only a process that died lets it lapse."""
TRIED_FOR = timedelta(hours=24)
DISABLED_AFTER = timedelta(days=5)
RETRY_FIRST_S = 5.0
RETRY_FACTOR = 3.0
RETRY_MAX_S = 3600.0
"""No longer: what is due later waits behind the one that is tried."""
JITTER = 0.2
POLL_S = 30.0
"""When to look for events that another process has recorded."""
TOGETHER_S = 0.05
GONE = 410


class Deliverer:
    """Delivers until it is cancelled. Several processes may run one: a webhook is leased to one at a time."""

    def __init__(self, control: Control, took: Callable[[str, float], None] = lambda *_: None) -> None:
        """``took`` is told of each attempt: its outcome, and how long it took."""
        self._control = control
        self._took = took
        self._busy: dict[str, str] = {}

    async def run(self) -> None:
        changes = self._control.changes
        async with asyncio.TaskGroup() as group:
            with changes.watch(EVERYTHING) as anything, changes.watch(WEBHOOKS) as webhook:
                while True:
                    wait_s = await self._begin(group)
                    if wait_s is None:
                        await webhook.wait_long()
                    else:
                        await anything.wait(wait_s, POLL_S)
                        # A change seldom comes alone.
                        await asyncio.sleep(TOGETHER_S)

    async def _begin(self, group: asyncio.TaskGroup) -> float | None:
        """Begin with what is due; return after how long there may be more, None while there are no webhooks."""
        control, now = self._control, self._control.now()
        try:
            due = await control.store.read(lambda connection: webhooks.due(connection, now, 4 * AT_ONCE))
        except SpaceError as error:
            log.warning("webhooks-not-read", code=error.code)
            return RETRY_FIRST_S
        for webhook in due.webhooks:
            if self._has_place(webhook):
                self._busy[webhook.id] = webhook.project_id
                group.create_task(self._serve(webhook))
        if not due.any:
            return None
        return POLL_S if due.next_at is None else max((due.next_at - control.now()).total_seconds(), 0.0)

    def _has_place(self, webhook: Webhook) -> bool:
        """Whether it may be served now: no project takes all the places, whose receivers may all be slow."""
        if webhook.id in self._busy or len(self._busy) >= AT_ONCE:
            return False
        return Counter(self._busy.values())[webhook.project_id] < OF_A_PROJECT

    async def _serve(self, webhook: Webhook) -> None:
        control, now = self._control, self._control.now()
        tracing.begin(webhook=webhook.id)
        try:
            held = await control.store.write(lambda connection: webhooks.claim(connection, webhook, now, now + LEASE))
            if held is not None:
                await self._deliver(held)
        except SpaceError as error:
            log.warning("webhook-left", code=error.code)
        except Exception as error:
            log.exception("webhook-broke", error=type(error).__name__)
        finally:
            del self._busy[webhook.id]
            control.changes.notify(WEBHOOKS)

    async def _deliver(self, webhook: Webhook) -> None:
        """Deliver what there is, in order, until one fails, the turn is over, or the webhook is held by another."""
        held: Webhook | None = webhook
        ends = time.monotonic() + TURN_S
        while held is not None and held.lease_until is not None:
            cursor = held.cursor
            batch = await self._control.store.read(
                lambda connection, after=cursor: events.after(connection, webhook.project_id, after, BATCH)
            )
            if not batch or time.monotonic() >= ends:
                await self._save(held, None, lease_until=None)
                return
            held = await self._go_on(held, batch)

    async def _go_on(self, held: Webhook, batch: Sequence[Event]) -> Webhook | None:
        """Deliver the first event of a batch that is to be delivered, or pass over all of it."""
        now = self._control.now()
        # Numbers have no gaps: what is missing was removed before it could be looked at.
        lost = batch[0].number - held.cursor - 1
        for event in batch:
            if not held.wants(type_of(event)):
                continue
            if event.created_at + TRIED_FOR >= now:
                return await self._try(held, event, lost)
            lost += 1
        done = {"cursor": batch[-1].number, "given_up": held.given_up + lost, "failures": 0, "next_at": None}
        return await self._save(held, None, **done, lease_until=now + LEASE)

    async def _try(self, held: Webhook, event: Event, lost: int) -> Webhook | None:
        """Make one attempt and write down what came of it; None when the webhook is no longer this process's."""
        message = message_of(held, event)
        # What was tried before was an event that is given up by now: this one starts anew.
        failures = 0 if lost else held.failures
        made = await attempt(self._control, held, message, number=failures + 1)
        self._took(made.outcome, made.seconds)
        log.info("delivery", message=message.id, outcome=made.outcome, reason=made.reason, status=made.status)
        now, given_up = self._control.now(), held.given_up + lost
        if made.reason is None:
            done = {"cursor": event.number, "failures": 0, "failing_since": None, "next_at": None}
            return await self._save(held, made, **done, given_up=given_up, lease_until=now + LEASE)
        since = held.failing_since or now
        reason = "gone" if made.status == GONE else "failing" if now - since >= DISABLED_AFTER else None
        if reason is not None:
            log.warning("webhook-disabled", reason=reason)
        return await self._save(
            held,
            made,
            cursor=event.number - 1,
            given_up=given_up,
            failures=failures + 1,
            failing_since=since,
            next_at=now + timedelta(seconds=pause_s(held.failures)),
            lease_until=None,
            disabled_at=None if reason is None else now,
            disabled_reason=reason,
        )

    async def _save(self, held: Webhook, made: Delivery | None, **values: Any) -> Webhook | None:
        def record(connection: Connection) -> Webhook | None:
            saved = webhooks.save(connection, held, **values)
            if saved is not None and made is not None:
                webhooks.note(connection, made)
            return saved

        return await self._control.store.write(record)


def pause_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row, and one more: 5 s, 15 s, … an hour; roughly."""
    pause = RETRY_MAX_S if failures > 10 else min(RETRY_FIRST_S * RETRY_FACTOR**failures, RETRY_MAX_S)
    return pause * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - it only spreads the load

"""What the store promises of webhooks, their deliveries and samples of usage, on each database it can be kept in."""

import asyncio
import itertools
from datetime import timedelta
from typing import Any

from space.model.ids import new_id
from space.model.project import Project
from space.model.usage import Sample
from space.model.webhook import Delivery, Webhook
from space.store import counts, events, samples, webhooks
from space.store.database import Database
from tests.stores import NOW

LEASE = timedelta(seconds=20)


def webhook_of(project: Project, **values: Any) -> Webhook:
    plain = {"url": "https://receiver.example/", "events": ("sandbox.failed",), "description": "", "cursor": 0}
    return Webhook(id=new_id("whk"), project_id=project.id, created_at=NOW, **{**plain, **values})


def delivery_of(webhook: Webhook, age_s: float = 0, outcome: str = "delivered") -> Delivery:
    at = NOW - timedelta(seconds=age_s)
    return Delivery(new_id("dlv"), webhook.id, "msg_1", "sandbox.running", 1, outcome, None, 204, 0.5, at)


async def added(store: Database, project: Project, **values: Any) -> Webhook:
    webhook = webhook_of(project, **values)
    await store.write(lambda c: webhooks.add(c, webhook))
    return webhook


async def test_a_webhook_comes_back_as_it_was_stored(store: Database, project: Project) -> None:
    made = await added(
        store, project, failures=3, failing_since=NOW, next_at=NOW, given_up=2, disabled_at=NOW, disabled_reason="gone"
    )
    assert await store.read(lambda c: webhooks.get(c, made.id)) == made
    assert await store.read(lambda c: webhooks.page(c, project.id, after=None, limit=10)) == [made]
    assert await store.read(lambda c: webhooks.page(c, new_id("prj"), after=None, limit=10)) == []


async def test_a_webhook_is_due_only_while_something_is_behind_its_cursor(store: Database, project: Project) -> None:
    made = await added(store, project)
    nothing = await store.read(lambda c: webhooks.due(c, NOW, 10))
    assert (nothing.webhooks, nothing.any) == ([], True)
    await store.write(lambda c: events.add(c, project.id, "sandbox", {}, NOW))
    assert (await store.read(lambda c: webhooks.due(c, NOW, 10))).webhooks == [made]


async def test_what_waits_is_held_or_disabled_is_not_due_and_the_next_time_is_told(
    store: Database, project: Project
) -> None:
    await store.write(lambda c: events.add(c, project.id, "sandbox", {}, NOW))
    assert not (await store.read(lambda c: webhooks.due(c, NOW, 10))).any
    await added(store, project, disabled_at=NOW, disabled_reason="gone")
    assert not (await store.read(lambda c: webhooks.due(c, NOW, 10))).any
    waits = await added(store, project, next_at=NOW + timedelta(seconds=60))
    await added(store, project, lease_until=NOW + timedelta(seconds=90))
    found = await store.read(lambda c: webhooks.due(c, NOW, 10))
    assert (found.webhooks, found.any, found.next_at) == ([], True, waits.next_at)
    later = await store.read(lambda c: webhooks.due(c, NOW + timedelta(seconds=60), 10))
    assert later.webhooks == [waits]


async def test_a_webhook_is_leased_to_one_and_to_another_only_after_that(store: Database, project: Project) -> None:
    made = await added(store, project)
    claims = await asyncio.gather(
        *(store.write(lambda c: webhooks.claim(c, made, NOW, NOW + LEASE)) for _ in range(10))
    )
    assert sum(claim is not None for claim in claims) == 1
    after = NOW + LEASE
    assert await store.write(lambda c: webhooks.claim(c, made, after, after + LEASE)) is not None


async def test_nobody_saves_what_is_leased_to_somebody_else(store: Database, project: Project) -> None:
    made = await added(store, project)
    first = await store.write(lambda c: webhooks.claim(c, made, NOW, NOW + LEASE))
    assert first is not None
    second = await store.write(lambda c: webhooks.claim(c, made, NOW + LEASE, NOW + 2 * LEASE))
    assert second is not None
    assert await store.write(lambda c: webhooks.save(c, first, cursor=9)) is None
    saved = await store.write(lambda c: webhooks.save(c, second, cursor=5, lease_until=None))
    assert saved is not None
    assert (saved.cursor, saved.lease_until) == (5, None)


async def test_a_removed_webhook_takes_its_deliveries_along(store: Database, project: Project) -> None:
    made = await added(store, project)
    await store.write(lambda c: webhooks.note(c, delivery_of(made)))
    assert not await store.write(lambda c: webhooks.remove(c, made.id, new_id("prj")))
    assert await store.write(lambda c: webhooks.remove(c, made.id, project.id))
    assert await store.read(lambda c: webhooks.page_deliveries(c, made.id, after=None, limit=10)) == []


async def test_deliveries_are_swept_by_age_and_by_number(store: Database, project: Project) -> None:
    made, other = await added(store, project), await added(store, project)
    kept = [delivery_of(made, age_s=n) for n in range(5)]
    for delivery in [*kept, delivery_of(made, age_s=1000), delivery_of(other, age_s=2)]:
        await store.write(lambda c, d=delivery: webhooks.note(c, d))
    await store.write(lambda c: webhooks.sweep(c, NOW - timedelta(seconds=500), 3))
    assert await store.read(lambda c: webhooks.page_deliveries(c, made.id, after=None, limit=10)) == kept[:3]
    assert len(await store.read(lambda c: webhooks.page_deliveries(c, other.id, after=None, limit=10))) == 1


async def test_a_receiver_that_works_again_is_told_at_once(store: Database, project: Project) -> None:
    made = await added(store, project, failures=9, next_at=NOW + LEASE, disabled_at=NOW, disabled_reason="failing")
    await store.write(lambda c: webhooks.revive(c, made.id))
    revived = await store.read(lambda c: webhooks.get(c, made.id))
    assert revived is not None
    assert (revived.failures, revived.next_at, revived.disabled_at) == (0, None, None)


async def test_of_several_samples_in_a_slot_one_is_kept(store: Database) -> None:
    sandbox, other = new_id("sbx"), new_id("sbx")
    at = NOW.replace(second=0, microsecond=0)
    taken = [(sandbox, Sample(at + timedelta(seconds=n), cpu_s=float(n), pids=n)) for n in (1, 2, 16)]
    await store.write(lambda c: samples.add(c, [*taken[:1], (other, Sample(at, pids=7))]))
    await store.write(lambda c: samples.add(c, taken[1:]))
    found = await store.read(lambda c: samples.of(c, sandbox, since=at, until=at + LEASE, every=1))
    assert [sample.pids for sample in found] == [1, 16]
    assert found[0] == taken[0][1]


async def test_older_samples_are_thinned_out_and_the_oldest_removed(store: Database) -> None:
    sandbox = new_id("sbx")
    taken = [(sandbox, Sample(NOW - n * samples.SLOT, pids=n)) for n in range(1, 400)]
    await store.write(lambda c: samples.add(c, taken))

    def kept() -> Any:
        return store.read(lambda c: samples.of(c, sandbox, since=NOW - timedelta(days=1), until=NOW, every=1))

    dense_since = NOW - 200 * samples.SLOT
    for _ in range(2):
        await store.write(lambda c: samples.sweep(c, dense_since=dense_since, kept_since=NOW - 380 * samples.SLOT))
    found = await kept()
    young = [sample for sample in found if sample.at >= dense_since]
    old = [sample.at for sample in found if sample.at < dense_since - samples.SPARSE * samples.SLOT]
    assert [sample.pids for sample in young] == list(range(200, 0, -1))
    assert len(old) in {8, 9}
    assert {later - earlier for earlier, later in itertools.pairwise(old)} == {samples.SPARSE * samples.SLOT}


async def test_a_longer_step_takes_the_last_sample_of_each(store: Database) -> None:
    sandbox = new_id("sbx")
    start = NOW - timedelta(seconds=samples.slot_of(NOW) % 4 * 15)
    taken = [(sandbox, Sample(start + n * samples.SLOT, pids=n)) for n in range(12)]
    await store.write(lambda c: samples.add(c, taken))
    found = await store.read(lambda c: samples.of(c, sandbox, since=start, until=start + 12 * samples.SLOT, every=4))
    assert [sample.pids for sample in found] == [3, 7, 11]


async def test_everything_can_be_counted(store: Database, project: Project) -> None:
    await added(store, project)
    await added(store, project, failures=1)
    await added(store, project, disabled_at=NOW, disabled_reason="gone")
    for _ in range(3):
        await store.write(lambda c: events.add(c, project.id, "sandbox", {}, NOW))
    found = await store.read(counts.everything)
    assert found["space_webhooks"] == {"active": 1, "failing": 1, "disabled": 1}
    assert found["space_operations_open"] == {"pending": 0, "running": 0}
    assert found["space_events"] == 3

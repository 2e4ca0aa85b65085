"""What happens by itself: deadlines, the comparison with the node, and the sweeping of what is no longer needed."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import structlog
from sqlalchemy import Connection

from space.control import (
    attachments,
    dropping,
    idle,
    oauth,
    templates,
    unnamed,
    uploads,
    usage,
    verbs,
    volumes,
    watcher,
)
from space.control import snapshots as snapshot_requests
from space.control.catalog import MOVES_KEPT
from space.control.control import Control
from space.control.once import KEPT
from space.control.verbs import Due
from space.errors import SpaceError
from space.model.sandbox import Sandbox, State
from space.store import (
    commands,
    drops,
    events,
    grants,
    idempotency,
    operations,
    releases,
    sandboxes,
    snapshots,
    tags,
    webhooks,
)

log = structlog.get_logger(__name__)

DEADLINES_EVERY_S = 0.5
COMPARE_EVERY_S = 60.0
SWEEP_EVERY_S = 300.0
TEMPLATES_EVERY_S = 30.0
BUILDS_EVERY_S = 15.0
KEYS_EVERY_S = 30.0
TOKENS_EVERY_S = 2.0
DELETE_AGAIN_EVERY_S = 60.0
RECONNECT_S = 0.5
IDLE_EVERY_S = 0.5
UNSETTLED_EVERY_S = 0.5
DROP_EVERY_S = 5.0
DUE_AT_ONCE = 500
DUE_AGAIN = timedelta(seconds=30)
"""How long a sandbox whose deadline was acted on in vain (it can not be suspended now) is left alone."""
TOMBSTONES_KEPT = timedelta(hours=24)
UNBORN_KEPT = timedelta(hours=1)
"""How long a sandbox that failed before it had a machine can be looked at, and started."""
EVENTS_KEPT = timedelta(hours=24)
DROPS_KEPT = timedelta(hours=1)
# Of a sandbox that lives: what has ended is told for so long, and no more of it than so much.
ENDED_KEPT = timedelta(hours=24)
ENDED_MAX = 10_000
DELIVERIES_KEPT = timedelta(days=7)
DELIVERIES_MAX = 100


class Reaper:
    """Runs until it is cancelled. Several processes may run one: every change is a compare-and-set."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def run(self) -> None:
        control = self._control
        async with asyncio.TaskGroup() as group:
            for step, every_s in (
                (lambda: end_due(control), DEADLINES_EVERY_S),
                (lambda: idle.end_idle(control), IDLE_EVERY_S),
                (lambda: watcher.follow(control), RECONNECT_S),
                (lambda: attachments.follow(control), RECONNECT_S),
                (lambda: oauth.refresh_due(control), TOKENS_EVERY_S),
                (lambda: watcher.check_unsettled(control), UNSETTLED_EVERY_S),
                (lambda: watcher.compare(control), COMPARE_EVERY_S),
                (lambda: snapshot_requests.drop_unwanted(control), DROP_EVERY_S),
                (lambda: volumes.drop_unwanted(control), DROP_EVERY_S),
                (lambda: templates.synchronise(control), TEMPLATES_EVERY_S),
                (lambda: dropping.drop_unneeded(control), TEMPLATES_EVERY_S),
                (lambda: dropping.forget_builds(control), BUILDS_EVERY_S),
                (lambda: uploads.drop_unwanted(control), BUILDS_EVERY_S),
                (lambda: sample_usage(control), usage.SAMPLE_S),
                (control.keyring.note_used, KEYS_EVERY_S),
                (lambda: delete_again(control), DELETE_AGAIN_EVERY_S),
                (lambda: forget_unborn(control), DELETE_AGAIN_EVERY_S),
                (lambda: sweep(control), SWEEP_EVERY_S),
                (lambda: sweep_commands(control), SWEEP_EVERY_S),
            ):
                group.create_task(_forever(step, every_s))


async def end_due(control: Control) -> None:
    """Ask for what `on_timeout` says on every sandbox whose deadline has passed.

    A deadline renewed before the request is recorded wins; one that comes after it is refused.
    """
    now, tried = control.now(), control.deadlines_tried
    for key in [key for key, at in tried.items() if at <= now - DUE_AGAIN]:
        del tried[key]
    for sandbox in await control.store.read(lambda connection: sandboxes.due(connection, now, DUE_AT_ONCE)):
        verb = "delete" if sandbox.state == State.FAILED else sandbox.on_timeout
        if (sandbox.id, sandbox.deadline_at, verb) in tried:
            continue
        try:
            await verbs.request(control, sandbox.project_id, sandbox.id, verb, due=Due(sandbox))
            tried[sandbox.id, sandbox.deadline_at, verb] = now
        except SpaceError as error:
            log.info("deadline-not-met", sandbox=sandbox.id, code=error.code)


async def delete_again(control: Control) -> None:
    """Take up deletions that failed: a delete that was accepted always ends in full clean-up."""
    for sandbox in await unfinished_deletions(control):
        try:
            await verbs.request(control, sandbox.project_id, sandbox.id, "delete")
        except SpaceError as error:
            log.warning("not-deleted-again", sandbox=sandbox.id, code=error.code)


async def forget_unborn(control: Control) -> None:
    """Delete sandboxes that failed to come up a while ago: they are of no more use, and nobody may have looked."""
    before = control.now() - UNBORN_KEPT
    for sandbox in await control.store.read(lambda connection: sandboxes.never_ran(connection, before, DUE_AT_ONCE)):
        try:
            await verbs.request(control, sandbox.project_id, sandbox.id, "delete")
        except SpaceError as error:
            log.warning("unborn-not-deleted", sandbox=sandbox.id, code=error.code)


async def unfinished_deletions(control: Control) -> list[Sandbox]:
    present = await control.store.read(sandboxes.all_present)
    return [s for s in present.values() if s.state == State.FAILED and s.details.get("deleting")]


async def sample_usage(control: Control) -> None:
    await usage.note(control, {str(m.get("machine")): m for m in await control.node.machines()})


async def sweep(control: Control) -> None:
    """Remove what is older than it is kept: tombstones, events, idempotency keys, and operations that have ended."""
    now = control.now()

    def record(connection: Connection) -> None:
        idempotency.sweep(connection, now - KEPT)
        events.sweep(connection, now - EVENTS_KEPT)
        sandboxes.sweep(connection, now - TOMBSTONES_KEPT)
        snapshots.sweep(connection, now - TOMBSTONES_KEPT)
        grants.sweep(connection, now - TOMBSTONES_KEPT)
        unnamed.sweep(connection, control)
        releases.sweep(connection, now - TOMBSTONES_KEPT)
        tags.sweep(connection, MOVES_KEPT)
        drops.sweep(connection, now - DROPS_KEPT)
        operations.sweep(connection, now - ENDED_KEPT, ENDED_MAX)
        webhooks.sweep(connection, now - DELIVERIES_KEPT, DELIVERIES_MAX)
        usage.sweep(connection, now)

    await control.store.write(record)


async def sweep_commands(control: Control) -> None:
    """Remove commands that are older than they are kept, or too many, once the node has forgotten them, too."""
    before = control.now() - ENDED_KEPT
    for sandbox in await control.store.read(lambda connection: commands.to_be_swept(connection, before, ENDED_MAX)):
        known = {str(shown.get("id")) for shown in await control.node.commands(sandbox)}
        await control.store.write(
            lambda connection, of=sandbox, besides=known: commands.sweep(
                connection, of, before, ENDED_MAX, besides=besides
            )
        )


async def _forever(step: Callable[[], Awaitable[object]], every_s: float) -> None:
    while True:
        try:
            await step()
        except SpaceError as error:
            log.warning("reaper-step-failed", code=error.code)
        except Exception as error:
            log.exception("reaper-step-broke", error=type(error).__name__)
        await asyncio.sleep(every_s)

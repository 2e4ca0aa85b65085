"""What happens by itself: deadlines, the comparison with the node, and the sweeping of what is no longer needed."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import structlog
from sqlalchemy import Connection

from space.control import sandboxes as requests
from space.control import templates, watcher
from space.control.control import Control
from space.control.once import KEPT
from space.control.usage import SAMPLE_S
from space.errors import SpaceError
from space.model.sandbox import Sandbox, State
from space.store import commands, events, idempotency, operations, sandboxes

log = structlog.get_logger(__name__)

DEADLINES_EVERY_S = 0.5
COMPARE_EVERY_S = 60.0
SWEEP_EVERY_S = 300.0
TEMPLATES_EVERY_S = 30.0
KEYS_EVERY_S = 30.0
DELETE_AGAIN_EVERY_S = 60.0
RECONNECT_S = 0.5
DUE_AT_ONCE = 50
TOMBSTONES_KEPT = timedelta(hours=24)
EVENTS_KEPT = timedelta(hours=24)
# Of a sandbox that lives: what has ended is told for so long, and no more of it than so much.
ENDED_KEPT = timedelta(hours=24)
ENDED_MAX = 10_000


class Reaper:
    """Runs until it is cancelled. Several processes may run one: every change is a compare-and-set."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def run(self) -> None:
        control = self._control
        async with asyncio.TaskGroup() as group:
            for step, every_s in (
                (lambda: end_due(control), DEADLINES_EVERY_S),
                (lambda: watcher.follow(control), RECONNECT_S),
                (lambda: watcher.compare(control), COMPARE_EVERY_S),
                (lambda: templates.synchronise(control), TEMPLATES_EVERY_S),
                (lambda: sample_usage(control), SAMPLE_S),
                (control.keyring.note_used, KEYS_EVERY_S),
                (lambda: delete_again(control), DELETE_AGAIN_EVERY_S),
                (lambda: sweep(control), SWEEP_EVERY_S),
                (lambda: sweep_commands(control), SWEEP_EVERY_S),
            ):
                group.create_task(_forever(step, every_s))


async def end_due(control: Control) -> None:
    """Ask for what `on_timeout` says on every sandbox whose deadline has passed.

    A deadline renewed before the request is recorded wins; one that comes after it is refused.
    """
    now = control.now()
    for sandbox in await control.store.read(lambda connection: sandboxes.due(connection, now, DUE_AT_ONCE)):
        verb = "delete" if sandbox.state == State.FAILED else sandbox.on_timeout
        try:
            await requests.request(control, sandbox.project_id, sandbox.id, verb, due=sandbox)
        except SpaceError as error:
            log.info("deadline-not-met", sandbox=sandbox.id, code=error.code)


async def delete_again(control: Control) -> None:
    """Take up deletions that failed: a delete that was accepted always ends in full clean-up."""
    for sandbox in await unfinished_deletions(control):
        try:
            await requests.request(control, sandbox.project_id, sandbox.id, "delete")
        except SpaceError as error:
            log.warning("not-deleted-again", sandbox=sandbox.id, code=error.code)


async def unfinished_deletions(control: Control) -> list[Sandbox]:
    present = await control.store.read(sandboxes.all_present)
    return [s for s in present.values() if s.state == State.FAILED and s.details.get("deleting")]


async def sample_usage(control: Control) -> None:
    watcher.note_usage(control, {str(m.get("machine")): m for m in await control.node.machines()})


async def sweep(control: Control) -> None:
    """Remove what is older than it is kept: tombstones, events, idempotency keys, and operations that have ended."""
    now = control.now()

    def record(connection: Connection) -> None:
        idempotency.sweep(connection, now - KEPT)
        events.sweep(connection, now - EVENTS_KEPT)
        sandboxes.sweep(connection, now - TOMBSTONES_KEPT)
        operations.sweep(connection, now - ENDED_KEPT, ENDED_MAX)

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


async def _forever(step: Callable[[], Awaitable[None]], every_s: float) -> None:
    while True:
        try:
            await step()
        except SpaceError as error:
            log.warning("reaper-step-failed", code=error.code)
        except Exception as error:
            log.exception("reaper-step-broke", error=type(error).__name__)
        await asyncio.sleep(every_s)

"""A project's events, as they come: from the store, so that a reader may leave and go on where it was."""

from collections.abc import AsyncGenerator

from space.control.control import Control
from space.model.event import Event
from space.store import events

BATCH = 200
QUIET_S = 15.0


async def latest(control: Control, project_id: str) -> int:
    """Return the number of the project's latest event."""
    return (await control.store.read(lambda connection: events.span(connection, project_id)))[1]


async def oldest(control: Control, project_id: str) -> int:
    """Return the number of the oldest event that is kept."""
    return (await control.store.read(lambda connection: events.span(connection, project_id)))[0]


async def follow(control: Control, project_id: str, after: int) -> AsyncGenerator[Event | None]:
    """Yield the project's events behind number ``after``, for ever; None when there was none for a while."""
    with control.changes.watch(project_id) as watch:
        waited_s = 0.0
        while True:
            batch = await control.store.read(
                lambda connection, seen=after: events.after(connection, project_id, seen, BATCH)
            )
            for event in batch:
                yield event
                after = event.number
            if batch:
                waited_s = 0.0
                continue
            if waited_s >= QUIET_S:
                yield None
                waited_s = 0.0
            waited_s += await watch.wait(QUIET_S)

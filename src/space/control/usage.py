"""What sandboxes used: sampled while their machines run, kept in the store, so that a restart of the api loses nothing.

Of the last hour one sample in 15 s is kept, of the day before that one in 5 minutes. While no api runs none is taken.
"""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from space.control.control import Control
from space.errors import InvalidRequest
from space.model.usage import Sample, sample
from space.store import samples

SAMPLE_S = samples.SLOT.total_seconds()
DENSE_FOR = timedelta(hours=1)
KEPT_FOR = timedelta(hours=24)
POINTS_MAX = 1000
STEP_S_MAX = 24 * 3600


async def note(control: Control, machines: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep one sample of every machine in the list that is in memory, by the ids of their sandboxes."""
    now = control.now()
    taken = [
        (machine_id, found)
        for machine_id, machine in sorted(machines.items())
        if machine.get("state") in {"running", "paused"} and not machine.get("spare")
        if (found := sample(machine.get("usage"), now)) is not None
    ]
    if taken:
        await control.store.write(lambda connection: samples.add(connection, taken))


async def history(
    control: Control, sandbox_id: str, since: datetime | None, until: datetime | None, step_s: float | None
) -> list[Sample]:
    """Return what a sandbox used from ``since`` (an hour before ``until``) to ``until`` (now), one sample a step (the
    shortest that there is room for).

    Raises ``InvalidRequest`` when that would be too many.
    """
    now = control.now()
    oldest = now - KEPT_FOR
    until = now if until is None else max(until, oldest)
    since = max(until - DENSE_FOR if since is None else since, oldest)
    asked_s = (until - since).total_seconds()
    if step_s is None:
        step_s = SAMPLE_S * max(1, math.ceil(asked_s / SAMPLE_S / POINTS_MAX))
    if asked_s / step_s > POINTS_MAX:
        raise InvalidRequest(
            f"step_s: That would be more than {POINTS_MAX} samples. Take a longer step, or a shorter time.",
            field="step_s",
            maximum=POINTS_MAX,
        )
    every = max(1, round(step_s / SAMPLE_S))
    return await control.store.read(
        lambda connection: samples.of(connection, sandbox_id, since=since, until=until, every=every)
    )


def sweep(connection: Connection, now: datetime) -> None:
    """Thin out what is older than an hour, and remove what is older than a day."""
    samples.sweep(connection, dense_since=now - DENSE_FOR, kept_since=now - KEPT_FOR)

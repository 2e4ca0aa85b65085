"""Idleness: a sandbox in which nothing runs, nothing is attached and nothing travels for a while does what it was told.

The node knows who is active, and has the last word: it is asked to do it only if the sandbox still is idle, so that a
command that has just begun wins. A command that runs is activity, however silent it is.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import structlog

from space.control import verbs
from space.control.control import Control
from space.control.verbs import Due
from space.errors import SpaceError
from space.model.sandbox import Sandbox
from space.store import sandboxes

log = structlog.get_logger(__name__)


async def end_idle(control: Control) -> None:
    """Ask for what `on_idle` says on every running sandbox that has been idle for its `idle_timeout_s`."""
    watched = await control.store.read(sandboxes.may_go_idle)
    if not watched:
        return
    activity = await control.node.activity()
    now = control.now()
    for sandbox in watched:
        if not _is_due(sandbox, activity.get(sandbox.id, {}), now):
            continue
        due = Due(sandbox, if_idle_s=sandbox.idle_timeout_s)
        try:
            await verbs.request(control, sandbox.project_id, sandbox.id, sandbox.on_idle, due=due)
        except SpaceError as error:
            log.info("idleness-not-met", sandbox=sandbox.id, code=error.code)


def _is_due(sandbox: Sandbox, shown: Mapping[str, Any], now: datetime) -> bool:
    """Whether nothing was going on for long enough; a change of the sandbox itself counts as something."""
    active_at = shown.get("active_at")
    if sandbox.idle_timeout_s is None or shown.get("commands") or shown.get("clients"):
        return False
    if not isinstance(active_at, int | float) or shown.get("state") != "running":
        return False
    return now.timestamp() - max(active_at, sandbox.updated_at.timestamp()) >= sandbox.idle_timeout_s

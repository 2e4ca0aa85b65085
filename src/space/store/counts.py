"""How much there is of everything, for figures."""

from collections.abc import Mapping

from sqlalchemy import Connection, case, func, select

from space.model.build import OPEN as OPEN_BUILDS
from space.model.operation import OperationState
from space.store import sandboxes
from space.store.tables import builds, operations, projects, webhooks

_OPEN = (OperationState.PENDING, OperationState.RUNNING)


def everything(connection: Connection) -> dict[str, Mapping[str, float] | float]:
    """Return counts by the names that figures have."""
    open_operations = {row[0]: row[1] for row in connection.execute(_OPERATIONS)}
    open_builds = {row[0]: row[1] for row in connection.execute(_BUILDS)}
    return {
        "space_sandboxes": sandboxes.count_by_state(connection),
        "space_operations_open": {state: open_operations.get(state, 0) for state in _OPEN},
        "space_builds_open": {state: open_builds.get(state, 0) for state in sorted(OPEN_BUILDS)},
        "space_events": connection.execute(select(func.coalesce(func.sum(projects.c.last_event), 0))).scalar_one(),
        "space_webhooks": {row[0]: row[1] for row in connection.execute(_WEBHOOKS)},
    }


_OPERATIONS = (
    select(operations.c.state, func.count()).where(operations.c.state.in_(sorted(_OPEN))).group_by(operations.c.state)
)
_BUILDS = select(builds.c.state, func.count()).where(builds.c.state.in_(sorted(OPEN_BUILDS))).group_by(builds.c.state)
_WEBHOOK_STATE = case(
    (webhooks.c.disabled_at.is_not(None), "disabled"), (webhooks.c.failures > 0, "failing"), else_="active"
)
_WEBHOOKS = select(_WEBHOOK_STATE, func.count()).group_by(_WEBHOOK_STATE)

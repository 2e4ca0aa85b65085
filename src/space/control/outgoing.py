"""Replacing at once all that is said of what may leave a sandbox: its policy, and grants that came with it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from space.control import attachments, grants, policies
from space.control.control import Control
from space.control.grants import NewGrant
from space.control.sandboxes import not_found, owned, wrong_state
from space.model.ids import is_id
from space.model.sandbox import Sandbox, State
from space.store import grants as rows
from space.store import policies as policy_rows
from space.store import sandboxes


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is to hold. ``ends`` says of a grant's terms whether it ends, ``extras`` what is kept of it besides."""

    policy: str | dict[str, Any]
    grants: Sequence[NewGrant]
    ends: Callable[[Sandbox, Mapping[str, Any]], bool]
    extras: Callable[[Sandbox], Mapping[str, Any]]


async def replace(control: Control, project_id: str, sandbox_id: str, wanted: Outgoing) -> None:
    """Give a sandbox another policy and other grants, in one step; when this returns, they hold.

    Raises ``NotFound``, ``InvalidRequest``, ``Conflict`` or ``LimitExceeded``; then nothing has changed.
    """
    if not is_id("sbx", sandbox_id):
        raise not_found()
    prepared = await grants.prepare(control, project_id, wanted.grants)
    now = control.now()

    def record(connection: Connection) -> None:
        seen = owned(sandboxes.get(connection, sandbox_id, lock=True), project_id)
        policies.check(control.settings, connection, project_id, wanted.policy)
        details = {**seen.details, "extras": {**(seen.details.get("extras") or {}), **wanted.extras(seen)}}
        changed = sandboxes.change(connection, seen, policy=wanted.policy, details=details, updated_at=now)
        if seen.state == State.DELETING or changed is None:
            raise wrong_state(seen, "changed")
        for row, _ in rows.in_force(connection, sandbox_id, now):
            if wanted.ends(seen, row.terms):
                rows.revoke_one(connection, row.id, now)
        grants.check_room(connection, sandbox_id, len(prepared), now)
        grants.give(connection, prepared, sandbox_id)
        policy_rows.changed(connection, [sandbox_id])

    await control.store.write(record)
    await attachments.confirm(control, [sandbox_id])

"""Grants: which secrets are placed into which requests of a sandbox. Made with it or later, revoked at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from space.control import attachments, once
from space.control.control import Control
from space.control.once import Once
from space.control.policies import invalid
from space.control.sandboxes import not_found as no_such_sandbox
from space.control.sandboxes import owned, wrong_state
from space.control.values import placed
from space.errors import InvalidRequest, LimitExceeded, NotFound
from space.model.grant import GRANTS_MAX, new_placeholder, parse_grant, render_grant
from space.model.ids import is_id, new_id
from space.model.policy_fields import PolicyInvalid
from space.model.sandbox import Sandbox, State
from space.store import grants, policies, sandboxes, secrets
from space.store.grants import GrantRow
from space.store.paging import Position
from space.store.secrets import Secret

_NOT_TERMS = frozenset({"id", "secret", "value", "placeholder", "expires_at"})


@dataclass(frozen=True, slots=True)
class NewGrant:
    """What a caller asks for: a secret's name, and where and how it is placed (``terms``, as `model/grant.py` has it).

    ``env`` is the variable in the sandbox's environment that gets the placeholder.
    """

    secret: str
    terms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: str | None = None
    expires_in_s: float | None = None


async def prepare(
    control: Control, project_id: str, wanted: Sequence[NewGrant], field_of: str = "grants[{}]"
) -> list[GrantRow]:
    """Return the rows of new grants, of no sandbox yet, or raise what is wrong with one (``InvalidRequest``).

    Each secret is opened once here: a sandbox that could not be given it is not made.
    """
    if not wanted:
        return []
    if len(wanted) > GRANTS_MAX:
        raise _too_many()
    names = {one.secret for one in wanted}
    found = await control.store.read(
        lambda connection: {name: secrets.get(connection, project_id, name) for name in names}
    )
    now = control.now()
    rows: list[GrantRow] = []
    for number, one in enumerate(wanted):
        at, secret = field_of.format(number), found[one.secret]
        if secret is None:
            raise InvalidRequest(
                f"{at}.secret: There is no such secret. `space secret ls` lists those there are.",
                code="unknown-secret",
                field=f"{at}.secret",
            )
        rows.append(await _prepared(control, secret, one, now, at))
    return rows


async def _prepared(control: Control, secret: Secret, wanted: NewGrant, now: datetime, at: str) -> GrantRow:
    keys = await control.key_store.opening(secret.key_id)
    ends = None if wanted.expires_in_s is None else now + timedelta(seconds=wanted.expires_in_s)
    row = GrantRow(
        id=new_id("grt"),
        project_id=secret.project_id,
        sandbox_id="",
        secret_id=secret.id,
        secret=secret.name,
        created_at=now,
        placeholder=new_placeholder(),
        env=wanted.env,
        expires_at=ends,
    )
    document = {"id": row.id, "secret": row.secret, "placeholder": row.placeholder, **wanted.terms}
    try:
        grant = parse_grant({**document, "value": placed(keys, secret)})
    except PolicyInvalid as error:
        raise invalid(error, at) from None
    terms = {name: value for name, value in render_grant(grant).items() if name not in _NOT_TERMS}
    return replace(row, terms=terms)


def environment(rows: Sequence[GrantRow], env: Mapping[str, str]) -> dict[str, str]:
    """Return a sandbox's environment with its grants' placeholders; ``InvalidRequest`` where two want one name."""
    merged = dict(env)
    for number, row in enumerate(rows):
        if row.env is None:
            continue
        if row.env in merged:
            at = f"grants[{number}].env"
            raise InvalidRequest(f"{at}: The environment has {row.env} already.", field=at)
        merged[row.env] = row.placeholder or ""
    return merged


def give(connection: Connection, rows: Sequence[GrantRow], sandbox_id: str) -> None:
    """Add the prepared rows to a new sandbox; ``InvalidRequest`` when a secret has been deleted since."""
    for row in rows:
        _still_there(connection, row)
        grants.add(connection, replace(row, sandbox_id=sandbox_id))


def check_room(connection: Connection, sandbox_id: str, more: int, now: datetime) -> None:
    """Raise ``LimitExceeded`` where a sandbox, which is locked, cannot have so many more."""
    if grants.count(connection, sandbox_id, now) + more > GRANTS_MAX:
        raise _too_many()


def copy(connection: Connection, source: Sandbox, forks: Sequence[Sandbox], now: datetime) -> None:
    """Give forks their source's grants, with its placeholders, which their memory has."""
    held = [row for row, _ in grants.in_force(connection, source.id, now)]
    for fork in forks:
        for row in held:
            grants.add(connection, replace(row, id=new_id("grt"), sandbox_id=fork.id))


def placeholders(connection: Connection, sandbox_id: str, now: datetime) -> dict[str, str]:
    """Return the variables that a sandbox's grants have put into its environment."""
    held = [row for row, _ in grants.in_force(connection, sandbox_id, now)]
    return {row.env: row.placeholder or "" for row in held if row.env is not None}


async def request_grant(
    control: Control, project_id: str, sandbox_id: str, wanted: NewGrant, asked_once: Once | None = None
) -> GrantRow:
    """Grant a secret to a sandbox that is there; when this returns, the next requests get it.

    Raises ``NotFound``, ``InvalidRequest``, ``Conflict`` or ``LimitExceeded``.
    """
    if not is_id("sbx", sandbox_id):
        raise no_such_sandbox()
    earlier = await control.store.read(lambda connection: _earlier(connection, project_id, asked_once, control.now()))
    if earlier is not None:
        return earlier
    await control.store.read(lambda connection: owned(sandboxes.get(connection, sandbox_id), project_id))
    [row] = [replace(one, sandbox_id=sandbox_id) for one in await prepare(control, project_id, [wanted], "grant")]
    now = row.created_at

    def record(connection: Connection) -> GrantRow:
        seen = owned(sandboxes.get(connection, sandbox_id, lock=True), project_id)
        first = once.first(connection, asked_once, project_id, subject_id=row.id, now=now)
        if first is not None:
            return _owned(grants.get(connection, first.subject_id), sandbox_id)
        if seen.state == State.DELETING:
            raise wrong_state(seen, "granted anything")
        check_room(connection, sandbox_id, 1, now)
        _still_there(connection, row)
        grants.add(connection, row)
        policies.changed(connection, [sandbox_id])
        return row

    made = await control.store.write(record)
    await attachments.confirm(control, [sandbox_id])
    return made


async def page(
    control: Control, project_id: str, sandbox_id: str, *, after: Position | None, limit: int
) -> list[GrantRow]:
    """Return a sandbox's grants that are in force, newest first."""

    def look(connection: Connection) -> list[GrantRow]:
        owned(sandboxes.get(connection, sandbox_id), project_id)
        return grants.page(connection, sandbox_id, control.now(), after=after, limit=limit)

    if not is_id("sbx", sandbox_id):
        raise no_such_sandbox()
    return await control.store.read(look)


async def revoke(control: Control, project_id: str, sandbox_id: str, grant_id: str) -> None:
    """Revoke a grant; when this returns, no request to come gets the secret. Raises ``NotFound``."""
    now = control.now()

    def record(connection: Connection) -> None:
        owned(sandboxes.get(connection, sandbox_id, lock=True), project_id)
        found = _owned(grants.get(connection, grant_id), sandbox_id)
        if found.revoked_at is not None:
            raise _not_found()
        grants.revoke_one(connection, grant_id, now)
        policies.changed(connection, [sandbox_id])

    if not is_id("sbx", sandbox_id):
        raise no_such_sandbox()
    if not is_id("grt", grant_id):
        raise _not_found()
    await control.store.write(record)
    await attachments.confirm(control, [sandbox_id])


def _still_there(connection: Connection, row: GrantRow) -> None:
    if secrets.by_id(connection, row.secret_id) is None:
        raise InvalidRequest("A secret that is granted has just been deleted.", code="unknown-secret", field="secret")


def _earlier(connection: Connection, project_id: str, asked_once: Once | None, now: datetime) -> GrantRow | None:
    seen = once.seen(connection, asked_once, project_id, now)
    if seen is None:
        return None
    found = grants.get(connection, seen.subject_id)
    if found is None:
        raise _not_found()
    return found


def _owned(found: GrantRow | None, sandbox_id: str) -> GrantRow:
    if found is None or found.sandbox_id != sandbox_id:
        raise _not_found()
    return found


def _not_found() -> NotFound:
    return NotFound("There is no such grant.")


def _too_many() -> LimitExceeded:
    return LimitExceeded(
        f"A sandbox may have {GRANTS_MAX} grants. Revoke one first.", code="grants-max", limit=GRANTS_MAX
    )

"""Secrets as their owners see them: never their values. A change of one reaches the sandboxes it is granted to."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from space.control import attachments, oauth, once
from space.control.control import Control
from space.control.keyring import Keys
from space.control.once import Once
from space.control.values import OAUTH, opened, sealed
from space.errors import Conflict, InvalidRequest, LimitExceeded, NotFound, SpaceError
from space.model.grant import parse_value
from space.model.ids import new_id
from space.model.policy_fields import PolicyInvalid
from space.store import grants, policies, projects, secrets
from space.store.paging import Position
from space.store.secrets import Secret

SECRETS_MAX = 1000
"""Of one project."""
RESEALED_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class NewSecret:
    """What a caller gives. ``value`` has the fields of its kind; without ``metadata``, what there is of it stays."""

    name: str
    kind: str
    value: Mapping[str, Any] = field(repr=False)
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """A secret, and how many grants of it are in force."""

    secret: Secret
    grants: int = 0


@dataclass(frozen=True, slots=True)
class Rotated:
    """What came of a rotation: the key that seals now, and how many secrets were sealed anew, or could not be."""

    key_id: str
    sealed: int
    failed: int


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that was looked at, and the columns that go with it."""

    fields: dict[str, Any] = field(repr=False)
    columns: dict[str, Any]


async def fingerprint_of(control: Control, value: Mapping[str, Any]) -> str:
    """Return what stands for a value in what is remembered of a request: without the key nobody can guess it."""
    return (await _keys(control)).digest(json.dumps(value, sort_keys=True).encode())


async def request_secret(control: Control, project_id: str, wanted: NewSecret, asked_once: Once | None = None) -> Shown:
    """Keep a secret. Raises ``InvalidRequest``, ``Conflict`` when there is one of the name, or ``LimitExceeded``."""
    now = control.now()
    earlier = await control.store.read(lambda connection: _earlier(connection, project_id, asked_once, now))
    if earlier is not None:
        return earlier
    value, keys = await _looked_at(control, wanted), await _keys(control)
    made = _made(keys, project_id, wanted, value, now)

    def record(connection: Connection) -> Secret:
        projects.lock(connection, project_id)
        first = once.first(connection, asked_once, project_id, subject_id=made.id, now=now)
        if first is not None:
            return _owned(secrets.by_id(connection, first.subject_id))
        if secrets.get(connection, project_id, wanted.name) is not None:
            raise Conflict(
                "There is a secret of that name. PUT gives it another value.", code="name-taken", field="name"
            )
        _add(connection, made)
        return made

    return Shown(await control.store.write(record))


async def set_secret(control: Control, project_id: str, wanted: NewSecret) -> tuple[Shown, bool]:
    """Give a secret its next value, or keep a new one; the second result says which (True: new).

    When this returns, every request to come gets the new value. Raises ``Conflict`` for one of another kind.
    """
    now = control.now()
    value, keys = await _looked_at(control, wanted), await _keys(control)

    def record(connection: Connection) -> tuple[Secret, list[str], bool]:
        projects.lock(connection, project_id)
        seen = secrets.get(connection, project_id, wanted.name)
        if seen is None:
            made = _made(keys, project_id, wanted, value, now)
            _add(connection, made)
            return made, [], True
        if seen.kind != wanted.kind:
            raise Conflict(
                f"The secret is of the kind {seen.kind}. Delete it first, or give it a value of that kind.",
                code="wrong-secret-kind",
                kind=seen.kind,
            )
        version = replace(seen, version=seen.version + 1)
        changed = secrets.change(
            connection,
            seen,
            version=version.version,
            updated_at=now,
            metadata=seen.metadata if wanted.metadata is None else wanted.metadata,
            **sealed(keys, version, value.fields),
            **value.columns,
        )
        # The project is locked, and so is what else changes secrets: fetching tokens and rotating lose this race.
        holders = grants.holders(connection, seen.id, now)
        policies.changed(connection, holders)
        return _owned(changed), holders, False

    secret, holders, is_new = await control.store.write(record)
    await attachments.confirm(control, holders)
    return Shown(secret, len(holders)), is_new


async def get(control: Control, project_id: str, name: str) -> Shown:
    """Return one of the project's secrets, or raise ``NotFound``."""

    def look(connection: Connection) -> Shown:
        return _shown(connection, [_owned(secrets.get(connection, project_id, name))], control.now())[0]

    return await control.store.read(look)


async def page(control: Control, project_id: str, *, after: Position | None, limit: int) -> list[Shown]:
    def look(connection: Connection) -> list[Shown]:
        found = secrets.page(connection, project_id, after=after, limit=limit)
        return _shown(connection, found, control.now())

    return await control.store.read(look)


async def remove(control: Control, project_id: str, name: str) -> None:
    """Delete a secret and revoke its grants; when this returns, no request to come gets it. Raises ``NotFound``."""
    now = control.now()

    def record(connection: Connection) -> list[str]:
        projects.lock(connection, project_id)
        found = _owned(secrets.get(connection, project_id, name))
        holders = grants.revoke_of_secret(connection, found.id, now)
        policies.changed(connection, holders)
        secrets.remove(connection, found.id)
        return holders

    await attachments.confirm(control, await control.store.write(record))


async def rotate(control: Control) -> Rotated:
    """Seal everybody's secrets with a new key, or with the one that the operator's command tells first now.

    Killed in between it leaves all that can be opened, and is done by doing it again. Keys that nothing was sealed with
    when it began are forgotten.
    """
    keys = await control.key_store.renew(await control.store.read(secrets.keys_in_use))
    done, failed = 0, set[str]()

    def reseal(connection: Connection) -> int:
        count = 0
        for secret in secrets.sealed_otherwise(connection, keys.first, RESEALED_AT_ONCE + len(failed)):
            try:
                columns = sealed(keys, secret, opened(keys, secret))
            except SpaceError:
                failed.add(secret.id)
                continue
            count += secrets.change(connection, secret, **columns) is not None
        return count

    while count := await control.store.write(reseal):
        done += count
    return Rotated(keys.first, done, len(failed))


async def _looked_at(control: Control, wanted: NewSecret) -> _Value:
    """Return a value that can be one, with a token where it is of the kind that needs one; else ``InvalidRequest``."""
    if wanted.kind == OAUTH:
        fields, token = await oauth.first(control, wanted.value)
        columns = {"refresh_at": token.refresh_at, "token_expires_at": token.expires_at}
        return _Value(fields, {**columns, "failures": 0, "failure": None})
    try:
        value = parse_value({"kind": wanted.kind, **wanted.value})
    except PolicyInvalid as error:
        field = "value" if error.field == "value.value" else error.field  # a text is the value, no field of it
        raise InvalidRequest(f"{field}: {error.message}", field=field) from None
    return _Value(dict(value.fields), {})


async def _keys(control: Control) -> Keys:
    sealed_any = await control.store.read(secrets.count)
    return await control.key_store.sealing(make=not sealed_any)


def _made(keys: Keys, project_id: str, wanted: NewSecret, value: _Value, now: datetime) -> Secret:
    plain = Secret(
        new_id("sec"), project_id, wanted.name, wanted.kind, now, now, metadata=wanted.metadata or {}, **value.columns
    )
    return replace(plain, **sealed(keys, plain, value.fields))


def _add(connection: Connection, secret: Secret) -> None:
    """Add a secret, under the project's lock."""
    if secrets.count(connection, secret.project_id) >= SECRETS_MAX:
        raise LimitExceeded(
            f"A project may have {SECRETS_MAX} secrets. Delete one first.", code="secrets-max", limit=SECRETS_MAX
        )
    secrets.add(connection, secret)


def _earlier(connection: Connection, project_id: str, asked_once: Once | None, now: datetime) -> Shown | None:
    seen = once.seen(connection, asked_once, project_id, now)
    return None if seen is None else Shown(_owned(secrets.by_id(connection, seen.subject_id)))


def _shown(connection: Connection, found: list[Secret], now: datetime) -> list[Shown]:
    counts = grants.counts(connection, [secret.id for secret in found], now)
    return [Shown(secret, counts.get(secret.id, 0)) for secret in found]


def _owned(found: Secret | None) -> Secret:
    if found is None:
        raise NotFound("There is no such secret.")
    return found

"""Policies as their owners see them: named ones, a project's default, and a sandbox's own."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from space.control import attachments, once
from space.control.control import Control
from space.control.effective import Chosen, choose, choose_for_build
from space.control.once import Once
from space.control.registries import registries
from space.control.sandboxes import not_found as no_such_sandbox
from space.control.sandboxes import owned, wrong_state
from space.errors import Conflict, InvalidRequest, LimitExceeded, NotFound
from space.model.ids import is_id, new_id
from space.model.policy import PRESETS, parse_policy
from space.model.policy_fields import PolicyInvalid
from space.model.sandbox import Sandbox, State
from space.settings import Settings
from space.store import policies, projects, sandboxes
from space.store.paging import Position
from space.store.policies import Followed, NamedPolicy, Reference

POLICIES_MAX = 200
"""Of one project."""
DOCUMENT_BYTES_MAX = 128 * 1024


def check(
    settings: Settings, connection: Connection, project_id: str, reference: Reference, field: str = "policy"
) -> None:
    """Raise ``InvalidRequest`` unless that can be a policy of the project's: a document, a preset, or a named one."""
    if isinstance(reference, str) and reference not in PRESETS:
        if policies.get(connection, project_id, reference) is None:
            raise InvalidRequest(
                f"{field}: There is neither a policy nor a preset of that name. `space policy ls` lists the policies; "
                f"the presets are {', '.join(PRESETS)}.",
                code="unknown-policy",
                field=field,
            )
    elif reference is not None:
        check_document(settings, reference, field)


def check_document(settings: Settings, document: Mapping[str, Any] | str, field: str) -> None:
    """Raise ``InvalidRequest`` that says what of a document is wrong."""
    if len(json.dumps(document)) > DOCUMENT_BYTES_MAX:
        raise InvalidRequest(f"{field}: It may have at most {DOCUMENT_BYTES_MAX} bytes.", field=field)
    try:
        parse_policy(document, registries(settings))
    except PolicyInvalid as error:
        raise invalid(error, field) from None


def invalid(error: PolicyInvalid, field: str) -> InvalidRequest:
    """Return the caller's error for a document, with the place in it."""
    at = f"{field}.{error.field}" if error.field not in {"policy", "grant"} else field
    return InvalidRequest(f"{at}: {error.message}", field=at)


# --- named policies


async def request_policy(
    control: Control, project_id: str, name: str, document: dict[str, Any], asked_once: Once | None = None
) -> NamedPolicy:
    """Make a named policy. Raises ``Conflict`` when there is one, ``LimitExceeded`` when there are too many."""
    check_document(control.settings, document, "document")
    if name in PRESETS:
        raise InvalidRequest("name: That is the name of a preset.", field="name")
    now = control.now()
    made = NamedPolicy(new_id("pol"), project_id, name, document, now, now)

    def record(connection: Connection) -> NamedPolicy:
        projects.lock(connection, project_id)
        earlier = once.first(connection, asked_once, project_id, subject_id=made.id, now=now)
        if earlier is not None:
            return _owned(policies.by_id(connection, earlier.subject_id), project_id)
        if policies.count(connection, project_id) >= POLICIES_MAX:
            raise LimitExceeded(
                f"A project may have {POLICIES_MAX} policies. Delete one first.",
                code="policies-max",
                limit=POLICIES_MAX,
            )
        if not policies.add(connection, made):
            raise Conflict("There is a policy of that name.", code="name-taken", field="name")
        # What named it although it was not there denied everything; it may be there again.
        policies.changed(connection, _following(control, connection, project_id, name))
        return made

    added = await control.store.write(record)
    await attachments.confirm(control, await _followers(control, project_id, name))
    return added


async def get(control: Control, project_id: str, name: str) -> NamedPolicy:
    """Return one of the project's policies, or raise ``NotFound``."""
    return _owned(await control.store.read(lambda connection: policies.get(connection, project_id, name)), project_id)


async def page(control: Control, project_id: str, *, after: Position | None, limit: int) -> list[NamedPolicy]:
    return await control.store.read(lambda connection: policies.page(connection, project_id, after=after, limit=limit))


async def replace(control: Control, project_id: str, name: str, document: dict[str, Any]) -> NamedPolicy:
    """Give a policy another document; when this returns, it holds for every sandbox that follows the policy."""
    check_document(control.settings, document, "document")
    now = control.now()

    def record(connection: Connection) -> NamedPolicy:
        changed = _owned(policies.replace(connection, project_id, name, document, now), project_id)
        policies.changed(connection, _following(control, connection, project_id, name))
        return changed

    changed = await control.store.write(record)
    await attachments.confirm(control, await _followers(control, project_id, name))
    return changed


async def remove(control: Control, project_id: str, name: str) -> None:
    """Delete a policy that nobody follows. Raises ``NotFound``, or ``Conflict`` when somebody does."""

    def record(connection: Connection) -> None:
        projects.lock(connection, project_id)
        _owned(policies.get(connection, project_id, name), project_id)
        users = [one.id for one in policies.followers(connection, project_id) if name in _named(one)]
        is_default = policies.of_project(connection, project_id) == name
        if users or is_default:
            by = [f"{len(users)} of the sandboxes"] * bool(users) + ["the project as its default"] * is_default
            raise Conflict(
                f"The policy is followed by {' and by '.join(by)}: give them another first.",
                code="policy-in-use",
                sandboxes=users[:20],
            )
        policies.remove(connection, project_id, name)

    await control.store.write(record)


# --- a project's and a sandbox's


async def of_project(control: Control, project_id: str) -> tuple[Reference, Chosen]:
    """Return what a project has said, and what sandboxes have that nothing else is said of."""

    def look(connection: Connection) -> tuple[Reference, Chosen]:
        said = policies.of_project(connection, project_id)
        return said, choose_for_build(control.settings, connection, project_id, None)

    return await control.store.read(look)


async def set_of_project(control: Control, project_id: str, reference: Reference) -> tuple[Reference, Chosen]:
    """Give a project a default; None: the installation's. When this returns, it holds."""

    def record(connection: Connection) -> list[str]:
        projects.lock(connection, project_id)
        check(control.settings, connection, project_id, reference)
        policies.set_of_project(connection, project_id, reference)
        following = [
            one.id
            for one in policies.followers(connection, project_id)
            if choose(control.settings, connection, one).source in {"project", "installation"}
        ]
        policies.changed(connection, following)
        return following

    await attachments.confirm(control, await control.store.write(record))
    return await of_project(control, project_id)


async def of_sandbox(control: Control, project_id: str, sandbox_id: str) -> tuple[Sandbox, Chosen]:
    """Return one of the project's sandboxes and the policy that it has."""

    def look(connection: Connection) -> tuple[Sandbox, Chosen]:
        sandbox = owned(sandboxes.get(connection, sandbox_id), project_id)
        return sandbox, choose(control.settings, connection, _followed(connection, sandbox))

    if not is_id("sbx", sandbox_id):
        raise no_such_sandbox()
    return await control.store.read(look)


async def set_of_sandbox(
    control: Control, project_id: str, sandbox_id: str, reference: Reference
) -> tuple[Sandbox, Chosen]:
    """Give a sandbox a policy of its own; None: its template's or project's again. When this returns, it holds."""
    now = control.now()

    def record(connection: Connection) -> None:
        seen = owned(sandboxes.get(connection, sandbox_id, lock=True), project_id)
        check(control.settings, connection, project_id, reference)
        if seen.state == State.DELETING or sandboxes.change(connection, seen, policy=reference, updated_at=now) is None:
            raise wrong_state(seen, "changed")
        policies.changed(connection, [sandbox_id])

    if not is_id("sbx", sandbox_id):
        raise no_such_sandbox()
    await control.store.write(record)
    await attachments.confirm(control, [sandbox_id])
    return await of_sandbox(control, project_id, sandbox_id)


def _named(followed: Followed) -> set[str]:
    """Return the names of policies that a sandbox has, or would have if it were told nothing else."""
    said = (followed.own, followed.details.get("template_policy"))
    return {one for one in said if isinstance(one, str)}


def _following(control: Control, connection: Connection, project_id: str, name: str) -> list[str]:
    found = policies.followers(connection, project_id)
    return [one.id for one in found if choose(control.settings, connection, one).name == name]


async def _followers(control: Control, project_id: str, name: str) -> list[str]:
    return await control.store.read(lambda connection: _following(control, connection, project_id, name))


def _followed(connection: Connection, sandbox: Sandbox) -> Followed:
    found = policies.followed_by(connection, sandbox.id)
    if found is None:
        raise no_such_sandbox()
    return found


def _owned(found: NamedPolicy | None, project_id: str) -> NamedPolicy:
    if found is None or found.project_id != project_id:
        raise _not_found()
    return found


def _not_found() -> NotFound:
    return NotFound("There is no such policy.")

"""Projects and their API keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from space.control import once, quotas
from space.control.control import Control
from space.control.keys import new_key
from space.control.once import Once
from space.errors import Conflict, NotFound
from space.model.ids import is_id, new_id
from space.model.project import Key, Project, Role, Used
from space.store import keys, projects
from space.store.paging import Position

DEFAULT_PROJECT = "default"
BOOTSTRAP_KEY = "bootstrap"


@dataclass(frozen=True, slots=True)
class ShownKey:
    """A key's record and, only where it has just been made, the key itself."""

    key: Key
    secret: str | None


async def request_project(
    control: Control, admin: Key, name: str, asked_once: Once | None = None
) -> tuple[Project, ShownKey]:
    """Make a project and its first key, a member's. Raises ``Conflict`` when the name is taken."""
    now = control.now()
    project = Project(new_id("prj"), name, now, quotas.of_project(control.settings))
    key, secret = new_key(project.id, "first", Role.MEMBER, now)

    def record(connection: Connection) -> tuple[Project, ShownKey]:
        earlier = once.first(
            connection, asked_once, admin.project_id, subject_id=project.id, operation_id=key.id, now=now
        )
        if earlier is not None and earlier.operation_id is not None:
            made, first = projects.get(connection, earlier.subject_id), keys.get(connection, earlier.operation_id)
            if made is None or first is None:
                raise NotFound
            return made, ShownKey(first, None)
        if not projects.add(connection, project):
            raise Conflict("There is a project of that name.", code="name-taken", field="name")
        keys.add(connection, key)
        return project, ShownKey(key, secret)

    return await control.store.write(record)


async def get_project(control: Control, project_id: str) -> tuple[Project, Used]:
    """Return a project and what it takes now, or raise ``NotFound``."""

    def look(connection: Connection) -> tuple[Project, Used]:
        found = projects.get(connection, project_id) if is_id("prj", project_id) else None
        if found is None:
            raise NotFound("There is no such project.")
        return found, projects.used(connection, project_id)

    return await control.store.read(look)


async def page_projects(control: Control, *, after: Position | None, limit: int) -> list[tuple[Project, Used]]:
    """Return all projects, newest first, each with what it takes now."""

    def look(connection: Connection) -> list[tuple[Project, Used]]:
        found = projects.page(connection, after=after, limit=limit)
        return [(project, projects.used(connection, project.id)) for project in found]

    return await control.store.read(look)


async def change_quota(control: Control, project_id: str, changes: Mapping[str, float | None]) -> tuple[Project, Used]:
    """Change the named limits; None takes one away. One below what is used stops what comes, and ends nothing."""

    def record(connection: Connection) -> tuple[Project, Used]:
        found = projects.get(connection, project_id) if is_id("prj", project_id) else None
        if found is None:
            raise NotFound("There is no such project.")
        changed = replace(projects.lock(connection, project_id), **changes)
        projects.change_quota(connection, project_id, changed)
        return replace(found, quota=changed), projects.used(connection, project_id)

    return await control.store.write(record)


async def request_key(
    control: Control, project_id: str, name: str, role: Role, asked_once: Once | None = None
) -> ShownKey:
    """Make a key. It is shown in this answer and never again, also not when the request is repeated."""
    now = control.now()
    key, secret = new_key(project_id, name, role, now)

    def record(connection: Connection) -> ShownKey:
        earlier = once.first(connection, asked_once, project_id, subject_id=key.id, now=now)
        if earlier is None:
            keys.add(connection, key)
            return ShownKey(key, secret)
        made = keys.get(connection, earlier.subject_id)
        if made is None:
            raise NotFound
        return ShownKey(made, None)

    return await control.store.write(record)


async def page_keys(control: Control, project_id: str, *, after: Position | None, limit: int) -> list[Key]:
    """Return the project's keys that are in force."""
    return await control.store.read(lambda connection: keys.page(connection, project_id, after=after, limit=limit))


async def revoke_key(control: Control, project_id: str, key_id: str) -> None:
    """Revoke a key; it is refused from now on. Raises ``NotFound``."""

    def record(connection: Connection) -> bool:
        key = keys.get(connection, key_id)
        return key is not None and key.project_id == project_id and keys.revoke(connection, key, control.now())

    revoked = is_id("key", key_id) and await control.store.write(record)
    control.keyring.forget()
    if not revoked:
        raise NotFound("There is no such key.")


async def bootstrap(control: Control, keep: Callable[[str], None]) -> str | None:
    """Make the default project and its admin key once; the key, or None when that was done before.

    ``keep`` is given the key before it is in force: a crash in between leaves a key that opens nothing, never one that
    is lost. Its errors undo everything.
    """
    now = control.now()
    project = Project(new_id("prj"), DEFAULT_PROJECT, now, quotas.of_project(control.settings))
    key, secret = new_key(project.id, BOOTSTRAP_KEY, Role.ADMIN, now)

    def record(connection: Connection) -> str | None:
        if not projects.add(connection, project):
            return None
        keep(secret)
        keys.add(connection, key)
        return secret

    return await control.store.write(record)


async def replace_admin_key(control: Control, keep: Callable[[str], None]) -> str:
    """Make one more admin key of the default project, for an operator who has none any more."""
    now = control.now()

    def record(connection: Connection) -> str:
        project = projects.by_name(connection, DEFAULT_PROJECT)
        if project is None:
            raise NotFound("There is no default project.")
        key, secret = new_key(project.id, BOOTSTRAP_KEY, Role.ADMIN, now)
        keep(secret)
        keys.add(connection, key)
        return secret

    return await control.store.write(record)

"""Projects and their API keys."""

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection

from space.control import once
from space.control.control import Control
from space.control.keys import new_key
from space.control.once import Once
from space.errors import Conflict, NotFound
from space.model.ids import is_id, new_id
from space.model.project import Key, Project, Role
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
    project = Project(new_id("prj"), name, now)
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


async def get_project(control: Control, project_id: str) -> Project:
    found = await control.store.read(lambda connection: projects.get(connection, project_id))
    if found is None:
        raise NotFound
    return found


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
    project = Project(new_id("prj"), DEFAULT_PROJECT, now)
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

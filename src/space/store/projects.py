"""Rows of projects, and what each takes of the host."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Table,
    case,
    cast,
    func,
    not_,
    select,
    true,
    update,
)

from space.model.build import OPEN
from space.model.project import Project, Quota, Used
from space.model.sandbox import State
from space.store.dialect import insert_new
from space.store.paging import Position, newest_first
from space.store.sandboxes import NEVER_RAN
from space.store.tables import builds, projects, releases, sandboxes, snapshots, volumes

MIB = 1024 * 1024
# Without a machine, a sandbox takes its disk and nothing else.
_AT_REST = (State.SUSPENDED, State.STOPPED, State.FAILED)
_QUOTA = (
    projects.c.quota_sandboxes,
    projects.c.quota_cpus,
    projects.c.quota_memory_mib,
    projects.c.quota_disk_mib,
)
_COLUMNS: list[Column[Any]] = [projects.c.id, projects.c.name, projects.c.created_at, *_QUOTA]


def add(connection: Connection, project: Project) -> bool:
    """Add a project; False when the name is taken."""
    row = {"id": project.id, "name": project.name, "created_at": project.created_at, "last_event": 0}
    return insert_new(connection, projects, **row, **_quota_columns(project.quota))


def get(connection: Connection, project_id: str) -> Project | None:
    row = connection.execute(_QUERY.where(projects.c.id == project_id)).one_or_none()
    return None if row is None else _project(row)


def by_name(connection: Connection, name: str) -> Project | None:
    row = connection.execute(_QUERY.where(projects.c.name == name)).one_or_none()
    return None if row is None else _project(row)


def page(connection: Connection, *, after: Position | None, limit: int) -> list[Project]:
    """Return all projects, newest first."""
    return [_project(row) for row in connection.execute(newest_first(_QUERY, projects, after, limit))]


def lock(connection: Connection, project_id: str) -> Quota:
    """Return a project's quota; until this transaction ends nobody else counts against it or changes it.

    Not the strongest lock: rows that refer to the project can be added meanwhile, or creates would block each other.
    """
    row = connection.execute(_LOCKED.where(projects.c.id == project_id)).one()
    return Quota(*row)


def change_quota(connection: Connection, project_id: str, quota: Quota) -> None:
    connection.execute(update(projects).where(projects.c.id == project_id).values(_quota_columns(quota)))


def used(connection: Connection, project_id: str) -> Used:
    """Count what a project's sandboxes, builds, snapshots, templates and volumes take, as of this transaction."""
    present = (sandboxes.c.project_id == project_id, sandboxes.c.state != State.DELETED, not_(NEVER_RAN))
    building = (builds.c.project_id == project_id, builds.c.state.in_(sorted(OPEN)))
    counted = [
        connection.execute(select(*_taken(sandboxes, sandboxes.c.state.not_in(_AT_REST))).where(*present)).one(),
        connection.execute(select(*_taken(builds, true())).where(*building)).one(),
    ]
    count, cpus, memory_mib, disk_mib = (sum(column) for column in zip(*counted, strict=True))
    own = (snapshots.c.project_id == project_id, snapshots.c.dropped.is_(False), snapshots.c.hidden.is_(False))
    released = (releases.c.project_id == project_id, releases.c.deleted_at.is_(None))
    kept_bytes = _bytes(connection, snapshots, *own) + _bytes(connection, releases, *released)
    size = select(func.coalesce(func.sum(volumes.c.size_mib), 0)).where(volumes.c.project_id == project_id)
    disk_mib += int(connection.execute(size).scalar_one())
    return Used(int(count), float(cpus), int(memory_mib), int(disk_mib) + -(-kept_bytes // MIB))


def _taken(table: Table, has_machine: ColumnElement[bool]) -> list[ColumnElement[Any]]:
    """Count rows, and add up what their machines and disks take."""
    resources = table.c.resources
    return [
        func.count(),
        func.coalesce(func.sum(case((has_machine, resources["cpus"].as_float()), else_=0.0)), 0.0),
        func.coalesce(func.sum(case((has_machine, resources["memory_mib"].as_integer()), else_=0)), 0),
        func.coalesce(func.sum(resources["disk_mib"].as_integer()), 0),
    ]


def _bytes(connection: Connection, table: Table, *of: ColumnElement[bool]) -> int:
    total = cast(func.coalesce(func.sum(table.c.bytes), 0), BigInteger)
    return int(connection.execute(select(total).where(*of)).scalar_one())


def _quota_columns(quota: Quota) -> dict[str, float | None]:
    return {f"quota_{name}": value for name, value in asdict(quota).items()}


def _project(row: Sequence[Any]) -> Project:
    project_id, name, created_at, *quota = row
    return Project(project_id, name, created_at, Quota(*quota))


_QUERY = select(*_COLUMNS)
_LOCKED = select(*_QUOTA).with_for_update(key_share=True)

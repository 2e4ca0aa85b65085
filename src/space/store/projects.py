"""Rows of projects."""

from sqlalchemy import Connection, select

from space.model.project import Project
from space.store.dialect import insert_new
from space.store.tables import projects


def add(connection: Connection, project: Project) -> bool:
    """Add a project; False when the name is taken."""
    return insert_new(
        connection, projects, id=project.id, name=project.name, created_at=project.created_at, last_event=0
    )


def get(connection: Connection, project_id: str) -> Project | None:
    row = connection.execute(_QUERY.where(projects.c.id == project_id)).one_or_none()
    return None if row is None else Project(*row)


def by_name(connection: Connection, name: str) -> Project | None:
    row = connection.execute(_QUERY.where(projects.c.name == name)).one_or_none()
    return None if row is None else Project(*row)


_QUERY = select(projects.c.id, projects.c.name, projects.c.created_at)

"""HTTP for projects and API keys."""

from fastapi import Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import IdempotencyKey, control_of, key_out, once, reply, shown_key_out
from space.api.bodies import KeyCreate, ProjectChange, ProjectCreate
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.api.schemas import KeyPage, ProjectCreated, ProjectOut, ProjectPage, QuotaOut, UsedOut
from space.control import projects
from space.errors import Forbidden
from space.model.project import Project, Role, Used


async def create_project(request: Request, body: ProjectCreate, idempotency_key: IdempotencyKey = None) -> Response:
    """Make a project and its first key."""
    asked_once = await once(request, idempotency_key)
    project, shown = await projects.request_project(control_of(request), caller(request), body.name, asked_once)
    made = ProjectCreated(**_project_out(project, Used()).model_dump(), key=shown.secret)
    return reply(made, 201)


async def own_project(request: Request) -> Response:
    """The project of the key that asks, with its quota and what it uses."""
    return reply(_project_out(*await projects.get_project(control_of(request), caller(request).project_id)))


async def page_projects(request: Request, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None) -> Response:
    """List all projects, newest first."""
    found = await projects.page_projects(control_of(request), after=position(cursor), limit=limit)
    following = next_cursor([project for project, _ in found], limit)
    return reply(ProjectPage(items=[_project_out(*each) for each in found], next_cursor=following))


async def get_project(request: Request, project_id: str) -> Response:
    """One project, with its quota and what it uses."""
    return reply(_project_out(*await projects.get_project(control_of(request), project_id)))


async def change_project(request: Request, project_id: str, body: ProjectChange) -> Response:
    """Change the limits that are named. What is used already stays."""
    changes = body.quota.model_dump(exclude_unset=True)
    return reply(_project_out(*await projects.change_quota(control_of(request), project_id, changes)))


async def create_key(request: Request, body: KeyCreate, idempotency_key: IdempotencyKey = None) -> Response:
    """Make a key of the caller's project. It is shown in this answer only."""
    key = caller(request)
    if body.role is Role.ADMIN and key.role is not Role.ADMIN:
        raise Forbidden("Only an admin's key can make an admin's key.")
    asked_once = await once(request, idempotency_key)
    shown = await projects.request_key(control_of(request), key.project_id, body.name, body.role, asked_once)
    return reply(shown_key_out(shown), 201)


async def page_keys(request: Request, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None) -> Response:
    """List the project's keys that are in force, newest first."""
    found = await projects.page_keys(
        control_of(request), caller(request).project_id, after=position(cursor), limit=limit
    )
    return reply(KeyPage(items=[key_out(key) for key in found], next_cursor=next_cursor(found, limit)))


async def revoke_key(request: Request, key_id: str) -> Response:
    """Revoke a key at once."""
    await projects.revoke_key(control_of(request), caller(request).project_id, key_id)
    return Response(status_code=204)


def _project_out(project: Project, used: Used) -> ProjectOut:
    return ProjectOut(
        id=project.id,
        name=project.name,
        created_at=project.created_at,
        quota=QuotaOut.model_validate(project.quota),
        used=UsedOut.model_validate(used),
    )

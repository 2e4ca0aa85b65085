"""HTTP for templates: look, tag, delete, prepare, and what came from where."""

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import control_of, reply
from space.api.build_bodies import TagMove, Warm
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, names, number, render
from space.api.template_schemas import (
    AuditedOut,
    AuditOut,
    HistoryPage,
    TagMoveOut,
    TemplatePage,
    WarmOut,
    template_detail,
    template_out,
)
from space.control import catalog, dropping

WARM_S = 300.0
Name = Annotated[str | None, Query(max_length=64, description="Only of this name.")]


async def page(
    request: Request,
    name: Name = None,
    untagged: Annotated[
        bool, Query(description="Those of the project instead that no tag points to, by digest.")
    ] = False,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Response:
    """List the project's templates, and those that the installation brings along, by name and tag."""
    control, project_id, after = control_of(request), caller(request).project_id, names(cursor)
    if untagged:
        behind = None if after is None else after[0]
        found = await catalog.page_untagged(control, project_id, after=behind, limit=limit)
    else:
        found = await catalog.page(control, project_id, name=name, after=after, limit=limit)
    following = render([found[-1].name or found[-1].digest, found[-1].tag or ""]) if len(found) == limit else None
    return reply(TemplatePage(items=[template_out(shown) for shown in found], next_cursor=following))


async def get(request: Request, template: str) -> Response:
    """One template with its lineage and packages, by `name`, `name:tag` or `sha256:…`; a deleted release for a day."""
    return reply(template_detail(await catalog.get(control_of(request), caller(request).project_id, template)))


async def delete(request: Request, template: str) -> Response:
    """Delete a release. By digest with all its tags; by name the tag, and the release when that was its last one.

    Nothing begins from it any more. Sandboxes and snapshots that did live on, and what it takes of the disk is freed
    after the last of them.
    """
    deleted = await dropping.delete(control_of(request), caller(request).project_id, template)
    return reply(template_detail(deleted))


async def move_tag(request: Request, name: str, tag: str, body: TagMove) -> Response:
    """Let a tag point to a release, made if it is not there; for everybody who looks from this answer on."""
    moved = await catalog.move_tag(control_of(request), caller(request).project_id, name, tag, body.digest)
    return reply(template_detail(moved))


async def remove_tag(request: Request, name: str, tag: str) -> Response:
    """Take a tag away. What it pointed to can be had by its digest."""
    await catalog.remove_tag(control_of(request), caller(request).project_id, name, tag)
    return Response(status_code=204)


async def history(request: Request, name: str, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None) -> Response:
    """What became of a name's tags, newest first."""
    found = await catalog.history(
        control_of(request), caller(request).project_id, name, before=number(cursor), limit=limit
    )
    following = render([found[-1].number]) if len(found) == limit else None
    return reply(HistoryPage(items=[TagMoveOut.model_validate(move) for move in found], next_cursor=following))


async def warm(request: Request, template: str, body: Warm) -> Response:
    """Prepare a template on the host, so that the first sandbox starts as fast as any; answers when that is done."""
    made = await catalog.warm(
        control_of(request), caller(request).project_id, template, memory_mib=body.memory_mib, timeout_s=WARM_S
    )
    return reply(WarmOut.model_validate(made))


async def audit(request: Request) -> Response:
    """The images that each release came from, beside the registries that the installation trusts now."""
    control = control_of(request)
    found = await catalog.audit(control, caller(request).project_id)
    trusted = control.settings.trusted_template_registries
    items = [AuditedOut.model_validate(audited) for audited in found]
    return reply(AuditOut(trusted=None if trusted is None else list(trusted), items=items))

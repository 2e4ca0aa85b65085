"""HTTP for templates: look only; they come from the node."""

from fastapi import Request
from fastapi.responses import Response

from space.api.answers import control_of, reply
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, names, render
from space.api.schemas import TemplateOut, TemplatePage
from space.control import templates


async def page(request: Request, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None) -> Response:
    """List templates by name and tag."""
    found = await templates.page(control_of(request), after=names(cursor), limit=limit)
    behind = render([found[-1].name, found[-1].tag]) if len(found) == limit else None
    return reply(TemplatePage(items=[TemplateOut.model_validate(t) for t in found], next_cursor=behind))


async def get(request: Request, template: str) -> Response:
    """One template, by `name`, `name:tag` or `sha256:…`."""
    return reply(TemplateOut.model_validate(await templates.get(control_of(request), template)))

"""Templates, as the node has them. The store keeps a copy so that names resolve while the node restarts."""

import time
from typing import Any

from space.control.control import Control
from space.errors import HostError, InvalidRequest, NotFound, SpaceError
from space.model.template import Reference, Template, parse_reference
from space.store import templates

# How long a name's digest is remembered: the list itself is the node's of up to half a minute ago.
REMEMBER_S = 5.0


async def synchronise(control: Control) -> None:
    """Make the store's list of templates the node's."""
    now = control.now()
    present = [_template(item, now) for item in await control.node.templates()]
    await control.store.write(lambda connection: templates.replace(connection, present))
    control.templates.clear()


async def resolve(control: Control, text: str) -> Template:
    """Return what ``text`` (``name``, ``name:tag`` or ``sha256:…``) points to now, or raise ``InvalidRequest``."""
    reference = parse_reference(text)
    found = None if reference is None else await _find(control, reference)
    if found is None:
        raise InvalidRequest(
            "There is no such template. `GET /v1/templates` lists those there are.",
            code="unknown-template",
            field="template",
        )
    return found


async def get(control: Control, text: str) -> Template:
    """As ``resolve``, but raise ``NotFound``."""
    reference = parse_reference(text)
    found = None if reference is None else await _find(control, reference)
    if found is None:
        raise NotFound("There is no such template.")
    return found


async def page(control: Control, *, after: tuple[str, str] | None, limit: int) -> list[Template]:
    return await control.store.read(lambda connection: templates.page(connection, after=after, limit=limit))


async def _find(control: Control, reference: Reference) -> Template | None:
    known = control.templates.get(reference)
    if known is not None and known[1] > time.monotonic():
        return known[0]
    found = await control.store.read(lambda connection: templates.find(connection, reference))
    if found is not None:
        control.templates[reference] = (found, time.monotonic() + REMEMBER_S)
        return found
    # It may have been built a moment ago.
    try:
        await control.looking_for_templates.join(lambda: synchronise(control))
    except SpaceError:
        return None
    return await control.store.read(lambda connection: templates.find(connection, reference))


def _template(item: dict[str, Any], now: Any) -> Template:
    try:
        return Template(
            name=str(item["name"]),
            tag=str(item["tag"]),
            digest=str(item["digest"]),
            seen_at=now,
            defaults=dict(item.get("defaults") or {}),
            driver=item.get("driver"),
            bytes=int(item.get("bytes") or 0),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise HostError("The node's list of templates is malformed.", code="node-protocol") from error

"""What the name of a template means: one's own releases first, then what the installation brings along.

The store keeps a copy of the latter, as the node has them, so that names resolve while the node restarts.
"""

import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from space.control.control import Control
from space.errors import HostError, InvalidRequest, NotFound, SpaceError
from space.model.template import Reference, Resolved, Template, parse_reference
from space.store import releases, tags, templates

# How long a name's digest is remembered: the list of what comes along is the node's of up to half a minute ago, and a
# tag that another process moves counts this much later. One that this process moves counts at once.
REMEMBER_S = 5.0
REMEMBERED_MAX = 10_000
MADE_BY = {"code-interpreter-v1": "scripts/interpreter-template --import"}
"""Names that SPACE has a recipe for, and what makes them on its host: they are large, so set-up leaves them out."""


async def synchronise(control: Control) -> None:
    """Make the store's list of what the installation brings along the node's."""
    now = control.now()
    present = [_template(item, now) for item in await control.node.templates() if item.get("name") is not None]
    await control.store.write(lambda connection: templates.replace(connection, present))
    control.templates.clear()


async def resolve(control: Control, project_id: str, text: str) -> Resolved:
    """Return what ``text`` (``name``, ``name:tag`` or ``sha256:…``) means to a project now; else ``InvalidRequest``."""
    reference = parse_reference(text)
    found = None if reference is None else await find(control, project_id, reference)
    if found is None:
        raise unknown(reference)
    return found


async def find(control: Control, project_id: str, reference: Reference) -> Resolved | None:
    """Return what a reference means to a project now; None when it means nothing."""
    known = control.templates.get((project_id, reference))
    if known is not None and known[1] > time.monotonic():
        return known[0]
    found = await control.store.read(lambda connection: look_up(connection, project_id, reference))
    if found is not None:
        if len(control.templates) >= REMEMBERED_MAX:
            control.templates.clear()
        control.templates[project_id, reference] = (found, time.monotonic() + REMEMBER_S)
        return found
    # It may have been imported a moment ago.
    try:
        await control.looking_for_templates.join(lambda: synchronise(control))
    except SpaceError:
        return None
    return await control.store.read(lambda connection: look_up(connection, project_id, reference))


def look_up(connection: Connection, project_id: str, reference: Reference) -> Resolved | None:
    """As ``find``, in a transaction."""
    digest = reference.digest
    if reference.name is not None and reference.tag is not None:
        tag = tags.get(connection, project_id, reference.name, reference.tag)
        digest = None if tag is None else tag.digest
    own = None if digest is None else releases.get(connection, project_id, digest)
    if own is not None and own.deleted_at is None:
        return Resolved(own.digest, own.defaults, None, own=True)
    builtin = templates.find(connection, reference)
    return None if builtin is None else Resolved(builtin.digest, builtin.defaults, builtin.driver, own=False)


def usable(connection: Connection, project_id: str, found: Resolved) -> None:
    """Raise ``InvalidRequest`` when a template has been deleted since it was found.

    Call it under the project's lock: it cannot be dropped any more once what begins from it is there.
    """
    if found.own:
        release = releases.get(connection, project_id, found.digest)
        if release is None or release.deleted_at is not None:
            raise unknown()


def without_policy(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template's defaults as the node knows them: what may leave its sandboxes is not the node's."""
    return {name: value for name, value in defaults.items() if name != "policy"}


def forget(control: Control) -> None:
    """Let the next look be at the store: a tag was moved, or a release deleted."""
    control.templates.clear()


def unknown(reference: Reference | None = None) -> InvalidRequest | NotFound:
    """Return the error for a template that is not there; what was asked for is named where it can be one's name, and
    what would make it where that is one command.
    """
    if reference is not None and (command := MADE_BY.get(reference.name or "")) is not None:
        return NotFound(
            f"The template {reference.name} has not been made on this host: `sudo {command}`, in the directory that "
            "SPACE was set up from, makes it, once for everybody.",
            code="template-not-made",
            command=command,
        )
    what = "such template"
    if reference is not None:
        what = "template of that digest" if reference.name is None else f"template {reference.name}:{reference.tag}"
    return InvalidRequest(
        f"There is no {what}. `space template ls`, or `GET /v1/templates`, lists those there are.",
        code="unknown-template",
        field="template",
    )


def not_found() -> NotFound:
    return NotFound("There is no such template.")


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

"""What the host keeps of templates and builds that nobody needs any more, and its going.

A template's bytes are the host's, not a project's: they go when no release, sandbox, snapshot or build of anybody needs
them. The node's list is read first and the store after it, as a template is at the node before it is released.
"""

import contextlib
from datetime import timedelta

import structlog
from sqlalchemy import Connection

from space.control import catalog, templates
from space.control.catalog import Shown
from space.control.control import Control
from space.errors import Conflict, NotFound, SpaceError
from space.model.template import is_digest
from space.store import builds, drops, projects, releases, tags

log = structlog.get_logger(__name__)

DROP_TIMEOUT_S = 150
AT_ONCE = 50
BUILDS_KEPT = timedelta(days=7)
BUILDS_MAX = 500
"""Of one project, those that have ended."""
STRAYS_KEPT = timedelta(minutes=10)
TEMPLATE, RELEASE = "template", "release-row"


async def delete(control: Control, project_id: str, text: str) -> Shown:
    """Delete a release, or a tag (see ``catalog.delete``), and drop the bytes if nobody needs them any more."""
    deleted = await catalog.delete(control, project_id, text)
    if deleted.deleted_at is not None:
        await _drop(control, deleted.digest)
    return deleted


async def drop_unneeded(control: Control) -> None:
    """Have the node drop the templates that nobody needs; what is still in use there comes again.

    What no project is known to have released has time: it may be somebody's who works on the host itself.
    """
    unneeded, now = await _unneeded(control), control.now()
    known = await control.store.read(lambda connection: releases.known(connection, unneeded))
    for needed in control.strays_since.keys() - {*unneeded}:
        del control.strays_since[needed]
    for digest in unneeded:
        if digest in known or now - control.strays_since.setdefault(digest, now) >= STRAYS_KEPT:
            await _drop(control, digest)


async def compare(control: Control, *, dry_run: bool = False) -> list[tuple[str, str]]:
    """Drop what nobody needs, and delete releases whose bytes the host has lost; return both.

    Only on demand: a tag that leads nowhere is for its operator to see before it is gone.
    """
    unneeded = await _unneeded(control)
    found = [(TEMPLATE, digest) for digest in unneeded if dry_run or await _drop(control, digest)]
    released = await control.store.read(releases.digests)
    # A host that lists nothing at all has lost more than a template: that proves nothing.
    there = {str(item.get("digest")) for item in await control.node.templates()}
    for lost in sorted(released - there) if there else []:
        found.append((RELEASE, lost))
        if not dry_run:
            log.warning("template-lost", template=lost)
            await _note_lost(control, lost)
    return found


async def delete_untagged(control: Control, older_s: float, *, dry_run: bool = False) -> list[tuple[str, str]]:
    """Delete the releases that no tag has pointed to for so long, and nothing of their project is made from."""
    before = control.now() - timedelta(seconds=older_s)
    found = await control.store.read(lambda connection: releases.untagged_since(connection, before, AT_ONCE))
    for project_id, digest in found:
        if not dry_run:
            with contextlib.suppress(NotFound):
                await catalog.delete(control, project_id, digest)
    return [("untagged-release", digest) for _, digest in found]


async def forget_builds(control: Control) -> None:
    """Have the node forget the builds that are old or too many, and give up those that are over for us."""
    before = control.now() - BUILDS_KEPT
    for build_id in await control.store.read(lambda connection: builds.abandoned(connection, AT_ONCE)):
        if await _forget(control, build_id):
            await control.store.write(lambda connection, one=build_id: builds.note_ended(connection, one))
    old = await control.store.read(lambda connection: builds.old(connection, before, BUILDS_MAX, AT_ONCE))
    for build_id in old:
        if await _forget(control, build_id):
            await control.store.write(lambda connection, one=build_id: builds.remove(connection, one))


async def _unneeded(control: Control) -> list[str]:
    listed = await control.node.templates()
    nameless = {str(item.get("digest")) for item in listed if item.get("name") is None}
    there = {digest for digest in nameless if is_digest(digest)}
    return await control.store.read(lambda connection: drops.unneeded(connection, there))


async def _drop(control: Control, digest: str) -> bool:
    began = control.now()
    if not await control.store.write(lambda connection: drops.begin(connection, digest, began)):
        return False
    try:
        await control.node.drop_template(digest, DROP_TIMEOUT_S)
    except Conflict as error:
        log.info("template-not-dropped", template=digest, code=error.code)
        return False
    except SpaceError as error:
        log.warning("template-not-dropped", template=digest, code=error.code)
        return False
    else:
        log.info("template-dropped", template=digest)
        return True
    finally:
        ended = control.now()
        await control.store.write(lambda connection: drops.end(connection, digest, ended))


async def _forget(control: Control, build_id: str) -> bool:
    try:
        with contextlib.suppress(NotFound):
            await control.node.cancel_build(build_id)
        await control.node.forget_build(build_id)
    except SpaceError as error:
        log.warning("build-not-forgotten", build=build_id, code=error.code)
        return False
    return True


async def _note_lost(control: Control, digest: str) -> None:
    now = control.now()

    def record(connection: Connection) -> None:
        for project_id in sorted(releases.owners(connection, digest)):
            projects.lock(connection, project_id)
            for tag in tags.of_project(connection, project_id, digest):
                tags.remove(connection, tag, now)
            releases.remove(connection, project_id, digest, now)

    await control.store.write(record)
    templates.forget(control)

"""Builds that are asked for in two requests, as E2B's clients do: first by name, then with what is to be built."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection

from space.control import catalog
from space.control.control import Control
from space.errors import LimitExceeded, NotFound
from space.model.build import AskedBuild
from space.model.ids import is_id, new_id
from space.store import asked_builds, projects

KEPT = timedelta(days=8)
"""Longer than builds that have ended are."""
ASKED_MAX = 1000
"""Of one project."""


async def ask(
    control: Control, project_id: str, name: str, tags: Sequence[str], resources: Mapping[str, Any]
) -> AskedBuild:
    """Promise a build of that name and tags an id. Raises ``InvalidRequest``, ``Conflict`` or ``LimitExceeded``."""
    for tag in tags:
        catalog.check_reference(name, tag)
    now = control.now()
    asked = AskedBuild(new_id("bld"), project_id, name, list(tags), now, dict(resources))

    def record(connection: Connection) -> None:
        projects.lock(connection, project_id)
        catalog.check_name(connection, name)
        asked_builds.forget(connection, now - KEPT)
        if asked_builds.count(connection, project_id) >= ASKED_MAX:
            raise LimitExceeded(
                f"A project may ask for {ASKED_MAX} builds in {KEPT.days} days.", code="builds-max", limit=ASKED_MAX
            )
        asked_builds.add(connection, asked)

    await control.store.write(record)
    return asked


async def get(control: Control, project_id: str, build_id: str) -> AskedBuild:
    """Return what the project has asked for under that id, or raise ``NotFound``."""
    found = None
    if is_id("bld", build_id):
        found = await control.store.read(lambda connection: asked_builds.get(connection, build_id))
    if found is None or found.project_id != project_id:
        raise NotFound("There is no such build.")
    return found


async def note_numbers(control: Control, build_id: str, numbers: list[int]) -> None:
    """Remember what number each step of the build has with who asked for it."""
    await control.store.write(lambda connection: asked_builds.note_numbers(connection, build_id, numbers))


async def has_name(control: Control, project_id: str, name: str) -> bool:
    """Whether the project has asked for a build of that name."""
    return await control.store.read(lambda connection: asked_builds.has_name(connection, project_id, name))

"""What the store promises of volumes and of who mounts them, on each database it can be kept in."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from space.errors import HostError
from space.model.ids import new_id
from space.model.project import Project
from space.model.sandbox import State
from space.model.volume import Mount, Volume, VolumeState
from space.store import projects, sandboxes, volumes
from space.store.database import Database
from tests.stores import NOW, sandbox_of


def volume_of(project: Project, name: str = "data", age_s: float = 0, **values: Any) -> Volume:
    at = NOW - timedelta(seconds=age_s)
    return replace(Volume(new_id("vol"), project.id, name, 64, VolumeState.READY, at, at), **values)


async def add(store: Database, *made: Volume) -> None:
    for one in made:
        await store.write(lambda c, volume=one: volumes.add(c, volume))


async def test_a_volume_comes_back_as_it_was_stored_and_its_name_is_taken_once(
    store: Database, project: Project
) -> None:
    made = volume_of(project)
    await add(store, made)
    assert await store.read(lambda c: volumes.get(c, made.id)) == made
    assert await store.read(lambda c: volumes.by_name(c, project.id, "data")) == made
    with pytest.raises(HostError):
        await add(store, volume_of(project))


async def test_only_ready_ones_are_listed_newest_first_and_all_are_counted(store: Database, project: Project) -> None:
    new, old = volume_of(project, "new"), volume_of(project, "old", 60)
    await add(store, old, new, volume_of(project, "half", state=VolumeState.CREATING))
    listed = await store.read(lambda c: volumes.page(c, project.id, after=None, limit=10))
    assert listed == [new, old]
    assert await store.read(lambda c: volumes.count(c, project.id)) == 3
    assert (await store.read(lambda c: projects.used(c, project.id))).disk_mib == 3 * 64


async def test_a_state_changes_only_from_the_one_that_was_seen(store: Database, project: Project) -> None:
    made = volume_of(project, state=VolumeState.CREATING)
    await add(store, made)
    assert await store.write(lambda c: volumes.move(c, made, VolumeState.READY, NOW))
    assert not await store.write(lambda c: volumes.move(c, made, VolumeState.DELETING, NOW))


async def test_what_is_to_go_is_what_is_deleted_and_what_was_given_up(store: Database, project: Project) -> None:
    deleted = volume_of(project, "deleted", state=VolumeState.DELETING)
    abandoned = volume_of(project, "abandoned", 600, state=VolumeState.CREATING)
    await add(store, deleted, abandoned, volume_of(project, "making", state=VolumeState.CREATING), volume_of(project))
    found = await store.read(lambda c: volumes.unfinished(c, NOW - timedelta(seconds=300), 10))
    assert {one.name for one in found} == {"deleted", "abandoned"}


async def test_who_mounts_a_volume_is_known_until_the_sandbox_is_deleted(store: Database, project: Project) -> None:
    made, unused = volume_of(project), volume_of(project, "unused")
    await add(store, made, unused)
    users = [sandbox_of(project, created_at=NOW - timedelta(seconds=age), state=State.STOPPED) for age in (20, 10)]
    for user in users:
        await store.write(lambda c, one=user: sandboxes.add(c, one))
        mounts = [Mount(made.id, "/a"), Mount(made.id, "/b")]
        await store.write(lambda c, one=user, wanted=mounts: volumes.mount(c, one.id, wanted))
    assert [one.id for one in await store.read(lambda c: volumes.users(c, made.id))] == [one.id for one in users]
    both = [made.id, unused.id]
    assert await store.read(lambda c: volumes.count_users(c, both)) == {made.id: 2}
    await store.write(lambda c: sandboxes.move(c, users[0], state=State.DELETED, updated_at=NOW))
    assert [one.id for one in await store.read(lambda c: volumes.users(c, made.id))] == [users[1].id]
    assert await store.read(lambda c: volumes.count_users(c, both)) == {made.id: 1}
    await store.write(lambda c: sandboxes.sweep(c, NOW + timedelta(days=1)))
    await store.write(lambda c: volumes.remove(c, made.id))
    assert await store.read(volumes.ids) == {unused.id}

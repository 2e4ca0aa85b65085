"""What the store promises of releases, tags, builds, uploads, and of what may be dropped, on each database."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection

from space.model.build import Build, BuildState
from space.model.ids import new_id
from space.model.project import Project, Used
from space.model.sandbox import Failure, Resources, State
from space.model.snapshot import SnapshotState
from space.model.template import Release, Tag, Template
from space.model.upload import Upload
from space.store import builds, drops, projects, releases, sandboxes, snapshots, tags, templates, uploads
from space.store.database import Database
from space.store.paging import Position
from tests.contract.test_store_snapshots import snapshot_of
from tests.stores import NOW, sandbox_of

ONE, TWO, THREE = ("sha256:" + letter * 64 for letter in "abc")
SECOND, DAY = timedelta(seconds=1), timedelta(days=1)


@pytest.fixture
async def other(store: Database) -> Project:
    made = Project(new_id("prj"), "other", NOW)
    await store.write(lambda c: projects.add(c, made))
    return made


def release_of(project: Project, digest: str = ONE, **values: Any) -> Release:
    return replace(Release(project.id, digest, NOW, bytes=1000, source={"kind": "image"}), **values)


def build_of(project: Project, **values: Any) -> Build:
    plain = Build(
        id=new_id("bld"),
        project_id=project.id,
        name="tool",
        tag="latest",
        state=BuildState.PENDING,
        resources=Resources(disk_mib=8192),
        timeout_s=60.0,
        created_at=NOW,
        updated_at=NOW,
    )
    return replace(plain, **values)


async def keep(store: Database, *stored: Release) -> None:
    def record(connection: Connection) -> None:
        for release in stored:
            releases.keep(connection, release)

    await store.write(record)


async def add(store: Database, *stored: Build) -> None:
    def record(connection: Connection) -> None:
        for build in stored:
            builds.add(connection, build)

    await store.write(record)


async def point(store: Database, project: Project, tag: str, digest: str, after: int = 0) -> Tag | None:
    """Move ``tool:<tag>``, so many seconds after the beginning."""
    to = Tag(project.id, "tool", tag, digest, NOW + after * SECOND)
    return await store.write(lambda c: tags.move(c, to))


# Releases and tags


async def test_a_release_comes_back_as_it_was_stored_and_says_where_it_came_from_last(
    store: Database, project: Project
) -> None:
    stored = release_of(
        project,
        defaults={"env": {"A": "é"}, "ports": [80]},
        bytes=1 << 40,
        base={"ref": "x", "digest": TWO},
        lineage={"bases": [{"ref": "x", "digest": TWO}]},
        packages=[{"name": "p", "version": "1"}],
        build_id=new_id("bld"),
        untagged_at=NOW,
    )
    await keep(store, stored)
    assert await store.read(lambda c: releases.get(c, project.id, ONE)) == stored
    again = replace(stored, source={"kind": "rootfs"}, base=None, lineage={}, packages=None, build_id=new_id("bld"))
    await keep(store, replace(again, bytes=5, created_at=NOW + DAY, untagged_at=None))
    assert await store.read(lambda c: releases.get(c, project.id, ONE)) == again
    assert await store.read(lambda c: releases.get(c, project.id, TWO)) is None


async def test_a_digest_is_a_record_of_each_project_that_has_released_it(
    store: Database, project: Project, other: Project
) -> None:
    await keep(store, release_of(project), release_of(other, source={"kind": "rootfs"}))
    assert sorted(await store.read(lambda c: releases.owners(c, ONE))) == sorted([project.id, other.id])
    await store.write(lambda c: releases.remove(c, project.id, ONE, NOW))
    assert await store.read(lambda c: releases.owners(c, ONE)) == [other.id]
    gone = await store.read(lambda c: releases.get(c, project.id, ONE))
    assert gone is not None
    assert gone.deleted_at == NOW
    assert await store.read(releases.digests) == {ONE}
    assert await store.read(lambda c: releases.known(c, [ONE, TWO])) == {ONE}
    assert await store.read(lambda c: releases.count(c, project.id)) == 0


async def test_what_was_deleted_is_there_again_when_it_is_published_again(store: Database, project: Project) -> None:
    await keep(store, release_of(project))
    await store.write(lambda c: releases.remove(c, project.id, ONE, NOW))
    again = release_of(project, source={"kind": "dockerfile"}, created_at=NOW + DAY)
    await keep(store, again)
    assert await store.read(lambda c: releases.get(c, project.id, ONE)) == again


async def test_a_tag_moves_and_each_move_is_noted_once(store: Database, project: Project) -> None:
    await keep(store, release_of(project), release_of(project, TWO))
    assert await point(store, project, "v1", ONE) is None
    assert (await point(store, project, "v1", ONE, 1)) is not None, "it was there already"
    before = await point(store, project, "v1", TWO, 2)
    assert before is not None
    assert before.digest == ONE
    now = await store.read(lambda c: tags.get(c, project.id, "tool", "v1"))
    assert now == Tag(project.id, "tool", "v1", TWO, NOW + 2 * SECOND)
    await store.write(lambda c: tags.remove(c, now, NOW + 3 * SECOND))
    assert await store.read(lambda c: tags.get(c, project.id, "tool", "v1")) is None
    told = await store.read(lambda c: tags.history(c, project.id, "tool", before=None, limit=10))
    assert [(move.number, move.tag, move.digest, move.previous) for move in told] == [
        (3, "v1", None, TWO),
        (2, "v1", TWO, ONE),
        (1, "v1", ONE, None),
    ]
    assert told[0].created_at == NOW + 3 * SECOND
    later = await store.read(lambda c: tags.history(c, project.id, "tool", before=3, limit=1))
    assert [move.number for move in later] == [2]
    await store.write(lambda c: tags.sweep(c, 2))
    left = await store.read(lambda c: tags.history(c, project.id, "tool", before=None, limit=10))
    assert [move.number for move in left] == [3, 2]


async def test_a_release_knows_since_when_no_tag_points_to_it(store: Database, project: Project) -> None:
    await keep(store, release_of(project, untagged_at=NOW), release_of(project, TWO, untagged_at=NOW))

    async def untagged() -> dict[str, Any]:
        return {d: r.untagged_at for d, r in (await store.read(lambda c: releases.of_project(c, project.id))).items()}

    await point(store, project, "a", ONE, 1)
    await point(store, project, "b", ONE, 2)
    assert await untagged() == {ONE: None, TWO: NOW}
    await point(store, project, "a", TWO, 3)
    assert await untagged() == {ONE: None, TWO: None}
    await point(store, project, "b", TWO, 4)
    assert await untagged() == {ONE: NOW + 4 * SECOND, TWO: None}


async def test_many_who_move_one_tag_at_once_leave_a_history_without_gaps(store: Database, project: Project) -> None:
    await keep(store, release_of(project), release_of(project, TWO))

    def record(connection: Connection, number: int) -> None:
        projects.lock(connection, project.id)
        to = Tag(project.id, "tool", f"t{number % 3}", (ONE, TWO)[number % 2], NOW)
        tags.move(connection, to)

    await asyncio.gather(*(store.write(lambda c, n=n: record(c, n)) for n in range(12)))
    told = await store.read(lambda c: tags.history(c, project.id, "tool", before=None, limit=100))
    assert [move.number for move in reversed(told)] == list(range(1, len(told) + 1))
    for tag in ("t0", "t1", "t2"):
        of_tag = [move for move in reversed(told) if move.tag == tag]
        assert [move.previous for move in of_tag] == [None, *(move.digest for move in of_tag)][:-1]


async def test_lists_have_ones_own_and_no_packages(store: Database, project: Project, other: Project) -> None:
    await keep(store, release_of(project, packages=[1]), release_of(project, TWO, untagged_at=NOW), release_of(other))
    for tag in ("b", "a"):
        await point(store, project, tag, ONE)
    await point(store, other, "c", ONE)
    found = await store.read(lambda c: releases.among(c, project.id, [ONE, THREE]))
    assert [(release.digest, release.packages) for release in found.values()] == [(ONE, None)]
    untagged = await store.read(lambda c: releases.page_untagged(c, project.id, after=None, limit=10))
    assert [release.digest for release in untagged] == [TWO]
    assert await store.read(lambda c: releases.page_untagged(c, project.id, after=TWO, limit=10)) == []
    assert [tag.tag for tag in await store.read(lambda c: tags.of_project(c, project.id, ONE))] == ["a", "b"]
    assert await store.read(lambda c: tags.of_project(c, project.id, TWO)) == []
    assert await store.read(lambda c: tags.count(c, project.id)) == 2


async def test_untagged_releases_are_old_unless_something_of_the_project_is_made_from_them(
    store: Database, project: Project, other: Project
) -> None:
    fresh = "sha256:" + "d" * 64
    await keep(
        store,
        *(release_of(project, digest, untagged_at=NOW - DAY) for digest in (ONE, TWO, THREE)),
        release_of(project, fresh, untagged_at=NOW),
        release_of(other, TWO, untagged_at=NOW - 2 * DAY),
    )
    await store.write(lambda c: sandboxes.add(c, sandbox_of(project, template_digest=TWO)))
    kept = snapshot_of(sandbox_of(project, template_digest=THREE))
    await store.write(lambda c: snapshots.add(c, kept))
    old = await store.read(lambda c: releases.untagged_since(c, NOW, 10))
    assert old == [(other.id, TWO), (project.id, ONE)]


async def test_tombstones_of_releases_are_forgotten_after_a_time(store: Database, project: Project) -> None:
    await keep(store, release_of(project), release_of(project, TWO))
    await store.write(lambda c: releases.remove(c, project.id, ONE, NOW))
    await store.write(lambda c: releases.sweep(c, NOW))
    assert await store.read(lambda c: releases.get(c, project.id, ONE)) is not None
    await store.write(lambda c: releases.sweep(c, NOW + SECOND))
    assert await store.read(lambda c: releases.get(c, project.id, ONE)) is None
    assert await store.read(lambda c: releases.get(c, project.id, TWO)) is not None


# What may be dropped


async def test_a_template_is_needed_as_long_as_anybody_has_something_of_it(
    store: Database, project: Project, other: Project
) -> None:
    used, kept = sandbox_of(other, template_digest=ONE), snapshot_of(sandbox_of(other, template_digest=ONE))
    going_on = build_of(other, digests=(ONE,))
    await keep(store, release_of(project), release_of(other))
    builtin = Template("base", "latest", TWO, NOW)
    await store.write(lambda c: templates.replace(c, [builtin]))

    async def unneeded() -> list[str]:
        return await store.read(lambda c: drops.unneeded(c, [THREE, TWO, ONE]))

    async def begins(digest: str) -> bool:
        return await store.write(lambda c: drops.begin(c, digest, NOW))

    await store.write(lambda c: sandboxes.add(c, used))
    await store.write(lambda c: snapshots.add(c, kept))
    for owner in (project, other):
        await store.write(lambda c, of=owner: releases.remove(c, of.id, ONE, NOW))
        assert await unneeded() == [THREE]
    await store.write(lambda c: sandboxes.move(c, used, state=State.DELETED))
    assert await unneeded() == [THREE], "there is a snapshot"
    await store.write(lambda c: snapshots.change(c, kept, state=SnapshotState.DELETED))
    assert await unneeded() == [THREE], "the host has it still"
    await store.write(lambda c: snapshots.note_dropped(c, kept.id, NOW))
    assert await unneeded() == [ONE, THREE]
    await add(store, going_on)
    assert await unneeded() == [], "a build needs the one, and may have made the other"
    assert not await begins(ONE)
    await store.write(lambda c: builds.change(c, going_on, state=BuildState.FAILED))
    assert [await begins(digest) for digest in (ONE, TWO, THREE)] == [True, False, True]


async def test_what_is_known_to_be_deleted_goes_although_others_build(store: Database, project: Project) -> None:
    await keep(store, release_of(project))
    await store.write(lambda c: releases.remove(c, project.id, ONE, NOW))
    await add(store, build_of(project))
    assert await store.read(lambda c: drops.unneeded(c, [ONE, TWO])) == [ONE]


async def test_a_drop_is_in_the_way_until_it_has_ended_and_of_who_looked_before(
    store: Database, project: Project
) -> None:
    async def interferes(since: int) -> bool:
        return await store.write(lambda c: drops.interferes(c, ONE, NOW + since * SECOND))

    assert not await interferes(0)
    assert await store.write(lambda c: drops.begin(c, ONE, NOW))
    assert await interferes(1000)
    await store.write(lambda c: drops.end(c, ONE, NOW + 5 * SECOND))
    assert await interferes(5)
    assert not await interferes(6)
    assert await store.write(lambda c: drops.begin(c, ONE, NOW + 7 * SECOND))
    assert await interferes(1000)
    await store.write(lambda c: drops.sweep(c, NOW + 8 * SECOND))
    assert not await interferes(0)


async def test_of_a_drop_and_a_publication_at_once_one_sees_the_other(store: Database, project: Project) -> None:
    for number in range(20):
        digest = f"sha256:{number:064x}"

        def publish(connection: Connection, of: str = digest) -> bool:
            if drops.interferes(connection, of, NOW):
                return False
            releases.keep(connection, release_of(project, of))
            return True

        drop, published = await asyncio.gather(
            store.write(lambda c, of=digest: drops.begin(c, of, NOW)), store.write(publish)
        )
        assert drop is not published


# Builds


async def test_a_build_comes_back_as_it_was_stored(store: Database, project: Project) -> None:
    stored = build_of(
        project,
        state=BuildState.FAILED,
        source={"kind": "image", "reference": "x"},
        spec={"source": {"kind": "image"}},
        needs_auth=True,
        snapshot_id=new_id("snp"),
        uploads=(new_id("upl"),),
        digests=(ONE, TWO),
        sent=True,
        cancelling=True,
        step=2,
        steps=7,
        digest=ONE,
        bytes=1 << 40,
        base={"ref": "x", "digest": TWO},
        failure=Failure("build-failed", "No.", details={"line": 3}),
        timings={"pull": 0.5},
        lease_owner="me",
        lease_until=NOW,
        started_at=NOW,
        finished_at=NOW + SECOND,
        abandoned=True,
    )
    await add(store, stored)
    assert await store.read(lambda c: builds.get(c, stored.id)) == stored
    assert await store.write(lambda c: builds.get(c, stored.id, lock=True)) == stored
    assert await store.read(lambda c: builds.get(c, new_id("bld"))) is None


async def test_builds_are_listed_newest_first_by_name_and_state(
    store: Database, project: Project, other: Project
) -> None:
    made = [build_of(project, created_at=NOW + n * SECOND, name=("a", "b")[n % 2]) for n in range(4)]
    made[3] = replace(made[3], state=BuildState.SUCCEEDED)
    await add(store, *made, build_of(other))

    async def listed(**asked: Any) -> list[int]:
        wanted = {"name": None, "states": (), "after": None, "limit": 10, **asked}
        found = await store.read(lambda c: builds.page(c, project.id, **wanted))
        return [made.index(build) for build in found]

    assert await listed() == [3, 2, 1, 0]
    assert await listed(name="b") == [3, 1]
    assert await listed(states=[BuildState.PENDING]) == [2, 1, 0]
    assert await listed(after=Position(made[2].created_at, made[2].id), limit=1) == [1]
    assert await store.read(lambda c: builds.count_open(c, project.id)) == 3
    assert await store.read(builds.count_open) == 4


async def test_one_process_at_a_time_follows_a_build(store: Database, project: Project) -> None:
    made = [build_of(project) for _ in range(10)]
    await add(store, *made, build_of(project, state=BuildState.FAILED))

    async def claim(
        owner: str, after: int = 0, dead: tuple[str, ...] = (), besides: set[str] | None = None
    ) -> set[str]:
        now = NOW + after * SECOND
        until = now + 30 * SECOND
        claimed = await store.write(
            lambda c: builds.claim(c, owner, now=now, until=until, dead_owners=dead, besides=besides or set(), limit=10)
        )
        assert all(build.lease_owner == owner for build in claimed)
        return {build.id for build in claimed}

    answers = await asyncio.gather(*(claim(f"p{n}") for n in range(4)))
    assert sorted(one for answer in answers for one in answer) == sorted(build.id for build in made)
    owner = f"p{next(n for n, answer in enumerate(answers) if answer)}"
    mine = answers[int(owner[1:])]
    assert await claim("new") == set()
    assert await claim(owner) == mine, "what it does not follow yet, although it has the lease"
    assert await claim(owner, besides=mine) == set()
    assert await claim("new", dead=(owner,)) == mine
    others = set().union(*answers) - mine
    assert await store.write(lambda c: builds.renew(c, "new", mine | others, NOW + 100 * SECOND)) == mine
    assert not await claim("other", after=31) & mine
    assert await claim("other", after=101) >= mine
    assert await store.read(builds.owners) == {"other"}
    await store.write(lambda c: builds.release(c, "other"))
    assert await claim("last") == {build.id for build in made}


async def test_who_has_lost_the_lease_or_comes_after_the_end_changes_nothing(store: Database, project: Project) -> None:
    made = build_of(project, lease_owner="me", lease_until=NOW)
    await add(store, made)
    stale = replace(made, lease_owner="another")
    assert await store.write(lambda c: builds.change(c, stale, state=BuildState.FAILED)) is None
    await store.write(lambda c: builds.ask_to_end(c, made.id, NOW + SECOND))
    running = await store.write(lambda c: builds.change(c, made, state=BuildState.RUNNING, step=1))
    assert running is not None
    assert (running.state, running.step, running.cancelling) == (BuildState.RUNNING, 1, True)
    ended = await store.write(
        lambda c: builds.change(c, running, state=BuildState.FAILED, failure=Failure("x", "y"), finished_at=NOW)
    )
    assert ended is not None
    assert await store.write(lambda c: builds.change(c, running, state=BuildState.SUCCEEDED)) is None
    assert await store.read(lambda c: builds.get(c, made.id)) == ended


async def test_old_builds_and_all_but_the_newest_go_and_none_that_goes_on(
    store: Database, project: Project, other: Project
) -> None:
    ended = {"state": BuildState.FAILED, "finished_at": NOW}
    many = [build_of(project, created_at=NOW + n * SECOND, **ended) for n in range(3)]
    going_on = build_of(project, created_at=NOW - DAY)
    ancient = build_of(other, **{**ended, "finished_at": NOW - DAY})
    await add(store, *many, going_on, ancient)
    old = await store.read(lambda c: builds.old(c, NOW, 2, 10))
    assert old == [ancient.id, many[0].id]
    for build_id in (*old, going_on.id):
        await store.write(lambda c, one=build_id: builds.remove(c, one))
    left = await store.read(lambda c: builds.page(c, project.id, name=None, states=(), after=None, limit=10))
    assert [build.id for build in left] == [many[2].id, many[1].id, going_on.id]


async def test_an_abandoned_build_is_told_of_until_the_node_is_not_at_it(store: Database, project: Project) -> None:
    made = build_of(project, state=BuildState.FAILED, abandoned=True)
    await add(store, made, build_of(project, state=BuildState.FAILED))
    assert await store.read(lambda c: builds.abandoned(c, 10)) == [made.id]
    await store.write(lambda c: builds.note_ended(c, made.id))
    assert await store.read(lambda c: builds.abandoned(c, 10)) == []


async def test_a_builder_a_template_and_what_it_begins_with_count_for_the_project(
    store: Database, project: Project, other: Project
) -> None:
    kept = snapshot_of(sandbox_of(project), state=SnapshotState.DELETED, bytes=0)
    await store.write(lambda c: snapshots.add(c, kept))
    resources = Resources(cpus=2.5, memory_mib=300, disk_mib=1000)
    made = build_of(project, resources=resources, snapshot_id=kept.id)
    await add(store, made, build_of(project, state=BuildState.SUCCEEDED), build_of(other))
    mib = 1024 * 1024
    await keep(store, release_of(project, bytes=3 * mib), release_of(project, TWO, bytes=mib), release_of(other))
    await store.write(lambda c: releases.remove(c, project.id, TWO, NOW))
    assert await store.read(lambda c: projects.used(c, project.id)) == Used(1, 2.5, 300, 1003)
    assert await store.read(lambda c: snapshots.unwanted(c, 10)) == [], "the build begins with it"
    await store.write(lambda c: builds.change(c, made, state=BuildState.CANCELLED))
    assert await store.read(lambda c: snapshots.unwanted(c, 10)) == [kept.id]
    assert await store.read(lambda c: projects.used(c, project.id)) == Used(0, 0.0, 0, 3)


# Uploads


async def test_uploads_go_when_they_are_deleted_or_old_and_nothing_reads_them(
    store: Database, project: Project, other: Project
) -> None:
    plain = Upload(new_id("upl"), project.id, 1 << 40, NOW, NOW + DAY)
    deleted, expired, read = (replace(plain, id=new_id("upl"), size=1) for _ in range(3))
    expired = replace(expired, expires_at=NOW - SECOND)
    read = replace(read, deleted=True)

    def record(connection: Connection) -> None:
        for upload in (plain, deleted, expired, read, replace(plain, id=new_id("upl"), project_id=other.id)):
            uploads.add(connection, upload)

    await store.write(record)
    build = build_of(project, uploads=(read.id,))
    await add(store, build)
    assert await store.write(lambda c: uploads.get(c, plain.id, lock=True)) == plain
    assert await store.read(lambda c: uploads.taken(c, project.id)) == (4, (1 << 40) + 3)
    await store.write(lambda c: uploads.change(c, deleted.id, deleted=True))
    assert set(await store.write(lambda c: uploads.unwanted(c, NOW, 10))) == {deleted.id, expired.id}
    gone = await store.read(lambda c: uploads.get(c, expired.id))
    assert gone is not None
    assert gone.deleted, "nothing is written to it any more"
    await store.write(lambda c: builds.change(c, build, state=BuildState.FAILED))
    for upload_id in (deleted.id, expired.id):
        await store.write(lambda c, one=upload_id: uploads.remove(c, one))
    assert await store.write(lambda c: uploads.unwanted(c, NOW, 10)) == [read.id]
    assert await store.read(lambda c: uploads.taken(c, project.id)) == (2, (1 << 40) + 1)

"""What the store promises of snapshots, of quotas, and of rows from before there were any, on each database."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import alembic.command
from alembic.config import Config
from sqlalchemy import Connection, text

from space.control import quotas
from space.errors import LimitExceeded
from space.model.ids import new_id
from space.model.operation import OperationState
from space.model.project import Project, Quota, Used
from space.model.sandbox import Failure, Resources, Sandbox, State
from space.model.snapshot import Snapshot, SnapshotKind, SnapshotState
from space.store import operations, projects, sandboxes, snapshots
from space.store.database import MIGRATIONS, Database
from tests.stores import NOW, operation_of, sandbox_of

DAY = timedelta(days=1)


def snapshot_of(sandbox: Sandbox, **values: Any) -> Snapshot:
    plain = Snapshot(
        id=new_id("snp"),
        project_id=sandbox.project_id,
        sandbox_id=sandbox.id,
        kind=SnapshotKind.FULL,
        state=SnapshotState.READY,
        template=sandbox.template,
        template_digest=sandbox.template_digest,
        driver=sandbox.driver,
        resources=sandbox.resources,
        operation_id=new_id("op"),
        created_at=NOW,
        updated_at=NOW,
    )
    return replace(plain, **values)


async def keep(store: Database, *stored: Snapshot) -> None:
    def record(connection: Connection) -> None:
        for snapshot in stored:
            snapshots.add(connection, snapshot)

    await store.write(record)


async def test_a_snapshot_comes_back_as_it_was_stored(store: Database, project: Project) -> None:
    stored = snapshot_of(
        sandbox_of(project, resources=Resources(io_weight=7)),
        name="point",
        bytes=1 << 40,
        failure=Failure("x", "y", details={"a": 1}),
        hidden=True,
        dropped=True,
        details={"template_defaults": {"env": {}}},
    )
    await keep(store, stored)
    assert await store.read(lambda c: snapshots.get(c, stored.id)) == stored
    assert await store.read(lambda c: snapshots.get(c, stored.id, lock=True)) == stored
    assert await store.read(lambda c: snapshots.get(c, new_id("snp"))) is None


async def test_a_snapshot_changes_only_from_the_state_that_was_seen(store: Database, project: Project) -> None:
    stored = snapshot_of(sandbox_of(project), state=SnapshotState.CREATING)
    await keep(store, stored)
    changes = [SnapshotState.READY, SnapshotState.FAILED, SnapshotState.DELETED] * 3
    answers = await asyncio.gather(
        *(store.write(lambda c, s=state: snapshots.change(c, stored, state=s)) for state in changes)
    )
    assert sum(answer is not None for answer in answers) == 1


async def test_lists_have_a_projects_own_and_neither_hidden_nor_deleted_ones(store: Database, project: Project) -> None:
    other = Project(new_id("prj"), "other", NOW)
    await store.write(lambda c: projects.add(c, other))
    one, two = sandbox_of(project), sandbox_of(project)
    a = snapshot_of(one, name="a")
    b = snapshot_of(two, name="b", state=SnapshotState.FAILED)
    gone = snapshot_of(one, state=SnapshotState.DELETED)
    await keep(store, a, b, gone, snapshot_of(one, hidden=True), snapshot_of(sandbox_of(other), name="a"))

    async def listed(**wanted: Any) -> set[str]:
        asked = {"sandbox_id": None, "name": None, "states": (), **wanted}
        found = await store.read(lambda c: snapshots.page(c, project.id, after=None, limit=10, **asked))
        return {snapshot.id for snapshot in found}

    assert await listed() == {a.id, b.id}
    assert await listed(sandbox_id=one.id) == {a.id}
    assert await listed(name="b") == {b.id}
    assert await listed(states=[SnapshotState.DELETED, SnapshotState.READY]) == {a.id, gone.id}


async def test_unwanted_are_those_that_nobody_uses_any_more(store: Database, project: Project) -> None:
    source = sandbox_of(project, state=State.RUNNING)
    gone: dict[str, Any] = {"state": SnapshotState.DELETED}
    wanted = [
        snapshot_of(source, **gone),
        snapshot_of(source, state=SnapshotState.FAILED),
        snapshot_of(source, hidden=True),
        snapshot_of(source, **gone),
    ]
    others = [
        snapshot_of(source),
        snapshot_of(source, state=SnapshotState.CREATING),
        snapshot_of(source, **gone, dropped=True),
        snapshot_of(source, **gone),
        snapshot_of(source, hidden=True),
    ]
    begun = sandbox_of(project, state=State.RUNNING, snapshot_id=wanted[3].id)
    beginning = sandbox_of(project, state=State.CREATING, snapshot_id=others[3].id)
    making = operation_of(source, id=others[4].operation_id, state=OperationState.RUNNING)
    made = operation_of(source, id=wanted[2].operation_id, state=OperationState.SUCCEEDED)

    def record(connection: Connection) -> None:
        for sandbox in (source, begun, beginning):
            sandboxes.add(connection, sandbox)
        for operation in (making, made):
            operations.add(connection, operation)

    await store.write(record)
    await keep(store, *wanted, *others)
    assert set(await store.read(lambda c: snapshots.unwanted(c, 10))) == {snapshot.id for snapshot in wanted}
    assert await store.read(lambda c: snapshots.unwanted(c, 10, wanted[1].id)) == [wanted[1].id]
    assert await store.read(lambda c: snapshots.unwanted(c, 10, others[3].id)) == []
    assert len(await store.read(lambda c: snapshots.unwanted(c, 2))) == 2


async def test_tombstones_are_swept_once_they_are_dropped_and_old(store: Database, project: Project) -> None:
    source = sandbox_of(project)
    hidden = snapshot_of(source, hidden=True)
    old = snapshot_of(source, state=SnapshotState.DELETED, dropped=True)
    undropped = snapshot_of(source, state=SnapshotState.DELETED)
    ready = snapshot_of(source)
    await keep(store, hidden, old, undropped, ready)
    await store.write(lambda c: snapshots.note_dropped(c, hidden.id, NOW + DAY))
    await store.write(lambda c: snapshots.sweep(c, NOW + timedelta(seconds=1)))
    assert await store.read(lambda c: snapshots.get(c, old.id)) is None
    found = await store.read(lambda c: snapshots.get(c, hidden.id))
    assert found is not None
    assert (found.state, found.dropped) == (SnapshotState.DELETED, True)
    assert set(await store.read(snapshots.kept)) == {undropped.id, ready.id}


async def test_what_is_used_is_what_is_there(store: Database, project: Project) -> None:
    resources = Resources(cpus=0.5, memory_mib=100, disk_mib=1000)
    states = [State.RUNNING, State.PAUSED, State.WAKING, State.SUSPENDED, State.STOPPED, State.FAILED, State.DELETED]
    source = sandbox_of(project)
    mib = 1024 * 1024

    def record(connection: Connection) -> None:
        for state in states:
            sandboxes.add(connection, sandbox_of(project, state=state, resources=resources, details={"ran": True}))
        # It failed before it had anything.
        sandboxes.add(connection, sandbox_of(project, state=State.FAILED, resources=resources))
        snapshots.add(connection, snapshot_of(source, bytes=2 * mib + 1))
        snapshots.add(connection, snapshot_of(source, bytes=mib, state=SnapshotState.DELETED))
        snapshots.add(connection, snapshot_of(source, bytes=mib, hidden=True))
        snapshots.add(connection, snapshot_of(source, bytes=mib, dropped=True))

    assert await store.read(lambda c: projects.used(c, project.id)) == Used()
    await store.write(record)
    assert await store.read(lambda c: projects.used(c, project.id)) == Used(6, 1.5, 300, 6004)


async def test_a_quota_comes_back_and_locks_nobody_out_for_good(store: Database, project: Project) -> None:
    quota = Quota(sandboxes=3, cpus=1.5, memory_mib=None, disk_mib=1 << 40)
    await store.write(lambda c: projects.change_quota(c, project.id, quota))
    assert await store.write(lambda c: projects.lock(c, project.id)) == quota
    found = await store.read(lambda c: projects.page(c, after=None, limit=10))
    assert found == [replace(project, quota=quota)]


async def test_of_many_that_ask_for_the_last_places_exactly_so_many_are_let_in(
    store: Database, project: Project
) -> None:
    await store.write(lambda c: projects.change_quota(c, project.id, Quota(memory_mib=550)))
    resources = Resources(memory_mib=100)

    def admit(connection: Connection) -> None:
        quotas.admit(connection, project.id, quotas.of_new(resources))
        sandboxes.add(connection, sandbox_of(project, resources=resources))

    answers = await asyncio.gather(*(store.write(admit) for _ in range(30)), return_exceptions=True)
    refused = [answer for answer in answers if answer is not None]
    assert all(isinstance(answer, LimitExceeded) for answer in refused), refused
    assert len(answers) - len(refused) == 5
    assert (await store.read(lambda c: projects.used(c, project.id))).memory_mib == 500


async def test_rows_from_before_there_were_snapshots_and_quotas_are_read_as_they_were(url: str) -> None:
    store = Database(url)

    def first(connection: Connection) -> None:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "0001")
        connection.execute(text("insert into projects (id, name, last_event, created_at) values ('prj1', 'old', 0, 0)"))
        connection.execute(
            text(
                "insert into sandboxes (id, project_id, template, template_digest, driver, state, ready, resources, metadata,"
                " env, on_timeout, on_idle, wake_on_request, failure, details, created_at, updated_at) values ('sbx1',"
                " 'prj1', 'base', 'sha256:x', 'gvisor', 'failed', false, :resources, '{}', '{}', 'delete', 'suspend',"
                " false, :failure, :details, 0, 0)"
            ),
            {
                "resources": '{"cpus": 2.0, "memory_mib": 512, "disk_mib": 1024, "pids": 64}',
                "failure": '{"code": "oom-killed", "message": "It was.", "kind": "MachineLost"}',
                "details": '{"ran": true}',
            },
        )

    await store.write(first)
    await store.migrate()
    found = await store.read(lambda c: sandboxes.get(c, "sbx1"))
    assert found is not None
    assert found.resources == Resources(2.0, 512, 1024, 64, 100)
    assert found.failure == Failure("oom-killed", "It was.", "MachineLost")
    assert (found.snapshot_id, found.forked_from) == (None, None)
    project = await store.read(lambda c: projects.get(c, "prj1"))
    assert project is not None
    assert project.quota == Quota()
    assert await store.read(lambda c: projects.used(c, "prj1")) == Used(1, 0.0, 0, 1024)
    await store.close()

"""What the store promises, on each database it can be kept in: the schema, transactions, sandboxes."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import alembic.autogenerate
import pytest
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

from space.errors import HostError, Unavailable
from space.model.ids import new_id
from space.model.project import Project
from space.model.sandbox import Failure, Sandbox, State
from space.store import projects, sandboxes, tables
from space.store.database import Database
from space.store.paging import Position
from tests.stores import NOW, sandbox_of


async def test_the_migrations_make_exactly_the_tables_of_the_code(store: Database, url: str) -> None:
    def differences(connection: Connection) -> Any:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return alembic.autogenerate.compare_metadata(context, tables.metadata)

    assert await store.read(differences) == []


async def test_migrating_again_changes_nothing_and_two_at_once_do_it_once(url: str) -> None:
    stores = [Database(url) for _ in range(3)]
    await asyncio.gather(*(store.migrate() for store in stores))
    await stores[0].migrate()
    made = Project(new_id("prj"), "default", NOW)
    assert await stores[1].write(lambda c: projects.add(c, made))
    assert await stores[2].read(lambda c: projects.get(c, made.id)) == made
    for store in stores:
        await store.close()


async def test_a_store_of_a_later_version_is_refused_not_touched(store: Database, url: str) -> None:
    await store.write(lambda c: c.execute(text("update alembic_version set version_num = '9999'")) and None)
    with pytest.raises(HostError) as refused:
        await store.migrate()
    assert refused.value.code == "store-version"


async def test_a_sandbox_comes_back_as_it_was_stored(store: Database, project: Project) -> None:
    stored = sandbox_of(
        project,
        name="x",
        metadata={'odd".$[key]': "ünï\ncode 🤣", "b": ""},
        env={"A": "a\nb"},
        timeout_s=1.5,
        deadline_at=NOW + timedelta(days=30000, microseconds=1),
        failure=Failure("oom-killed", "It was."),
        details={"nested": {"list": [1, None, "x"]}},
        wake_on_request=True,
        ready=True,
    )
    await store.write(lambda c: sandboxes.add(c, stored))
    assert await store.read(lambda c: sandboxes.get(c, stored.id)) == stored
    assert await store.read(lambda c: sandboxes.get(c, new_id("sbx"))) is None


async def test_a_transaction_that_raises_leaves_nothing(store: Database, project: Project) -> None:
    stored = sandbox_of(project)

    def half(connection: Connection) -> None:
        sandboxes.add(connection, stored)
        raise KeyError

    with pytest.raises(KeyError):
        await store.write(half)
    assert await store.read(lambda c: sandboxes.get(c, stored.id)) is None


async def test_a_cancelled_caller_leaves_all_or_nothing(store: Database, project: Project) -> None:
    for _ in range(30):
        stored = sandbox_of(project, metadata={"k": "v"})
        task = asyncio.create_task(store.write(lambda c, s=stored: sandboxes.add(c, s)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        found = await store.read(lambda c, s=stored: sandboxes.get(c, s.id))
        assert found in (None, stored)
    assert await store.write(lambda c: sandboxes.add(c, sandbox_of(project))) is None, "writing still works"


async def test_move_happens_once_whoever_tries(store: Database, project: Project) -> None:
    seen = sandbox_of(project)
    await store.write(lambda c: sandboxes.add(c, seen))
    moved = await asyncio.gather(
        *(
            store.write(lambda c, n=n: sandboxes.move(c, seen, state=State.RUNNING, operation_id=f"op{n}"))
            for n in range(20)
        )
    )
    winners = [sandbox for sandbox in moved if sandbox is not None]
    assert len(winners) == 1
    assert await store.read(lambda c: sandboxes.get(c, seen.id)) == winners[0]


@pytest.mark.parametrize("changed", [{"state": State.RUNNING}, {"operation_id": new_id("op")}, {"operation_id": None}])
async def test_move_needs_the_state_and_the_operation_that_were_seen(
    store: Database, project: Project, changed: dict[str, Any]
) -> None:
    stored = sandbox_of(project)
    await store.write(lambda c: sandboxes.add(c, stored))
    stale = replace(stored, **changed)
    assert await store.write(lambda c: sandboxes.move(c, stale, state=State.FAILED)) is None
    assert await store.read(lambda c: sandboxes.get(c, stored.id)) == stored


async def test_a_locked_sandbox_is_changed_by_one_at_a_time(store: Database, project: Project) -> None:
    stored = sandbox_of(project, timeout_s=0.0)
    await store.write(lambda c: sandboxes.add(c, stored))

    def add_one(connection: Connection) -> None:
        seen = sandboxes.get(connection, stored.id, lock=True)
        assert seen is not None
        sandboxes.change(connection, seen, timeout_s=(seen.timeout_s or 0) + 1)

    await asyncio.gather(*(store.write(add_one) for _ in range(30)))
    found = await store.read(lambda c: sandboxes.get(c, stored.id))
    assert found is not None
    assert found.timeout_s == 30


async def test_lists_filter_by_project_state_and_metadata(store: Database, project: Project) -> None:
    other = Project(new_id("prj"), "other", NOW)
    await store.write(lambda c: projects.add(c, other))
    a = sandbox_of(project, metadata={"k": "1", "l": "2"}, state=State.RUNNING)
    b = sandbox_of(project, metadata={"k": "1"}, state=State.PAUSED)
    gone = sandbox_of(project, metadata={"k": "1"}, state=State.DELETED)
    foreign = sandbox_of(other, metadata={"k": "1"}, state=State.RUNNING)
    for sandbox in (a, b, gone, foreign):
        await store.write(lambda c, s=sandbox: sandboxes.add(c, s))

    async def listed(states: tuple[State, ...] = (), **metadata: str) -> set[str]:
        page = await store.read(
            lambda c: sandboxes.page(c, project.id, states=states, metadata=metadata, after=None, limit=10)
        )
        return {sandbox.id for sandbox in page}

    assert await listed() == {a.id, b.id}
    assert await listed(k="1") == {a.id, b.id}
    assert await listed(k="1", l="2") == {a.id}
    assert await listed(k="2") == set()
    assert await listed((State.PAUSED,), k="1") == {b.id}
    changed = await store.write(lambda c: sandboxes.change(c, b, metadata={"l": "2"}))
    assert changed is not None
    assert await listed(l="2") == {a.id, b.id}
    assert await listed(k="1") == {a.id}
    assert await store.read(sandboxes.count_by_state) == {"running": 2, "paused": 1}
    assert set(await store.read(sandboxes.all_present)) == {a.id, b.id, foreign.id}


async def test_pages_cover_everything_once_also_what_was_made_at_the_same_moment(
    store: Database, project: Project
) -> None:
    made = [sandbox_of(project, created_at=NOW + timedelta(microseconds=n // 3)) for n in range(10)]
    for sandbox in made:
        await store.write(lambda c, s=sandbox: sandboxes.add(c, s))
    seen: list[Sandbox] = []
    after = None
    while True:
        page = await store.read(
            lambda c, a=after: sandboxes.page(c, project.id, states=(), metadata={}, after=a, limit=4)
        )
        seen += page
        if len(page) < 4:
            break
        after = Position(page[-1].created_at, page[-1].id)
    assert seen == sorted(made, key=lambda s: (s.created_at, s.id), reverse=True)


async def test_due_are_those_whose_deadline_has_passed_and_that_it_can_end(store: Database, project: Project) -> None:
    passed, later = NOW - timedelta(seconds=1), NOW + timedelta(seconds=1)
    wanted = [
        sandbox_of(project, state=State.RUNNING, deadline_at=passed),
        sandbox_of(project, state=State.PAUSED, deadline_at=NOW),
        sandbox_of(project, state=State.FAILED, deadline_at=passed, on_timeout="delete"),
    ]
    others = [
        sandbox_of(project, state=State.RUNNING, deadline_at=later),
        sandbox_of(project, state=State.RUNNING, deadline_at=None),
        sandbox_of(project, state=State.SUSPENDED, deadline_at=passed),
        sandbox_of(project, state=State.PAUSING, deadline_at=passed),
        sandbox_of(project, state=State.FAILED, deadline_at=passed, on_timeout="stop"),
        sandbox_of(project, state=State.DELETED, deadline_at=passed),
    ]
    for sandbox in wanted + others:
        await store.write(lambda c, s=sandbox: sandboxes.add(c, s))
    due = await store.read(lambda c: sandboxes.due(c, NOW, 100))
    assert {sandbox.id for sandbox in due} == {sandbox.id for sandbox in wanted}
    assert len(await store.read(lambda c: sandboxes.due(c, NOW, 1))) == 1


async def test_a_database_error_tells_no_values(store: Database, project: Project) -> None:
    stored = sandbox_of(project, env={"SECRET": "do-not-tell"})
    await store.write(lambda c: sandboxes.add(c, stored))
    with pytest.raises(HostError, match="IntegrityError") as failed:
        await store.write(lambda c: sandboxes.add(c, stored))
    assert "do-not-tell" not in str(failed.value)
    assert failed.value.__cause__ is None


async def test_reading_cannot_write_in_sqlite(tmp_path: Path) -> None:
    store = Database(f"sqlite:///{tmp_path / 'store.db'}")
    await store.migrate()
    with pytest.raises(Unavailable):
        await store.read(lambda c: projects.add(c, Project("prj", "x", NOW)))
    await store.close()


@pytest.mark.parametrize("url", ["mysql://x/y", "not a url", ""])
def test_another_kind_of_url_is_an_operators_error(url: str) -> None:
    with pytest.raises(HostError) as refused:
        Database(url)
    assert refused.value.code == "invalid-settings"

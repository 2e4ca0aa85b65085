"""What the store promises, on each database it can be kept in."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import alembic.autogenerate
import asyncpg
import pytest
import sqlalchemy
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

from space.errors import HostError, Unavailable
from space.model.ids import new_id
from space.model.operation import Operation, OperationState
from space.model.project import Key, Project, Role
from space.model.sandbox import Failure, Resources, Sandbox, State
from space.model.template import Reference, Template
from space.store import commands, events, idempotency, keys, operations, projects, sandboxes, tables, templates
from space.store.commands import CommandRow
from space.store.database import Database
from space.store.idempotency import Record
from space.store.paging import Position
from tests import postgres

NOW = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[Path]:
    if reason := postgres.unfit():
        pytest.skip(reason)
    with postgres.serving() as directory:
        yield directory


@pytest.fixture(params=["sqlite", "postgres"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh and empty database."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'store.db'}"
    directory: Path = request.getfixturevalue("server")
    name = f"t{next(_numbers)}"
    connection = await asyncpg.connect(host=str(directory), user=postgres.USER, database="postgres")
    try:
        await connection.execute(f"create database {name}")
    finally:
        await connection.close()
    return f"postgresql://{postgres.USER}@/{name}?host={directory}"


@pytest.fixture
async def store(url: str) -> AsyncIterator[Database]:
    store = Database(url)
    await store.migrate()
    yield store
    await store.close()


@pytest.fixture
async def project(store: Database) -> Project:
    made = Project(new_id("prj"), "default", NOW)
    await store.write(lambda c: projects.add(c, made))
    return made


def sandbox_of(project: Project, **values: Any) -> Sandbox:
    plain = Sandbox(
        id=new_id("sbx"),
        project_id=project.id,
        template="base",
        template_digest="sha256:" + "a" * 64,
        driver="gvisor",
        state=State.CREATING,
        resources=Resources(cpus=1.5),
        created_at=NOW,
        updated_at=NOW,
        operation_id=new_id("op"),
    )
    return replace(plain, **values)


def operation_of(sandbox: Sandbox, **values: Any) -> Operation:
    plain = Operation(
        id=new_id("op"),
        project_id=sandbox.project_id,
        sandbox_id=sandbox.id,
        kind="create",
        state=OperationState.PENDING,
        created_at=NOW,
        request={"verb": "create"},
    )
    return replace(plain, **values)


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


async def test_an_operation_comes_back_as_it_was_stored(store: Database, project: Project) -> None:
    sandbox = sandbox_of(project)
    stored = operation_of(
        sandbox,
        state=OperationState.FAILED,
        error=Failure("x", "y"),
        timings={"boot": 0.25},
        started_at=NOW,
        finished_at=NOW,
    )

    def record(connection: Connection) -> None:
        sandboxes.add(connection, sandbox)
        operations.add(connection, stored)

    await store.write(record)
    assert await store.read(lambda c: operations.get(c, stored.id)) == stored


async def with_operations(store: Database, project: Project, *wanted: dict[str, Any]) -> list[Operation]:
    sandbox = sandbox_of(project)
    made = [operation_of(sandbox, created_at=NOW + timedelta(seconds=n), **w) for n, w in enumerate(wanted)]

    def record(connection: Connection) -> None:
        sandboxes.add(connection, sandbox)
        for operation in made:
            operations.add(connection, operation)

    await store.write(record)
    return made


async def claim(store: Database, owner: str, limit: int = 100, **more: Any) -> list[str]:
    until = NOW + timedelta(seconds=30)
    wanted: dict[str, Any] = {"dead_owners": (), "besides": (), "now": NOW, "until": until, **more}
    return [o.id for o in await store.write(lambda c: operations.claim(c, owner, limit=limit, **wanted))]


async def test_claims_take_what_is_free_and_leave_what_is_held(store: Database, project: Project) -> None:
    held, lapsed = NOW + timedelta(seconds=1), NOW - timedelta(seconds=1)
    running = OperationState.RUNNING
    pending, old, dead, alive, _, mine = await with_operations(
        store,
        project,
        {},
        {"state": running, "lease_owner": "b", "lease_until": lapsed},
        {"state": running, "lease_owner": "dead", "lease_until": held},
        {"state": running, "lease_owner": "b", "lease_until": held},
        {"state": OperationState.SUCCEEDED},
        {"state": running, "lease_owner": "a", "lease_until": lapsed},
    )
    assert await store.read(operations.owners) == {"a", "b", "dead"}
    got = await claim(store, "a", dead_owners={"dead"}, besides={mine.id})
    assert set(got) == {pending.id, old.id, dead.id}
    assert await claim(store, "c", dead_owners={"dead"}, besides={mine.id}) == []
    assert (await store.read(lambda c: operations.get(c, alive.id))).lease_owner == "b"  # type: ignore[union-attr]
    started = await store.read(lambda c: operations.get(c, pending.id))
    assert started is not None
    assert (started.state, started.started_at, started.lease_owner) == (running, NOW, "a")


async def test_no_operation_is_claimed_twice_by_runners_that_race(store: Database, project: Project) -> None:
    made = await with_operations(store, project, *({} for _ in range(40)))
    got = await asyncio.gather(*(claim(store, f"runner-{n}", limit=7) for n in range(10)))
    taken = [operation for claimed in got for operation in claimed]
    assert len(taken) == len(set(taken))
    # A runner may find rows that another one holds just then; it comes again.
    while more := await claim(store, "late"):
        taken += more
    assert sorted(taken) == sorted(o.id for o in made)


async def test_the_oldest_operations_are_claimed_first(store: Database, project: Project) -> None:
    made = await with_operations(store, project, {}, {}, {})
    assert await claim(store, "a", limit=1) == [made[0].id]
    assert await claim(store, "a", limit=1) == [made[1].id]


async def test_only_the_holder_renews_and_finishes(store: Database, project: Project) -> None:
    (made,) = await with_operations(store, project, {})
    await claim(store, "a")
    held = await store.read(lambda c: operations.get(c, made.id))
    assert held is not None
    later = NOW + timedelta(minutes=5)
    assert await store.write(lambda c: operations.renew(c, "b", [made.id], later)) == set()
    assert await store.write(lambda c: operations.renew(c, "a", [made.id], later)) == {made.id}
    stolen = replace(held, lease_owner="b")
    assert await store.write(lambda c: operations.finish(c, stolen, OperationState.FAILED, now=NOW)) is None
    done = await store.write(
        lambda c: operations.finish(c, held, OperationState.SUCCEEDED, now=NOW, timings={"boot": 1.0})
    )
    assert done is not None
    assert (done.state, done.lease_owner, done.timings) == (OperationState.SUCCEEDED, None, {"boot": 1.0})
    assert await store.write(lambda c: operations.finish(c, held, OperationState.FAILED, now=NOW)) is None


async def test_released_operations_are_pending_again(store: Database, project: Project) -> None:
    first, second = await with_operations(store, project, {}, {})
    await claim(store, "a", limit=1)
    await claim(store, "b", limit=1)
    await store.write(lambda c: operations.release(c, "a"))
    assert await claim(store, "c") == [first.id]
    assert (await store.read(lambda c: operations.get(c, second.id))).lease_owner == "b"  # type: ignore[union-attr]


async def test_event_numbers_have_no_gaps_and_appear_in_order(store: Database, project: Project) -> None:
    async def add(n: int) -> int:
        return await store.write(lambda c: events.add(c, project.id, "sandbox", {"n": n}, NOW))

    seen: list[int] = []

    async def follow() -> None:
        while len(seen) < 60:
            after = seen[-1] if seen else 0
            batch = await store.read(lambda c, last=after: events.after(c, project.id, last, 10))
            seen.extend(event.number for event in batch)

    async with asyncio.timeout(60):
        following = asyncio.create_task(follow())
        numbers = await asyncio.gather(*(add(n) for n in range(60)))
        await following
    assert sorted(numbers) == list(range(1, 61))
    assert seen == list(range(1, 61)), "a reader passed an event that was committed late"
    assert await store.read(lambda c: events.span(c, project.id)) == (1, 60)
    await store.write(lambda c: events.sweep(c, NOW + timedelta(seconds=1)))
    assert await store.read(lambda c: events.span(c, project.id)) == (61, 60)


async def test_of_many_claims_of_one_idempotency_key_one_has_it(store: Database, project: Project) -> None:
    """L10"""

    async def ask(n: int) -> Record | None:
        record = Record(project.id, "k", "f" * 64, f"sbx{n}", None, NOW)
        return await store.write(lambda c: idempotency.claim(c, record, NOW - timedelta(days=1)))

    answers = await asyncio.gather(*(ask(n) for n in range(20)))
    assert answers.count(None) == 1
    assert len({answer.subject_id for answer in answers if answer is not None}) == 1


async def test_a_key_whose_request_was_rolled_back_is_free(store: Database, project: Project) -> None:
    record = Record(project.id, "k", "f" * 64, "sbx1", None, NOW)

    def half(connection: Connection) -> None:
        idempotency.claim(connection, record, NOW - timedelta(days=1))
        raise KeyError

    with pytest.raises(KeyError):
        await store.write(half)
    assert await store.write(lambda c: idempotency.claim(c, record, NOW - timedelta(days=1))) is None
    again = replace(record, subject_id="sbx2")
    assert await store.write(lambda c: idempotency.claim(c, again, NOW - timedelta(days=1))) == record
    assert await store.write(lambda c: idempotency.claim(c, again, NOW + timedelta(days=1))) is None, "expired"


async def test_keys_are_found_by_hash_and_revoked_once(store: Database, project: Project) -> None:
    key = Key(new_id("key"), project.id, "k", Role.ADMIN, "a" * 64, NOW)
    await store.write(lambda c: keys.add(c, key))
    assert await store.read(lambda c: keys.by_hash(c, key.hash)) == key
    assert await store.read(lambda c: keys.by_hash(c, "b" * 64)) is None
    for now, used in ((NOW, NOW), (NOW + timedelta(seconds=30), NOW), (NOW + timedelta(seconds=90),) * 2):
        await store.write(lambda c, n=now: keys.touch(c, key.id, n, n - timedelta(minutes=1)))
        found = await store.read(lambda c: keys.get(c, key.id))
        assert found is not None
        assert found.last_used_at == used
    assert await store.write(lambda c: keys.revoke(c, key, NOW))
    assert not await store.write(lambda c: keys.revoke(c, key, NOW))
    assert await store.read(lambda c: keys.page(c, project.id, after=None, limit=10)) == []


async def test_of_two_projects_of_one_name_one_is_made(store: Database) -> None:
    made = await asyncio.gather(
        *(store.write(lambda c, n=n: projects.add(c, Project(f"prj{n}", "same", NOW))) for n in range(10))
    )
    assert made.count(True) == 1
    found = await store.read(lambda c: projects.by_name(c, "same"))
    assert found is not None
    assert found.id == f"prj{made.index(True)}"


async def test_templates_are_what_the_node_last_had(store: Database) -> None:
    old = Template("base", "latest", "sha256:" + "1" * 64, NOW, {"user": "user"}, "gvisor", 5)
    new = replace(old, digest="sha256:" + "2" * 64)
    other = Template("other", "v1", "sha256:" + "3" * 64, NOW)
    await store.write(lambda c: templates.replace(c, [old, other]))
    assert await store.read(lambda c: templates.find(c, Reference("base", "latest"))) == old
    await store.write(lambda c: templates.replace(c, [new]))
    assert await store.read(lambda c: templates.find(c, Reference("base", "latest"))) == new
    assert await store.read(lambda c: templates.find(c, Reference(digest=old.digest))) is None
    assert await store.read(lambda c: templates.find(c, Reference(digest=new.digest))) == new
    assert await store.read(lambda c: templates.find(c, Reference("other", "v1"))) is None
    await store.write(lambda c: templates.replace(c, [new, other]))
    assert await store.read(lambda c: templates.page(c, after=None, limit=1)) == [new]
    assert await store.read(lambda c: templates.page(c, after=("base", "latest"), limit=5)) == [other]
    await store.write(lambda c: templates.replace(c, []))
    assert await store.read(lambda c: templates.page(c, after=None, limit=5)) == []


async def test_swept_tombstones_take_everything_of_theirs_along(store: Database, project: Project) -> None:
    gone = sandbox_of(project, state=State.DELETED, metadata={"k": "v"}, updated_at=NOW - timedelta(days=2))
    kept = sandbox_of(project, state=State.DELETED, updated_at=NOW)
    operation = operation_of(gone)
    command = CommandRow(new_id("cmd"), project.id, gone.id, {"state": "ended"}, NOW)

    def record(connection: Connection) -> None:
        for sandbox in (gone, kept):
            sandboxes.add(connection, sandbox)
        operations.add(connection, operation)
        commands.add(connection, command)

    await store.write(record)
    await store.write(lambda c: sandboxes.sweep(c, NOW - timedelta(days=1)))
    assert await store.read(lambda c: sandboxes.get(c, gone.id)) is None
    assert await store.read(lambda c: sandboxes.get(c, kept.id)) == kept
    assert await store.read(lambda c: operations.get(c, operation.id)) is None
    for table in (tables.commands, tables.sandbox_metadata):
        count = await store.read(
            lambda c, t=table: c.execute(sqlalchemy.select(sqlalchemy.func.count()).select_from(t)).scalar_one()
        )
        assert count == 0


async def test_commands_belong_to_sandboxes_that_are_there(store: Database, project: Project) -> None:
    sandbox = sandbox_of(project, state=State.RUNNING)
    made = [
        CommandRow(new_id("cmd"), project.id, sandbox.id, {"state": "created"}, NOW + timedelta(seconds=n))
        for n in range(3)
    ]

    def record(connection: Connection) -> None:
        sandboxes.add(connection, sandbox)
        for command in made:
            commands.add(connection, command)
            commands.add(connection, command)

    await store.write(record)
    assert await store.read(lambda c: commands.page(c, sandbox.id, after=None, limit=10)) == made[::-1]
    await store.write(lambda c: commands.note(c, made[0].id, {"state": "ended"}))
    noted = await store.read(lambda c: commands.get(c, made[0].id))
    assert noted is not None
    assert noted.shown == {"state": "ended"}
    await store.write(lambda c: sandboxes.move(c, sandbox, state=State.DELETED))
    assert await store.read(lambda c: commands.get(c, made[0].id)) is None


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

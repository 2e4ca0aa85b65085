"""What the store promises of events, keys, projects, templates and commands, on each database it can be kept in."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy
from sqlalchemy import Connection

from space.model.ids import new_id
from space.model.project import Key, Project, Role
from space.model.sandbox import Sandbox, State
from space.model.template import Reference, Template
from space.store import commands, events, idempotency, keys, operations, projects, sandboxes, tables, templates
from space.store.commands import CommandRow
from space.store.database import Database
from space.store.idempotency import Record
from tests.stores import NOW, operation_of, sandbox_of


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
    again = replace(old, seen_at=NOW + timedelta(days=1), bytes=6)
    await store.write(lambda c: templates.replace(c, [again]))
    assert await store.read(lambda c: templates.find(c, Reference("base", "latest"))) == replace(again, seen_at=NOW)
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


async def test_old_commands_and_too_many_are_swept_but_for_those_that_are_spared(
    store: Database, project: Project
) -> None:
    sandbox, neighbour = sandbox_of(project, state=State.RUNNING), sandbox_of(project, state=State.RUNNING)
    made = [
        CommandRow(new_id("cmd"), project.id, of.id, {"state": "ended"}, NOW + timedelta(seconds=n))
        for of in (sandbox, neighbour)
        for n in range(6)
    ]

    def record(connection: Connection) -> None:
        for one in (sandbox, neighbour):
            sandboxes.add(connection, one)
        for command in made:
            commands.add(connection, command)

    async def left(of: Sandbox) -> list[CommandRow]:
        return (await store.read(lambda c: commands.page(c, of.id, after=None, limit=10)))[::-1]

    await store.write(record)
    both = {sandbox.id, neighbour.id}
    assert await store.read(lambda c: commands.to_be_swept(c, NOW, 6)) == set()
    assert await store.read(lambda c: commands.to_be_swept(c, NOW + timedelta(seconds=1), 6)) == both
    assert await store.read(lambda c: commands.to_be_swept(c, NOW, 5)) == both
    await store.write(lambda c: commands.sweep(c, sandbox.id, NOW + timedelta(seconds=2), 6, besides={made[0].id}))
    assert await left(sandbox) == [made[0], *made[2:6]]
    await store.write(lambda c: commands.sweep(c, sandbox.id, NOW, 2, besides={made[0].id}))
    assert await left(sandbox) == [made[0], *made[4:6]]
    assert await left(neighbour) == made[6:]


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

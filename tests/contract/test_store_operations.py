"""What the store promises of operations and their leases, on each database it can be kept in."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection

from space.model.ids import new_id
from space.model.operation import Operation, OperationState
from space.model.project import Project
from space.model.sandbox import Failure, State
from space.store import operations, sandboxes
from space.store.database import Database
from tests.stores import NOW, operation_of, sandbox_of


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


async def test_operations_that_ended_long_ago_and_too_many_are_swept_but_for_a_sandboxs_last(
    store: Database, project: Project
) -> None:
    ended: dict[str, Any] = {"state": OperationState.SUCCEEDED, "finished_at": NOW}
    made = await with_operations(store, project, *[ended] * 5, {"state": OperationState.RUNNING})
    last = sandbox_of(project, state=State.STOPPED, operation_id=(of_last := new_id("op")))
    tombstone = sandbox_of(project, state=State.DELETED)
    stay = [operation_of(last, **ended, id=of_last), operation_of(tombstone, **ended)]

    def record(connection: Connection) -> None:
        for sandbox in (last, tombstone):
            sandboxes.add(connection, sandbox)
        for operation in stay:
            operations.add(connection, operation)

    async def left() -> set[str]:
        found = await store.read(
            lambda c: operations.page(c, project.id, sandbox_id=None, states=(), after=None, limit=20)
        )
        return {operation.id for operation in found}

    await store.write(record)
    always = {made[5].id, *(operation.id for operation in stay)}
    await store.write(lambda c: operations.sweep(c, NOW, 6))
    assert await left() == {o.id for o in made} | always
    await store.write(lambda c: operations.sweep(c, NOW, 3))
    assert await left() == {o.id for o in made[2:]} | always
    await store.write(lambda c: operations.sweep(c, NOW + timedelta(seconds=1), 3))
    assert await left() == always


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

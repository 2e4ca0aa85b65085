"""Operations are carried out once and to the end, whichever process dies or fails meanwhile."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update

from space.control import creation, leases, lifecycle, operations, sandboxes, verbs
from space.control.control import Control
from space.errors import SpaceError
from space.model.operation import Operation, OperationState
from space.model.sandbox import Sandbox, State
from space.store import tables
from tests.control_host import Host, control_over, hosting, until, working


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """A control plane whose runner a test starts itself."""
    async with hosting(tmp_path, runner=False) as host:
        yield host


async def ask(host: Host, control: Control | None = None) -> tuple[Sandbox, Operation]:
    return await creation.request_create(control or host.control, host.project_id, creation.NewSandbox("base"))


async def found(host: Host, operation: Operation) -> Operation:
    return await operations.get(host.control, host.project_id, operation.id)


async def ended(host: Host, operation: Operation) -> Operation:
    return await operations.wait(host.control, host.project_id, operation.id, 20)


async def lease_to(host: Host, operation: Operation, owner: str, seconds: float) -> None:
    until_ = host.clock() + timedelta(seconds=seconds)
    table = tables.operations
    statement = update(table).where(table.c.id == operation.id)
    await host.control.store.write(
        lambda connection: connection.execute(statement.values(lease_owner=owner, lease_until=until_)) and None
    )


def owner_of_a_dead_process() -> str:
    """Return how a process named itself that has ended since."""
    script = "from space.control.leases import Leases; print(Leases(lambda: None).owner)"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


async def test_an_operation_of_a_dead_process_is_taken_over_at_once(host: Host) -> None:
    """L12"""
    async with control_over(host.settings, host.clock) as died:
        _, operation = await ask(host, died)
    await lease_to(host, operation, owner_of_a_dead_process(), 1000)
    async with working(host.control):
        assert (await ended(host, operation)).state == OperationState.SUCCEEDED
    assert sum(host.node.booted.values()) == 1


async def test_a_lease_of_a_living_process_is_left_alone_until_it_lapses(host: Host) -> None:
    async with control_over(host.settings, host.clock) as other:
        _, operation = await ask(host, other)
        elsewhere = f"{socket.gethostname()}-2/boot/1/1"
        await lease_to(host, operation, elsewhere, 1000)
        _, mine = await ask(host)
        async with working(host.control):
            assert (await ended(host, mine)).state == OperationState.SUCCEEDED
            left = await found(host, operation)
            assert (left.state, left.lease_owner) == (OperationState.RUNNING, elsewhere)
            host.clock.move(1001)
            assert (await ended(host, operation)).state == OperationState.SUCCEEDED


def test_a_recycled_pid_is_another_process() -> None:
    """L12"""
    mine = leases.Leases(lambda: None).owner  # type: ignore[arg-type, return-value]
    host, boot, pid, started = mine.split("/")
    assert not leases.is_dead(mine)
    assert leases.is_dead(f"{host}/{boot}/{pid}/{int(started) - 1}")
    assert leases.is_dead(f"{host}/an-earlier-boot/{pid}/{started}")
    assert leases.is_dead(owner_of_a_dead_process())
    assert not leases.is_dead(f"{host}-2/{boot}/999999999/1"), "another host's processes cannot be judged from here"


async def test_a_runner_that_ends_in_order_gives_its_operations_back(host: Host) -> None:
    held = host.node.hold("boot")
    async with working(host.control):
        _, operation = await ask(host)

        async def asked() -> bool:
            return bool(host.node.calls)

        await until(asked, "the node to be asked")
    left = await found(host, operation)
    assert (left.state, left.lease_owner) == (OperationState.PENDING, None)
    held.set()
    async with control_over(host.settings, host.clock) as following, working(following):
        assert (await ended(host, operation)).state == OperationState.SUCCEEDED
    assert sum(host.node.booted.values()) == 1


async def test_a_lease_is_renewed_while_its_operation_runs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("space.control.runner.RENEW_S", 0.05)
    held = host.node.hold("boot")
    async with working(host.control):
        _, operation = await ask(host)
        first = (await found(host, operation)).lease_until
        assert first is not None
        host.clock.move(5)

        async def renewed() -> bool:
            now = (await found(host, operation)).lease_until
            return now is not None and now > first + timedelta(seconds=4)

        await until(renewed, "the lease to be renewed")
        held.set()
        assert (await ended(host, operation)).state == OperationState.SUCCEEDED


async def test_a_runner_that_lost_its_lease_stops_and_writes_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("space.control.runner.RENEW_S", 0.05)
    host.node.hold("boot")
    async with working(host.control):
        _, operation = await ask(host)

        async def asked() -> bool:
            return bool(host.node.calls)

        await until(asked, "the node to be asked")
        elsewhere = f"{socket.gethostname()}-2/boot/1/1"
        await lease_to(host, operation, elsewhere, 1000)

        async def stopped() -> bool:
            return not host.control.leases.running

        await until(stopped, "the runner to let go")
    left = await found(host, operation)
    assert (left.state, left.lease_owner) == (OperationState.RUNNING, elsewhere)


async def test_a_late_runner_cannot_overwrite_what_the_new_one_has_written(host: Host) -> None:
    _, operation = await ask(host)
    async with working(host.control):
        await ended(host, operation)
    again = await lifecycle.carry_out(host.control, operation)
    assert again is None or again.state == OperationState.CANCELLED
    assert (await found(host, operation)).state == OperationState.SUCCEEDED


async def test_delete_does_not_wait_for_ever_for_an_operation_that_hangs(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "PREDECESSOR_WAIT_S", 0.2)
    host.node.hold("boot")
    async with working(host.control):
        sandbox, create = await ask(host)

        async def asked() -> bool:
            return bool(host.node.calls)

        await until(asked, "the node to be asked")
        _, delete = await verbs.request(host.control, host.project_id, sandbox.id, "delete")
        assert (await ended(host, delete)).state == OperationState.SUCCEEDED
        assert host.node.calls[-1] == ("destroy", sandbox.id)
        assert host.node.overlaps == []
    assert (await found(host, create)).state in {OperationState.CANCELLED, OperationState.PENDING}
    async with control_over(host.settings, host.clock) as following, working(following):
        assert (await ended(host, create)).state == OperationState.CANCELLED
    assert host.node.machines == {}


async def test_deleting_what_nobody_has_begun_cancels_it(host: Host) -> None:
    with host.control.leases.reserve() as seat:
        assert seat.taken
        for _ in range(host.control.leases.free):
            host.control.leases.take()
        sandbox, create = await ask(host)
        assert create.state == OperationState.PENDING
        _, delete = await verbs.request(host.control, host.project_id, sandbox.id, "delete")
    assert (await found(host, create)).state == OperationState.CANCELLED
    host.control.leases.give_back()
    async with working(host.control):
        assert (await ended(host, delete)).state == OperationState.SUCCEEDED
    assert sum(host.node.booted.values()) == 0


async def test_a_node_that_stays_away_fails_the_operation_and_is_taken_back_later(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    from space.control import watcher

    async with working(host.control):
        sandbox, create = await ask(host)
        await ended(host, create)
        monkeypatch.setitem(lifecycle.BUDGET_S, "pause", 0.3)
        host.node.fail("pause", "unavailable", 503, times=1000)
        monkeypatch.setattr(host.control.node, "inspect", _unreachable)
        _, pause = await verbs.request(host.control, host.project_id, sandbox.id, "pause")
        assert (await ended(host, pause)).state == OperationState.FAILED
        shown = await sandboxes.get(host.control, host.project_id, sandbox.id)
        assert shown.state == State.FAILED
        assert shown.failure is not None
        assert shown.failure.code == "host-lost"
        monkeypatch.undo()
        await watcher.compare(host.control)

        async def running() -> bool:
            return (await sandboxes.get(host.control, host.project_id, sandbox.id)).state == State.RUNNING

        await until(running, "the sandbox whose machine never ended to be taken back")


async def _unreachable(_machine: str) -> dict[str, object]:
    raise SpaceError


async def test_what_breaks_inside_an_operation_fails_it_and_does_not_stop_the_runner(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> dict[str, object]:
        raise ZeroDivisionError

    async with working(host.control):
        with monkeypatch.context() as patched:
            patched.setattr(host.control.node, "boot", broken)
            _, first = await ask(host)
            failed = await ended(host, first)
        assert failed.state == OperationState.FAILED
        assert failed.error is not None
        assert failed.error.code == "internal"
        _, second = await ask(host)
        assert (await ended(host, second)).state == OperationState.SUCCEEDED


async def test_start_of_a_sandbox_whose_disk_is_gone_says_so_instead_of_giving_it_an_empty_one(host: Host) -> None:
    async with working(host.control):
        sandbox, create = await ask(host)
        await ended(host, create)
        host.node.fail("pause", "machine-lost", 503)
        del host.node.machines[sandbox.id]
        _, pause = await verbs.request(host.control, host.project_id, sandbox.id, "pause")
        await ended(host, pause)
        _, start = await verbs.request(host.control, host.project_id, sandbox.id, "start")
        failed = await ended(host, start)
    assert failed.error is not None
    assert failed.error.code == "disk-lost"
    assert host.node.booted[sandbox.id] == 1


async def test_start_of_a_sandbox_that_never_came_up_boots_it(host: Host) -> None:
    host.node.fail("boot", "host-full", 503)
    async with working(host.control):
        sandbox, create = await ask(host)
        assert (await ended(host, create)).state == OperationState.FAILED
        _, start = await verbs.request(host.control, host.project_id, sandbox.id, "start")
        assert (await ended(host, start)).state == OperationState.SUCCEEDED
    assert host.node.machines[sandbox.id] == "running"


async def test_twenty_verbs_at_once_are_serialised(host: Host) -> None:
    """L7"""
    async with working(host.control):
        sandbox = await host.create()
        verbs = ["pause", "suspend", "stop", "resume", "wake"] * 4
        answers = await asyncio.gather(
            *(host.http.post(f"/v1/sandboxes/{sandbox}/{verb}", headers={"Prefer": "wait=20"}) for verb in verbs)
        )
        assert {answer.status_code for answer in answers} <= {httpx.codes.OK, httpx.codes.CONFLICT}
        for answer in answers:
            if answer.is_error:
                assert answer.json()["error"]["details"]["state"]
        deleted = await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})
        assert deleted.status_code == httpx.codes.OK
    assert host.node.overlaps == []
    assert host.node.machines == {}

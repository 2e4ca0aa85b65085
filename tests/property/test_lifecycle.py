"""The lifecycle as a state machine: whatever is asked, fails, dies or passes, the rules of the state table hold and in the
end store and node tell the same story."""

import asyncio
import contextlib
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from sqlalchemy import update

from space.control import creation, forks, idle, reaper, sandboxes, snapshots, verbs, watcher
from space.errors import SpaceError
from space.model.ids import new_id
from space.model.operation import FINISHED, Operation, OperationState
from space.model.sandbox import RESTING, TRANSITIONS, Sandbox, State
from space.model.snapshot import SnapshotKind, SnapshotState
from space.store import events, operations, tables
from space.store import sandboxes as rows
from space.store import snapshots as snapshot_rows
from tests.control_host import Host, control_over, hosting, until, working

VERBS = ("pause", "resume", "suspend", "wake", "stop", "start", "delete")
NUMBER = st.integers(0, 60)
STAYING = ("snapshot-full", "snapshot-disk", "fork")
AT_NODE = ("boot", "destroy", "snapshot", *VERBS[:-1])
DEAD = "no-such-host/boot/1/1"
SETTLED_S = 20
MACHINE_OF = {
    State.RUNNING: {"running"},
    State.PAUSED: {"paused"},
    State.SUSPENDED: {"suspended"},
    State.STOPPED: {"stopped", "exited"},
    State.FAILED: {"absent", "exited", "stopped"},
}


def may_follow() -> set[tuple[State, State]]:
    """Return every step that the table of transitions allows, with the falls that failures may cause."""
    steps: set[tuple[State, State]] = set()
    for transition in TRANSITIONS.values():
        if transition.passing is None or transition.target is None:
            continue
        steps |= {(source, transition.passing) for source in transition.sources}
        steps |= {(transition.passing, transition.target), (transition.passing, State.FAILED)}
        # A step that fails leaves the sandbox where it was; a delete only if it was to be idle and was not.
        back = transition.sources if transition.verb != "delete" else {State.RUNNING}
        steps |= {(transition.passing, source) for source in back}
    # A machine may end by itself.
    steps |= {(state, State.FAILED) for state in MACHINE_OF}
    return steps


ALLOWED = may_follow()


class Lifecycle(RuleBasedStateMachine):
    """Requests come at any moment; `settle` lets everything come to rest and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = contextlib.AsyncExitStack()
        self.directory = tempfile.TemporaryDirectory()
        self.host: Host = self.run(self.stack.enter_async_context(hosting(Path(self.directory.name), runner=False)))
        self.process = contextlib.AsyncExitStack()
        self.run(self._start())
        # What there is to choose from depends on what went well meanwhile, so it is chosen by number: what is drawn must
        # not depend on it.
        self.made: list[str] = []
        self.points: list[str] = []
        self.deleted: set[str] = set()
        self.dropped: set[str] = set()

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, 30))

    def teardown(self) -> None:
        self.run(self._settled())
        self.check()
        self.run(self.process.aclose())
        self.run(self.stack.aclose())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        self.directory.cleanup()

    # --- what callers do

    @initialize()
    def begin(self) -> None:
        self._create(None, "delete")

    @rule(
        timeout_s=st.sampled_from([None, 100.0]),
        on_timeout=st.sampled_from(["delete", "suspend", "stop"]),
        idle_timeout_s=st.sampled_from([None, 30.0]),
        on_idle=st.sampled_from(["pause", "suspend", "stop", "delete"]),
    )
    def create(self, timeout_s: float | None, on_timeout: Any, idle_timeout_s: float | None, on_idle: Any) -> None:
        self._create(timeout_s, on_timeout, idle_timeout_s=idle_timeout_s, on_idle=on_idle)

    def _create(self, timeout_s: float | None, on_timeout: Any, **more: Any) -> None:
        wanted = creation.NewSandbox("base", timeout_s=timeout_s, on_timeout=on_timeout, **more)
        sandbox, _ = self.run(creation.request_create(self.host.control, self.host.project_id, wanted))
        self.made.append(sandbox.id)

    def _made(self, number: int) -> str:
        return self.made[number % len(self.made)]

    def _point(self, number: int) -> str:
        return self.points[number % len(self.points)] if self.points else new_id("snp")

    async def _ask(self, sandbox: str, verb: str) -> Any:
        control, project = self.host.control, self.host.project_id
        if verb == "fork":
            return await forks.request_fork(control, project, sandbox, forks.NewForks(3))
        if verb in STAYING:
            kind = SnapshotKind(verb.removeprefix("snapshot-"))
            return await snapshots.request_snapshot(control, project, sandbox, kind)
        return await verbs.request(control, project, sandbox, verb)

    @rule(which=NUMBER)
    def fork(self, which: int) -> None:
        with contextlib.suppress(SpaceError):
            made, _ = self.run(self._ask(self._made(which), "fork"))
            self.made += [fork.id for fork in made]

    @rule(which=NUMBER, kind=st.sampled_from(list(SnapshotKind)))
    def keep(self, which: int, kind: SnapshotKind) -> None:
        with contextlib.suppress(SpaceError):
            snapshot, _ = self.run(self._ask(self._made(which), f"snapshot-{kind}"))
            self.points.append(snapshot.id)

    @rule(which=NUMBER)
    def begin_from(self, which: int) -> None:
        wanted = creation.NewSandbox(f"snapshot:{self._point(which)}")
        with contextlib.suppress(SpaceError):
            made, _ = self.run(creation.request_create(self.host.control, self.host.project_id, wanted))
            self.made.append(made.id)

    @rule(which=NUMBER)
    def drop(self, which: int) -> None:
        point = self._point(which)
        with contextlib.suppress(SpaceError):
            self.run(snapshots.delete(self.host.control, self.host.project_id, point))
            self.dropped.add(point)

    @rule(
        which=NUMBER,
        asked=st.lists(st.tuples(st.sampled_from([*VERBS[:-1], *STAYING]), st.integers(0, 40)), min_size=1, max_size=6),
    )
    def ask(self, which: int, asked: list[tuple[str, int]]) -> None:
        """Ask for one after the other; between two, the loop is given some turns, so that they meet at any point."""
        sandbox = self._made(which)
        for verb, turns in asked:
            with contextlib.suppress(SpaceError):
                self.run(self._ask(sandbox, verb))
            self.run(self._turns(turns))

    @rule(which=NUMBER, asked=st.lists(st.sampled_from([*VERBS, *STAYING]), min_size=2, max_size=5))
    def ask_at_once(self, which: int, asked: list[str]) -> None:
        sandbox = self._made(which)

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(self._ask(sandbox, verb) for verb in asked), return_exceptions=True)

        for verb, answer in zip(asked, self.run(all_of_them()), strict=True):
            assert not isinstance(answer, BaseException) or isinstance(answer, SpaceError), answer
            if verb == "delete" and not isinstance(answer, BaseException):
                self.deleted.add(sandbox)

    @rule(which=NUMBER)
    def delete(self, which: int) -> None:
        sandbox = self._made(which)
        with contextlib.suppress(SpaceError):
            self.run(verbs.request(self.host.control, self.host.project_id, sandbox, "delete"))
            self.deleted.add(sandbox)

    @rule(which=NUMBER, timeout_s=st.sampled_from([50.0, 5000.0]))
    def renew(self, which: int, timeout_s: float) -> None:
        sandbox = self._made(which)
        with contextlib.suppress(SpaceError):
            wanted = {"timeout_s": timeout_s}
            self.run(sandboxes.change(self.host.control, self.host.project_id, sandbox, wanted))

    # --- what happens to them

    @rule(seconds=st.sampled_from([1, 60, 200]))
    def time_passes(self, seconds: float) -> None:
        self.host.clock.move(seconds)
        self.run(reaper.end_due(self.host.control))
        self.run(idle.end_idle(self.host.control))

    @rule(which=NUMBER, commands=st.integers(0, 1))
    def somebody_works_in_it(self, which: int, commands: int) -> None:
        sandbox = self._made(which)
        self.host.node.busy[sandbox] = commands
        self.host.node.active_at[sandbox] = self.host.clock().timestamp()

    @rule(verb=st.sampled_from([*AT_NODE, "drop-snapshot"]), code=st.sampled_from(["host-error", "unavailable"]))
    def the_node_fails(self, verb: str, code: str) -> None:
        self.host.node.fail(verb, code, 503 if code == "unavailable" else 500)

    @rule()
    def the_node_takes_its_time(self) -> None:
        for verb in AT_NODE:
            self.host.node.hold(verb)

    @rule()
    def the_node_answers(self) -> None:
        for held in self.host.node.holds.values():
            held.set()
        self.host.node.holds.clear()

    @rule(which=NUMBER, cause=st.sampled_from(["oom-killed", None]), noticed=st.booleans())
    def the_machine_ends(self, which: int, cause: str | None, noticed: bool) -> None:
        sandbox = self._made(which)
        if self.host.node.machines.get(sandbox) in {"running", "paused"}:
            self.host.node.end(sandbox, cause)
            if noticed:
                self.run(watcher.check(self.host.control, sandbox))

    @rule()
    def the_process_is_killed_and_started_again(self) -> None:
        """Another control plane on the same store; what the old one held looks held by a process that is no more."""
        held = list(self.host.control.leases.running)
        self.run(self.process.aclose())
        # A node takes a machine's calls in turn; this one has none, so its calls of the dead process end first.
        self.run(until(self._node_is_idle, "the node to see that its caller is gone"))
        self.run(self._start())
        table = tables.operations
        statement = (
            update(table)
            .where(table.c.id.in_(held), table.c.state == OperationState.PENDING)
            .values(state=OperationState.RUNNING, lease_owner=DEAD, lease_until=self.host.clock())
        )
        self.run(self.host.control.store.write(lambda connection: connection.execute(statement) and None))
        self.host.clock.move(1)

    @rule()
    def compared(self) -> None:
        self.run(watcher.compare(self.host.control))

    @rule()
    def settle(self) -> None:
        self.run(self._settled())
        self.check()

    # --- what must hold

    @invariant()
    def every_step_is_one_of_the_table(self) -> None:
        last: dict[str, State] = {}
        for event in self.run(
            self.host.control.store.read(lambda connection: events.after(connection, self.host.project_id, 0, 10_000))
        ):
            sandbox, state = event.data["sandbox_id"], State(event.data["state"])
            before = last.get(sandbox)
            if before is None:
                assert state == State.CREATING
            elif before != state:
                assert (before, state) in ALLOWED, (before, state)
            assert not event.data["ready"] or state == State.RUNNING
            last[sandbox] = state

    @invariant()
    def no_machine_is_used_by_two_calls_at_once(self) -> None:
        assert self.host.node.overlaps == []

    @invariant()
    def a_sandbox_in_passing_is_held_by_an_operation_that_goes_on(self) -> None:
        present, by_id = self.run(self._everything())
        for sandbox in present.values():
            if sandbox.state not in RESTING:
                operation = by_id[sandbox.operation_id]
                assert operation.state not in FINISHED, (sandbox.state, operation)
                waits = operation.kind == "fork" and sandbox.state == State.CREATING
                assert waits or TRANSITIONS[operation.request["verb"]].passing == sandbox.state

    async def _start(self) -> None:
        self.process = contextlib.AsyncExitStack()
        self.host.control = await self.process.enter_async_context(control_over(self.host.settings, self.host.clock))
        await self.process.enter_async_context(working(self.host.control))

    async def _node_is_idle(self) -> bool:
        return not any(self.host.node.in_flight.values())

    async def _turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def _settled(self) -> None:
        """Wait until nothing is left to do: deletions that failed are taken up, machines compared."""
        self.the_node_answers()
        ends = time.monotonic() + SETTLED_S
        while True:
            present, by_id = await self._everything()
            left = [operation for operation in by_id.values() if operation.state not in FINISHED]
            assert time.monotonic() < ends, f"never came to rest: {left}"
            if left:
                await asyncio.sleep(0.005)
                continue
            if any(sandbox.details.get("deleting") for sandbox in present.values()):
                await reaper.delete_again(self.host.control)
                continue
            before = present
            await snapshots.drop_unwanted(self.host.control)
            await watcher.compare(self.host.control)
            await watcher.check_unsettled(self.host.control)
            if (await self._everything())[0] == before:
                return

    async def _everything(self) -> tuple[dict[str, Sandbox], dict[str, Operation]]:
        def read(connection: Any) -> tuple[dict[str, Sandbox], dict[str, Operation]]:
            page = operations.page(
                connection, self.host.project_id, sandbox_id=None, states=(), after=None, limit=10_000
            )
            return rows.all_present(connection), {operation.id: operation for operation in page}

        return await self.host.control.store.read(read)

    def check(self) -> None:
        present, by_id = self.run(self._everything())
        machines = self.host.node.machines
        assert set(machines) <= set(present), "a machine of no sandbox"
        for sandbox in present.values():
            assert sandbox.state in RESTING
            machine = machines.get(sandbox.id, "absent")
            assert machine in MACHINE_OF[sandbox.state], (sandbox.state, machine, sandbox.failure)
            assert sandbox.ready is (sandbox.state == State.RUNNING)
            assert (sandbox.failure is not None) is (sandbox.state == State.FAILED)
        assert not self.deleted & set(present), "an accepted delete did not end in clean-up"
        self._check_snapshots()
        assert all(operation.finished_at is not None for operation in by_id.values())
        # No operation is carried out twice with effect: a disk is made once, or anew only where none ever came up.
        by_sandbox = defaultdict(list)
        for operation in by_id.values():
            by_sandbox[operation.sandbox_id].append(operation)
        for sandbox_id, booted in self.host.node.booted.items():
            failed = sum(o.state != OperationState.SUCCEEDED for o in by_sandbox[sandbox_id])
            assert booted <= 1 + failed

    def _check_snapshots(self) -> None:
        self.run(snapshots.drop_unwanted(self.host.control))
        kept = self.run(self.host.control.store.read(snapshot_rows.kept))
        assert {snapshot.state for snapshot in kept.values()} <= {SnapshotState.READY}
        assert set(self.host.node.snapshots) == set(kept), "node and store do not have the same snapshots"
        assert not any(snapshot.hidden for snapshot in kept.values()), "a fork left its snapshot behind"
        assert not self.dropped & set(kept)


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    # A failure is shown as it was found: tasks that run side by side would make it another one on the way to a smaller.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

"""The lifecycle as a state machine: whatever is asked, fails, dies or passes, the rules of the state table hold and in the
end store and node tell the same story."""

import asyncio
import contextlib
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from sqlalchemy import update

from space.control import reaper, sandboxes, watcher
from space.errors import SpaceError
from space.model.operation import FINISHED, Operation, OperationState
from space.model.sandbox import RESTING, TRANSITIONS, Resources, Sandbox, State
from space.store import events, operations, tables
from space.store import sandboxes as rows
from tests.control_host import Host, control_over, hosting, until, working

VERBS = ("pause", "resume", "suspend", "wake", "stop", "start", "delete")
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
        steps |= {(source, transition.passing) for source in transition.sources}
        steps |= {(transition.passing, transition.target), (transition.passing, State.FAILED)}
        # A step that fails leaves the sandbox where it was.
        steps |= {(transition.passing, source) for source in transition.sources if transition.verb != "delete"}
    # A machine may end by itself.
    steps |= {(state, State.FAILED) for state in MACHINE_OF}
    return steps


ALLOWED = may_follow()


class Lifecycle(RuleBasedStateMachine):
    """Requests come at any moment; `settle` lets everything come to rest and compares."""

    made = Bundle("made")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = contextlib.AsyncExitStack()
        self.directory = tempfile.TemporaryDirectory()
        self.host: Host = self.run(self.stack.enter_async_context(hosting(Path(self.directory.name), runner=False)))
        self.process = contextlib.AsyncExitStack()
        self.run(self._start())
        self.deleted: set[str] = set()

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

    @initialize(target=made)
    def begin(self) -> str:
        return self._create(None, "delete")

    @rule(
        target=made, timeout_s=st.sampled_from([None, 100.0]), on_timeout=st.sampled_from(["delete", "suspend", "stop"])
    )
    def create(self, timeout_s: float | None, on_timeout: Any) -> str:
        return self._create(timeout_s, on_timeout)

    def _create(self, timeout_s: float | None, on_timeout: Any) -> str:
        wanted = sandboxes.NewSandbox("base", Resources(), timeout_s=timeout_s, on_timeout=on_timeout)
        sandbox, _ = self.run(sandboxes.request_create(self.host.control, self.host.project_id, wanted))
        return sandbox.id

    @rule(
        sandbox=made, asked=st.lists(st.tuples(st.sampled_from(VERBS[:-1]), st.integers(0, 40)), min_size=1, max_size=6)
    )
    def ask(self, sandbox: str, asked: list[tuple[str, int]]) -> None:
        """Ask for one after the other; between two, the loop is given some turns, so that they meet at any point."""
        for verb, turns in asked:
            with contextlib.suppress(SpaceError):
                self.run(sandboxes.request(self.host.control, self.host.project_id, sandbox, verb))
            self.run(self._turns(turns))

    @rule(sandbox=made, verbs=st.lists(st.sampled_from(VERBS), min_size=2, max_size=5))
    def ask_at_once(self, sandbox: str, verbs: list[str]) -> None:
        control, project = self.host.control, self.host.project_id

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(
                *(sandboxes.request(control, project, sandbox, verb) for verb in verbs), return_exceptions=True
            )

        for verb, answer in zip(verbs, self.run(all_of_them()), strict=True):
            assert not isinstance(answer, BaseException) or isinstance(answer, SpaceError), answer
            if verb == "delete" and not isinstance(answer, BaseException):
                self.deleted.add(sandbox)

    @rule(sandbox=consumes(made))
    def delete(self, sandbox: str) -> None:
        with contextlib.suppress(SpaceError):
            self.run(sandboxes.request(self.host.control, self.host.project_id, sandbox, "delete"))
            self.deleted.add(sandbox)

    @rule(sandbox=made, timeout_s=st.sampled_from([50.0, 5000.0]))
    def renew(self, sandbox: str, timeout_s: float) -> None:
        with contextlib.suppress(SpaceError):
            wanted = {"timeout_s": timeout_s}
            self.run(sandboxes.change(self.host.control, self.host.project_id, sandbox, wanted))

    # --- what happens to them

    @rule(seconds=st.sampled_from([1, 60, 200]))
    def time_passes(self, seconds: float) -> None:
        self.host.clock.move(seconds)
        self.run(reaper.end_due(self.host.control))

    @rule(verb=st.sampled_from(["boot", "destroy", *VERBS[:-1]]), code=st.sampled_from(["host-error", "unavailable"]))
    def the_node_fails(self, verb: str, code: str) -> None:
        self.host.node.fail(verb, code, 503 if code == "unavailable" else 500)

    @rule()
    def the_node_takes_its_time(self) -> None:
        for verb in ("boot", "destroy", *VERBS[:-1]):
            self.host.node.hold(verb)

    @rule()
    def the_node_answers(self) -> None:
        for held in self.host.node.holds.values():
            held.set()
        self.host.node.holds.clear()

    @rule(sandbox=made, cause=st.sampled_from(["oom-killed", None]), noticed=st.booleans())
    def the_machine_ends(self, sandbox: str, cause: str | None, noticed: bool) -> None:
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

    @precondition(lambda self: self.host.node.calls)
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
                assert TRANSITIONS[operation.request["verb"]].passing == sandbox.state

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
            await watcher.compare(self.host.control)
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
        assert all(operation.finished_at is not None for operation in by_id.values())
        # No operation is carried out twice with effect: a disk is made once, or anew only where none ever came up.
        by_sandbox = defaultdict(list)
        for operation in by_id.values():
            by_sandbox[operation.sandbox_id].append(operation)
        for sandbox_id, booted in self.host.node.booted.items():
            failed = sum(o.state != OperationState.SUCCEEDED for o in by_sandbox[sandbox_id])
            assert booted <= 1 + failed


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

"""Recording what is asked of a sandbox: one transaction that looks at its state and makes the operation, or refuses."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from space.control import once, quotas, transitions, unmade
from space.control.control import Control
from space.control.leases import Seat
from space.control.once import Once
from space.control.operations import new_operation
from space.control.sandboxes import BUSY_RETRY_S, earlier_answer, not_found, owned, wrong_state
from space.errors import Conflict
from space.model.ids import is_id, new_id
from space.model.operation import FINISHED, Operation, OperationState
from space.model.sandbox import TRANSITIONS, WAKE_BY_STATE, Sandbox, State
from space.store import idempotency, operations, sandboxes


@dataclass(frozen=True, slots=True)
class Due:
    """A verb that nobody asks for but a clock: only if the sandbox's deadline and idle policy still are as ``seen``.

    With ``if_idle_s`` the node does it only if the sandbox has been idle for so long.
    """

    seen: Sandbox
    if_idle_s: float | None = None

    def check(self, found: Sandbox) -> dict[str, Any]:
        """Return what is to be written down of it in the operation's request, or raise ``Conflict``."""
        if (found.deadline_at, found.idle_timeout_s, found.on_idle) != (
            self.seen.deadline_at,
            self.seen.idle_timeout_s,
            self.seen.on_idle,
        ):
            raise Conflict("The deadline was renewed.", code="deadline-renewed")
        return {} if self.if_idle_s is None else {"if_idle_s": self.if_idle_s}


async def request(
    control: Control,
    project_id: str,
    sandbox_id: str,
    verb: str,
    *,
    due: Due | None = None,
    asked_once: Once | None = None,
    counted: bool = True,
) -> tuple[Sandbox, Operation]:
    """Record a lifecycle verb and return the sandbox and the operation that carries it out.

    The same verb asked while its operation runs joins that one. ``wake`` of a running sandbox has succeeded at once,
    and ``delete`` is taken in every state. Raises ``NotFound``, ``Conflict`` with the state, or ``LimitExceeded`` when
    the machine would be one too many; not ``counted`` is one that is there already.
    """
    if not is_id("sbx", sandbox_id):
        raise not_found()
    now, operation_id = control.now(), new_id("op")
    with control.leases.reserve() as seat:

        def record(connection: Connection) -> tuple[Sandbox, Operation]:
            earlier = once.first(
                connection, asked_once, project_id, subject_id=sandbox_id, operation_id=operation_id, now=now
            )
            if earlier is not None:
                return earlier_answer(connection, earlier)
            seen = owned(sandboxes.get(connection, sandbox_id, lock=True), project_id)
            recorder = Recorder(control, connection, seat, now, operation_id, counted=counted)
            more = {} if due is None else due.check(seen)
            result = recorder.record(seen, verb, more)
            if asked_once is not None and result[1].id != operation_id:
                idempotency.point_to(connection, project_id, asked_once.key, result[1].id)
            return result

        sandbox, operation = await control.store.write(record)
        if operation.id == operation_id and operation.state not in FINISHED:
            seat.start(operation, sandbox)
        control.changes.notify(project_id)
        control.changes.notify(operation.id)
    return sandbox, operation


def holder(connection: Connection, sandbox: Sandbox) -> Operation | None:
    """Return the operation that has a sandbox now; None when any verb may begin.

    A fork lets go of its source once that has been copied; what it makes it holds until each one's own turn.
    """
    found = None if sandbox.operation_id is None else operations.get(connection, sandbox.operation_id)
    if found is None or found.state in FINISHED:
        return None
    return None if found.sandbox_id == sandbox.id and found.request.get("let_go") else found


@dataclass(frozen=True)
class Recorder:
    """One verb being recorded, inside its transaction."""

    control: Control
    connection: Connection
    seat: Seat
    now: datetime
    operation_id: str
    counted: bool = True

    def record(self, seen: Sandbox, verb: str, more: Mapping[str, Any] | None = None) -> tuple[Sandbox, Operation]:
        """Record ``verb``; ``more`` is written down in the operation's request."""
        current = holder(self.connection, seen)
        if current is not None and _joins(verb, current):
            return seen, current
        if current is not None and "if_idle_s" in (more or {}):
            raise _held(seen, current, "taken for idle")
        if verb == "delete":
            return self._delete(seen, current, more or {})
        if seen.details.get("deleting"):
            # Its deletion was accepted and failed; it is taken up again until it has succeeded.
            raise Conflict("The sandbox is being deleted.", code="wrong-state", state=str(seen.state))
        if verb == "wake" and seen.state == State.RUNNING:
            return seen, self._done_already(seen, verb)
        step = WAKE_BY_STATE.get(seen.state, verb) if verb == "wake" else verb
        transition = TRANSITIONS[step]
        if seen.state not in transition.sources:
            raise wrong_state(seen, _PARTICIPLES[verb])
        if current is not None:
            raise _held(seen, current, _PARTICIPLES[verb])
        if self.counted and transition.target == State.RUNNING and seen.state != State.PAUSED:
            quotas.admit(self.connection, seen.project_id, quotas.of_machine(seen.resources))
        asked = {"verb": step, "from": str(seen.state), "ready": seen.ready, **(more or {})}
        return self._move(seen, verb, asked, transition.passing)

    def _delete(self, seen: Sandbox, current: Operation | None, more: Mapping[str, Any]) -> tuple[Sandbox, Operation]:
        asked: dict[str, Any] = {"verb": "delete", "from": str(seen.state), "ready": seen.ready, **more}
        # A fork that has not begun has no machine, and the operation that holds it is its source's.
        if current is not None and current.sandbox_id == seen.id and not self._cancel(current):
            # Its runner must have let go of the machine before the machine is destroyed.
            asked["after"] = current.id
        return self._move(seen, "delete", asked, State.DELETING)

    def _cancel(self, current: Operation) -> bool:
        """Cancel an operation that nobody has begun; False when somebody has."""
        if current.state != OperationState.PENDING:
            return False
        if operations.finish(self.connection, current, OperationState.CANCELLED, now=self.now) is None:
            return False
        unmade.give_up(self.connection, current, unmade.CANCELLED, self.now)
        return True

    def _move(
        self, seen: Sandbox, kind: str, asked: dict[str, Any], passing: State | None
    ) -> tuple[Sandbox, Operation]:
        operation = self.seat.lease(self._operation(seen, kind, asked))
        operations.add(self.connection, operation)
        values = {} if passing is None else {"state": passing, "ready": False}
        moved = transitions.move(self.connection, seen, self.now, operation_id=operation.id, **values)
        if moved is None:
            raise Conflict(
                "The sandbox changed meanwhile.", code="busy", state=str(seen.state), retry_after_s=BUSY_RETRY_S
            )
        return moved, operation

    def _done_already(self, seen: Sandbox, kind: str) -> Operation:
        operation = replace(
            self._operation(seen, kind, {"verb": kind, "from": str(seen.state)}),
            state=OperationState.SUCCEEDED,
            started_at=self.now,
            finished_at=self.now,
        )
        operations.add(self.connection, operation)
        return operation

    def _operation(self, seen: Sandbox, kind: str, asked: dict[str, Any]) -> Operation:
        return replace(new_operation(self.control, seen, kind, asked), id=self.operation_id, created_at=self.now)


_PARTICIPLES = {
    "pause": "paused",
    "resume": "resumed",
    "suspend": "suspended",
    "wake": "woken",
    "stop": "stopped",
    "start": "started",
    "snapshot": "copied to a snapshot",
    "fork": "forked",
}


def _held(sandbox: Sandbox, current: Operation, participle: str) -> Conflict:
    return Conflict(
        f"The sandbox is being {_PARTICIPLES.get(current.kind, 'changed')}: until that ends it cannot be {participle}.",
        code="busy",
        state=str(sandbox.state),
        operation_id=current.id,
        retry_after_s=BUSY_RETRY_S,
    )


def _joins(verb: str, current: Operation) -> bool:
    """Whether asking for ``verb`` means the same as the operation that runs.

    Each snapshot and each fork is one of its own; and what is only done to an idle sandbox may come to nothing.
    """
    step = current.request["verb"]
    if TRANSITIONS[step].stays or "if_idle_s" in current.request:
        return False
    return verb in {current.kind, step} or (verb == "wake" and TRANSITIONS[step].target == State.RUNNING)

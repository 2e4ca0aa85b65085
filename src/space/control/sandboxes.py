"""Sandboxes as their owners see them, and the recording of what is asked for. Carrying it out is the runner's."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from space.control import once, templates, transitions
from space.control.control import Control
from space.control.leases import Seat
from space.control.once import Once
from space.control.operations import new_operation
from space.control.tokens import Token
from space.errors import Conflict, InvalidRequest, LimitExceeded, NotFound
from space.model.ids import is_id, new_id
from space.model.operation import FINISHED, Operation, OperationState
from space.model.sandbox import RESTING, TRANSITIONS, WAKE_BY_STATE, OnIdle, OnTimeout, Resources, Sandbox, State
from space.store import operations, sandboxes
from space.store.paging import Position

BUSY_RETRY_S = 1
FULL_RETRY_S = 5


@dataclass(frozen=True, slots=True)
class NewSandbox:
    """What a caller asks for; the api has checked every field's form."""

    template: str
    resources: Resources
    name: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    driver: str | None = None
    timeout_s: float | None = None
    on_timeout: OnTimeout = "delete"
    idle_timeout_s: float | None = None
    on_idle: OnIdle = "suspend"
    wake_on_request: bool = False


async def request_create(
    control: Control, project_id: str, wanted: NewSandbox, asked_once: Once | None = None
) -> tuple[Sandbox, Operation]:
    """Record a new sandbox and the operation that will make it, in one transaction.

    With ``asked_once`` a repeated request gets the first one's sandbox and operation, as they are now.
    """
    _check_resources(control, wanted.resources)
    template = await templates.resolve(control, wanted.template)
    now = control.now()
    sandbox = Sandbox(
        id=new_id("sbx"),
        project_id=project_id,
        template=wanted.template,
        template_digest=template.digest,
        driver=wanted.driver or control.settings.driver or template.driver or "auto",
        state=State.CREATING,
        resources=wanted.resources,
        created_at=now,
        updated_at=now,
        name=wanted.name,
        metadata=wanted.metadata,
        env=wanted.env,
        timeout_s=wanted.timeout_s,
        on_timeout=wanted.on_timeout,
        idle_timeout_s=wanted.idle_timeout_s,
        on_idle=wanted.on_idle,
        wake_on_request=wanted.wake_on_request,
        details={"template_defaults": template.defaults},
    )
    with control.leases.reserve() as seat:
        operation = seat.lease(new_operation(control, sandbox, "create", {"verb": "create"}))
        made = replace(sandbox, operation_id=operation.id)

        def record(connection: Connection) -> tuple[Sandbox, Operation]:
            earlier = once.first(
                connection, asked_once, project_id, subject_id=made.id, operation_id=operation.id, now=now
            )
            if earlier is not None:
                return _earlier(connection, earlier)
            _check_room(control, connection)
            sandboxes.add(connection, made)
            operations.add(connection, operation)
            transitions.tell(connection, made, now)
            return made, operation

        result = await control.store.write(record)
        if result[1].id == operation.id:
            seat.start(operation, made)
            control.changes.notify(project_id)
    return result


async def request(
    control: Control,
    project_id: str,
    sandbox_id: str,
    verb: str,
    *,
    due: Sandbox | None = None,
) -> tuple[Sandbox, Operation]:
    """Record a lifecycle verb and return the sandbox and the operation that carries it out.

    The same verb asked while its operation runs joins that one. ``wake`` of a running sandbox has succeeded at once,
    and ``delete`` is taken in every state. ``due`` asks that the sandbox's deadline still be the one seen there.
    Raises ``NotFound``, or ``Conflict`` with the state.
    """
    if not is_id("sbx", sandbox_id):
        raise _not_found()
    now, operation_id = control.now(), new_id("op")
    with control.leases.reserve() as seat:

        def record(connection: Connection) -> tuple[Sandbox, Operation]:
            seen = _owned(sandboxes.get(connection, sandbox_id, lock=True), project_id)
            if due is not None and seen.deadline_at != due.deadline_at:
                raise Conflict("The deadline was renewed.", code="deadline-renewed")
            return _Request(control, connection, seat, now, operation_id).record(seen, verb)

        sandbox, operation = await control.store.write(record)
        if operation.id == operation_id and operation.state not in FINISHED:
            seat.start(operation, sandbox)
        control.changes.notify(project_id)
        control.changes.notify(operation.id)
    return sandbox, operation


async def get(control: Control, project_id: str, sandbox_id: str) -> Sandbox:
    """Return one of the project's sandboxes. Another project's, a deleted and an unknown one are ``NotFound`` alike."""
    found = None
    if is_id("sbx", sandbox_id):
        found = await control.store.read(lambda connection: sandboxes.get(connection, sandbox_id))
    return _owned(found, project_id)


async def page(
    control: Control,
    project_id: str,
    *,
    states: Collection[State],
    metadata: Mapping[str, str],
    after: Position | None,
    limit: int,
) -> list[Sandbox]:
    return await control.store.read(
        lambda connection: sandboxes.page(
            connection, project_id, states=states, metadata=metadata, after=after, limit=limit
        )
    )


async def change(control: Control, project_id: str, sandbox_id: str, wanted: Mapping[str, Any]) -> Sandbox:
    """Change name, metadata, deadline or idle policy; ``timeout_s`` sets the deadline anew, counted from now."""
    now = control.now()

    def record(connection: Connection) -> Sandbox:
        seen = _owned(sandboxes.get(connection, sandbox_id, lock=True), project_id)
        values = dict(wanted)
        if "timeout_s" in values:
            fresh = replace(seen, timeout_s=values["timeout_s"], deadline_at=None)
            values["deadline_at"] = transitions.deadline(fresh, now, seen.state)
        changed = None
        if seen.state != State.DELETING:
            changed = sandboxes.change(connection, seen, updated_at=now, **values)
        if changed is None:
            raise wrong_state(seen, "changed")
        return changed

    if not is_id("sbx", sandbox_id):
        raise _not_found()
    return await control.store.write(record)


def grant_access(control: Control, sandbox: Sandbox) -> Token:
    """Return a token for the sandbox's data plane."""
    return control.signer.for_sandbox(sandbox.id, control.now())


def wrong_state(sandbox: Sandbox, participle: str) -> Conflict:
    """Say that a sandbox cannot be ``participle`` now; retrying helps only while it is between two states."""
    if sandbox.state in RESTING:
        return Conflict(
            f"A sandbox that is {sandbox.state} cannot be {participle}.", code="wrong-state", state=str(sandbox.state)
        )
    return Conflict(
        f"The sandbox is {sandbox.state}: it cannot be {participle} until that has ended.",
        code="busy",
        state=str(sandbox.state),
        operation_id=sandbox.operation_id,
        retry_after_s=BUSY_RETRY_S,
    )


@dataclass(frozen=True)
class _Request:
    """One verb being recorded, inside its transaction."""

    control: Control
    connection: Connection
    seat: Seat
    now: datetime
    operation_id: str

    def record(self, seen: Sandbox, verb: str) -> tuple[Sandbox, Operation]:
        current = None
        if seen.state not in RESTING and seen.operation_id is not None:
            current = operations.get(self.connection, seen.operation_id)
        if current is not None and current.state not in FINISHED and _joins(verb, current):
            return seen, current
        if verb != "delete" and seen.details.get("deleting"):
            # Its deletion was accepted and failed; it is taken up again until it has succeeded.
            raise Conflict("The sandbox is being deleted.", code="wrong-state", state=str(seen.state))
        if verb == "delete":
            return self._delete(seen, current)
        if verb == "wake" and seen.state == State.RUNNING:
            return seen, self._done_already(seen, verb)
        step = WAKE_BY_STATE.get(seen.state, verb) if verb == "wake" else verb
        transition = TRANSITIONS[step]
        if seen.state not in transition.sources:
            raise wrong_state(seen, _PARTICIPLES[verb])
        asked = {"verb": step, "from": str(seen.state), "ready": seen.ready}
        return self._move(seen, verb, asked, transition.passing)

    def _delete(self, seen: Sandbox, current: Operation | None) -> tuple[Sandbox, Operation]:
        asked: dict[str, Any] = {"verb": "delete", "from": str(seen.state)}
        if current is not None and current.state not in FINISHED and not self._cancel(current):
            # Its runner must have let go of the machine before the machine is destroyed.
            asked["after"] = current.id
        return self._move(seen, "delete", asked, State.DELETING)

    def _cancel(self, current: Operation) -> bool:
        """Cancel an operation that nobody has begun; False when somebody has."""
        if current.state != OperationState.PENDING:
            return False
        return operations.finish(self.connection, current, OperationState.CANCELLED, now=self.now) is not None

    def _move(self, seen: Sandbox, kind: str, asked: dict[str, Any], passing: State) -> tuple[Sandbox, Operation]:
        operation = self.seat.lease(self._operation(seen, kind, asked))
        operations.add(self.connection, operation)
        moved = transitions.move(
            self.connection,
            seen,
            self.now,
            state=passing,
            ready=False,
            operation_id=operation.id,
        )
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
}


def _joins(verb: str, current: Operation) -> bool:
    """Whether asking for ``verb`` means the same as the operation that runs."""
    step = current.request["verb"]
    return verb in {current.kind, step} or (verb == "wake" and TRANSITIONS[step].target == State.RUNNING)


def _earlier(connection: Connection, record: Any) -> tuple[Sandbox, Operation]:
    sandbox = sandboxes.get(connection, record.subject_id)
    operation = operations.get(connection, record.operation_id)
    if sandbox is None or operation is None:
        raise _not_found()
    return sandbox, operation


def _owned(found: Sandbox | None, project_id: str) -> Sandbox:
    if found is None or found.project_id != project_id or found.state == State.DELETED:
        raise _not_found()
    return found


def _not_found() -> NotFound:
    return NotFound("There is no such sandbox.")


def _check_resources(control: Control, resources: Resources) -> None:
    settings = control.settings
    for name, value, most in (
        ("cpus", resources.cpus, settings.cpus_max),
        ("memory_mib", resources.memory_mib, settings.memory_mib_max),
        ("disk_mib", resources.disk_mib, settings.disk_mib_max),
        ("pids", resources.pids, settings.pids_max),
    ):
        if value > most:
            raise InvalidRequest(
                f"resources.{name} may be at most {most:g} here.", field=f"resources.{name}", maximum=most
            )


def _check_room(control: Control, connection: Connection) -> None:
    most = control.settings.sandboxes_max
    if sum(sandboxes.count_by_state(connection).values()) >= most:
        raise LimitExceeded(
            f"There are {most} sandboxes, which is the limit here. Delete one first.",
            code="sandboxes-max",
            limit=most,
            retry_after_s=FULL_RETRY_S,
        )

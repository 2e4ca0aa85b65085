"""The runner: takes operations over by lease, carries them out side by side, and keeps the leases while it does.

Killed at any moment, it leaves operations whose owner is dead; the next runner finds them at its start.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from space import tracing
from space.control import forks, lifecycle
from space.control.control import Control
from space.control.leases import RENEW_S, is_dead
from space.errors import SpaceError
from space.model.operation import Operation
from space.model.sandbox import Sandbox
from space.store import operations

log = structlog.get_logger(__name__)

POLL_S = 1.0
DRAIN_S = 5.0


class Runner:
    """Carries operations out until it is cancelled. One per process."""

    def __init__(self, control: Control, finished: Callable[[Operation], None] = lambda _: None) -> None:
        """``finished`` is told of every operation that this runner brought to its end."""
        self._control = control
        self._leases = control.leases
        self._finished = finished

    async def run(self) -> None:
        """Run until cancelled; leases still held then are given back, so that another runner need not wait for them."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._take_handed_over(group))
                group.create_task(self._forever(lambda: self._claim(group)))
                group.create_task(self._forever(self._renew, RENEW_S))
        finally:
            await self._release()

    async def _take_handed_over(self, group: asyncio.TaskGroup) -> None:
        while True:
            operation, sandbox = await self._leases.handed_over.get()
            self._start(group, operation, sandbox)

    async def _claim(self, group: asyncio.TaskGroup) -> None:
        """Lease what is waiting in the store, as far as there are seats; then wait for more."""
        control, leases = self._control, self._leases
        if leases.free > 0:
            known = await control.store.read(operations.owners)
            dead = {owner for owner in known if owner != leases.owner and is_dead(owner)}
            limit = leases.free
            claimed = await control.store.write(
                lambda connection: operations.claim(
                    connection,
                    leases.owner,
                    now=control.now(),
                    until=leases.until(),
                    dead_owners=dead,
                    besides=set(leases.running),
                    limit=limit,
                )
            )
            leases.claimed(len(claimed), limit)
            for operation in claimed:
                leases.take()
                self._start(group, operation)
        await leases.wait_for_pending(POLL_S)

    def _start(self, group: asyncio.TaskGroup, operation: Operation, sandbox: Sandbox | None = None) -> None:
        task = group.create_task(self._carry_out(operation, sandbox))
        self._leases.running[operation.id] = task

    async def _carry_out(self, operation: Operation, sandbox: Sandbox | None) -> None:
        leases = self._leases
        begin_work(operation)
        try:
            with tracing.Span(
                f"operation {operation.kind}", attributes={"space.verb": str(operation.request["verb"])}
            ) as span:
                carry_out = forks.carry_out if operation.kind == "fork" else lifecycle.carry_out
                ended = await carry_out(self._control, operation, sandbox)
                if ended is not None and ended.error is not None:
                    span.fail(ended.error.code)
            if ended is not None:
                self._finished(ended)
                log.info("operation", kind=ended.kind, state=str(ended.state), seconds=ended.timings.get("total"))
        except SpaceError as error:
            # The store cannot be reached: the lease lapses and the operation is taken up again.
            log.warning("operation-left", operation=operation.id, code=error.code)
        except Exception as error:
            log.exception("operation-left", operation=operation.id, error=type(error).__name__)
        finally:
            leases.running.pop(operation.id, None)
            leases.give_back()

    async def _renew(self) -> None:
        ids = set(self._leases.running)
        if not ids:
            return
        held = await self._control.store.write(
            lambda connection: operations.renew(connection, self._leases.owner, ids, self._leases.until())
        )
        for lost in ids - held:
            task = self._leases.running.get(lost)
            if task is not None and await self._is_lost(lost):
                task.cancel()

    async def _is_lost(self, operation_id: str) -> bool:
        found = await self._control.store.read(lambda connection: operations.get(connection, operation_id))
        return found is None or found.lease_owner not in {None, self._leases.owner}

    async def _forever(self, step: Callable[[], Awaitable[None]], every_s: float = 0) -> None:
        while True:
            try:
                await step()
            except SpaceError as error:
                log.warning("runner-step-failed", code=error.code)
                await asyncio.sleep(POLL_S)
            except Exception as error:
                log.exception("runner-step-broke", error=type(error).__name__)
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(every_s)

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                await asyncio.shield(
                    self._control.store.write(lambda connection: operations.release(connection, self._leases.owner))
                )
        except (SpaceError, TimeoutError):
            log.warning("leases-not-released")


def begin_work(operation: Operation) -> None:
    """Let what follows in this task carry the operation, and the request that has asked for it, if a request has."""
    origin = operation.request.get("origin", {})
    tracing.begin(
        trace=tracing.parse(origin.get("trace")),
        request_id=origin.get("request_id"),
        operation=operation.id,
        sandbox=operation.sandbox_id,
    )

"""Taking an installation down in good order: every sandbox that has a machine is stopped, as its owner could ask."""

import asyncio
import time

from sqlalchemy import Connection

from space.api.server import open_control
from space.control import verbs
from space.control.control import Control
from space.control.runner import Runner
from space.errors import SpaceError
from space.model.operation import FINISHED
from space.model.sandbox import TRANSITIONS, Sandbox
from space.settings import Settings
from space.store import operations, sandboxes

POLL_S = 0.05


async def stop_all(settings: Settings, wait_s: float) -> tuple[int, int]:
    """Stop all sandboxes that run or are paused; return how many did, and how many did not within ``wait_s``.

    Runs beside the api or without it (the operations are recorded and leased as any others); needs node and broker.
    """
    async with open_control(settings) as control, asyncio.TaskGroup() as group:
        runner = group.create_task(Runner(control).run())
        try:
            return await _stop_all(control, time.monotonic() + wait_s)
        finally:
            runner.cancel()


async def _stop_all(control: Control, deadline: float) -> tuple[int, int]:
    sources = TRANSITIONS["stop"].sources
    present = await control.store.read(sandboxes.all_present)
    wanted = [sandbox for sandbox in present.values() if sandbox.state in sources]
    stopping = [await _request(control, sandbox, deadline) for sandbox in wanted]
    asked = [operation_id for operation_id in stopping if operation_id is not None]

    def unfinished(connection: Connection) -> bool:
        found = (operations.get(connection, operation_id) for operation_id in asked)
        return any(operation is not None and operation.state not in FINISHED for operation in found)

    while time.monotonic() < deadline:
        if not await control.store.read(unfinished):
            break
        await asyncio.sleep(POLL_S)
    after = await control.store.read(sandboxes.all_present)
    left = sum(sandbox.id in after and after[sandbox.id].state in sources for sandbox in wanted)
    return len(wanted) - left, left


async def _request(control: Control, sandbox: Sandbox, deadline: float) -> str | None:
    """Ask for one stop, again while something else holds the sandbox; None when it cannot be stopped any more."""
    while time.monotonic() < deadline:
        try:
            _, operation = await verbs.request(control, sandbox.project_id, sandbox.id, "stop")
        except SpaceError as error:
            if not error.retryable and error.code != "busy":
                return None
            await asyncio.sleep(POLL_S)
        else:
            return operation.id
    return None

"""Snapshots: make one, look at them, delete one."""

from collections.abc import AsyncIterator

from space.sdk._async.operations import AsyncOperations, pages
from space.sdk._async.transport import AsyncTransport
from space.sdk.requests import HELD_S_MAX, READ_TIMEOUT_S, Request, creating, present
from space.sdk.types import Operation, Snapshot, SnapshotKind, SnapshotState


class AsyncSnapshots:
    """``client.snapshots``. Make one with ``sandbox.snapshot()``."""

    def __init__(self, transport: AsyncTransport, operations: AsyncOperations) -> None:
        self._transport = transport
        self._operations = operations

    async def create(
        self, sandbox_id: str, *, name: str | None = None, kind: SnapshotKind = "full", wait_s: float | None = 300.0
    ) -> Snapshot:
        """Keep a sandbox's present state; see ``sandbox.snapshot()``."""
        held_s = min(wait_s, HELD_S_MAX) if wait_s else None
        request = Request(
            method="POST",
            path=f"/v1/sandboxes/{sandbox_id}/snapshots",
            body=present(name=name, kind=kind),
            headers=creating(wait_s=held_s),
            read_s=READ_TIMEOUT_S + (held_s or 0),
        )
        answer = await self._transport.call(request)
        made, operation = Snapshot.parse(answer["snapshot"]), Operation.parse(answer["operation"])
        if not wait_s or made.state == "ready":
            return made
        await self._operations.wait(operation, timeout_s=wait_s)
        return await self.get(made.id)

    async def get(self, snapshot_id: str) -> Snapshot:
        """Return a snapshot as it is now."""
        answer = await self._transport.call(Request(method="GET", path=f"/v1/snapshots/{snapshot_id}"))
        return Snapshot.parse(answer)

    async def list(
        self, *, name: str | None = None, sandbox_id: str | None = None, state: SnapshotState | None = None
    ) -> AsyncIterator[Snapshot]:
        """Yield the project's snapshots that match all that is given, newest first."""
        async for item in pages(
            self._transport, "/v1/snapshots", present(name=name, sandbox_id=sandbox_id, state=state)
        ):
            yield Snapshot.parse(item)

    async def delete(self, snapshot: Snapshot | str) -> None:
        """Delete a snapshot. Sandboxes that were made from it live on."""
        snapshot_id = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        await self._transport.call(Request(method="DELETE", path=f"/v1/snapshots/{snapshot_id}"))

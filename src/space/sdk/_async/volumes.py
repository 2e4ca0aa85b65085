"""Volumes: directories that outlive sandboxes, and that several of them mount."""

from collections.abc import AsyncIterator

from space.sdk._async.operations import pages
from space.sdk._async.transport import AsyncTransport
from space.sdk.requests import Request, creating, present
from space.sdk.volumes import Volume


class AsyncVolumes:
    """``client.volumes``. `SandboxOptions.volumes` mounts them."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, name: str, *, size_mib: int | None = None) -> Volume:
        """Make a volume that holds so much; its name is the project's only one."""
        body = present(name=name, size_mib=size_mib)
        request = Request(method="POST", path="/v1/volumes", body=body, headers=creating())
        return Volume.parse(await self._transport.call(request))

    async def list(self) -> AsyncIterator[Volume]:
        """Yield the project's volumes, newest first."""
        async for item in pages(self._transport, "/v1/volumes", {}):
            yield Volume.parse(item)

    async def get(self, name: str) -> Volume:
        """Return a volume."""
        return Volume.parse(await self._transport.call(Request(method="GET", path=f"/v1/volumes/{name}")))

    async def delete(self, name: str) -> None:
        """Delete a volume with all that is in it. Raises ``Conflict`` (``volume-in-use``) while a sandbox mounts it."""
        await self._transport.call(Request(method="DELETE", path=f"/v1/volumes/{name}"))

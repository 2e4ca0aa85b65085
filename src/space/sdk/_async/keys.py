"""API keys of the project."""

from collections.abc import AsyncIterator

from space.sdk._async.operations import pages
from space.sdk._async.transport import AsyncTransport
from space.sdk.admin import ApiKey
from space.sdk.requests import Request, creating, present


class AsyncKeys:
    """``client.keys``."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, name: str | None = None) -> ApiKey:
        """Make a key. Its secret is in ``key`` of this answer and nowhere else, ever."""
        request = Request(method="POST", path="/v1/keys", body=present(name=name), headers=creating())
        return ApiKey.parse(await self._transport.call(request))

    async def list(self) -> AsyncIterator[ApiKey]:
        """Yield the project's keys, without their secrets."""
        async for item in pages(self._transport, "/v1/keys", {}):
            yield ApiKey.parse(item)

    async def revoke(self, key_id: str) -> None:
        """Make a key worthless at once."""
        await self._transport.call(Request(method="DELETE", path=f"/v1/keys/{key_id}"))

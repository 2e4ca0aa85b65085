"""Webhooks: who is told of the project's events."""

from collections.abc import AsyncIterator, Sequence

from space.sdk._async.operations import pages
from space.sdk._async.transport import AsyncTransport
from space.sdk.requests import Request, creating
from space.sdk.webhooks import Delivery, Webhook


class AsyncWebhooks:
    """``client.webhooks``."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, url: str, *, events: Sequence[str] = (), description: str = "") -> Webhook:
        """Make a webhook, told of everything or of ``events`` alone. Its ``secret`` is in this answer only."""
        body = {"url": url, "events": list(events), "description": description}
        request = Request(method="POST", path="/v1/webhooks", body=body, headers=creating())
        return Webhook.parse(await self._transport.call(request))

    async def get(self, webhook_id: str) -> Webhook:
        """Return a webhook, and how its deliveries go."""
        return Webhook.parse(await self._transport.call(Request(method="GET", path=f"/v1/webhooks/{webhook_id}")))

    async def list(self) -> AsyncIterator[Webhook]:
        """Yield the project's webhooks, newest first."""
        async for item in pages(self._transport, "/v1/webhooks", {}):
            yield Webhook.parse(item)

    async def delete(self, webhook_id: str) -> None:
        """Delete a webhook: nothing more is sent."""
        await self._transport.call(Request(method="DELETE", path=f"/v1/webhooks/{webhook_id}"))

    async def test(self, webhook_id: str) -> Delivery:
        """Send it a message now, and return what became of that. If it arrives, a disabled webhook is enabled again."""
        answer = await self._transport.call(Request(method="POST", path=f"/v1/webhooks/{webhook_id}/test"))
        return Delivery.parse(answer)

    async def deliveries(self, webhook_id: str) -> AsyncIterator[Delivery]:
        """Yield the latest attempts, newest first."""
        async for item in pages(self._transport, f"/v1/webhooks/{webhook_id}/deliveries", {}):
            yield Delivery.parse(item)

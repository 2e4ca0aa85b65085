# Generated from ../_async/webhooks.py by scripts/sync-sdk; change that one.
"""Webhooks: who is told of the project's events."""

from collections.abc import Iterator, Sequence

from space.sdk._sync.operations import pages
from space.sdk._sync.transport import Transport
from space.sdk.requests import Request, creating
from space.sdk.webhooks import Delivery, Webhook


class Webhooks:
    """``client.webhooks``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, url: str, *, events: Sequence[str] = (), description: str = "") -> Webhook:
        """Make a webhook, told of everything or of ``events`` alone. Its ``secret`` is in this answer only."""
        body = {"url": url, "events": list(events), "description": description}
        request = Request(method="POST", path="/v1/webhooks", body=body, headers=creating())
        return Webhook.parse(self._transport.call(request))

    def get(self, webhook_id: str) -> Webhook:
        """Return a webhook, and how its deliveries go."""
        return Webhook.parse(self._transport.call(Request(method="GET", path=f"/v1/webhooks/{webhook_id}")))

    def list(self) -> Iterator[Webhook]:
        """Yield the project's webhooks, newest first."""
        for item in pages(self._transport, "/v1/webhooks", {}):
            yield Webhook.parse(item)

    def delete(self, webhook_id: str) -> None:
        """Delete a webhook: nothing more is sent."""
        self._transport.call(Request(method="DELETE", path=f"/v1/webhooks/{webhook_id}"))

    def test(self, webhook_id: str) -> Delivery:
        """Send it a message now, and return what became of that. If it arrives, a disabled webhook is enabled again."""
        answer = self._transport.call(Request(method="POST", path=f"/v1/webhooks/{webhook_id}/test"))
        return Delivery.parse(answer)

    def deliveries(self, webhook_id: str) -> Iterator[Delivery]:
        """Yield the latest attempts, newest first."""
        for item in pages(self._transport, f"/v1/webhooks/{webhook_id}/deliveries", {}):
            yield Delivery.parse(item)

"""HTTP for webhooks: make, look, test, delete, and what was delivered."""

from fastapi import Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import IdempotencyKey, control_of, once, reply
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.api.webhook_schemas import (
    DeliveryPage,
    WebhookCreate,
    WebhookCreated,
    WebhookPage,
    delivery_out,
    webhook_out,
)
from space.control import webhooks
from space.control.webhooks import NewWebhook


async def create(request: Request, body: WebhookCreate, idempotency_key: IdempotencyKey = None) -> Response:
    """Make a webhook: it is sent every event from now on. Its secret is shown in this answer only."""
    wanted = NewWebhook(body.url, body.events, body.description)
    asked_once = await once(request, idempotency_key)
    made, secret = await webhooks.request_webhook(control_of(request), caller(request).project_id, wanted, asked_once)
    return reply(WebhookCreated(**webhook_out(made).model_dump(), secret=secret), 201)


async def page(request: Request, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None) -> Response:
    """List the project's webhooks, newest first."""
    found = await webhooks.page(control_of(request), caller(request).project_id, after=position(cursor), limit=limit)
    return reply(WebhookPage(items=[webhook_out(w) for w in found], next_cursor=next_cursor(found, limit)))


async def get(request: Request, webhook_id: str) -> Response:
    """One webhook, and how its deliveries go."""
    return reply(webhook_out(await webhooks.get(control_of(request), caller(request).project_id, webhook_id)))


async def delete(request: Request, webhook_id: str) -> Response:
    """Delete a webhook: nothing more is sent."""
    await webhooks.remove(control_of(request), caller(request).project_id, webhook_id)
    return Response(status_code=204)


async def test(request: Request, webhook_id: str) -> Response:
    """Send a `webhook.test` now and say what became of it. If it arrives, a disabled webhook is enabled again."""
    control = control_of(request)
    webhook = await webhooks.get(control, caller(request).project_id, webhook_id)
    return reply(delivery_out(await webhooks.test(control, webhook)))


async def deliveries(
    request: Request, webhook_id: str, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None
) -> Response:
    """List the latest attempts, newest first: at most 100, of the last 7 days."""
    control = control_of(request)
    webhook = await webhooks.get(control, caller(request).project_id, webhook_id)
    found = await webhooks.page_deliveries(control, webhook, after=position(cursor), limit=limit)
    return reply(DeliveryPage(items=[delivery_out(d) for d in found], next_cursor=next_cursor(found, limit)))

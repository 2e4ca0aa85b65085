"""Webhooks as their owners see them, and what they are sent, as Standard Webhooks has it. Delivering is `deliveries`'.

The secret of a webhook is derived from a key of the installation and the webhook's id, so the store has no secrets.
"""

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sqlalchemy import Connection

from space.control import once
from space.control.changes import WEBHOOKS
from space.control.control import Control
from space.control.keyfile import kept
from space.control.once import Once
from space.control.outbound import check_url
from space.errors import InvalidRequest, LimitExceeded, NotFound
from space.model.event import Event
from space.model.ids import is_id, new_id
from space.model.webhook import KINDS, TEST_TYPE, Delivery, Webhook, type_of, unknown
from space.store import webhooks
from space.store.paging import Position

WEBHOOKS_MAX = 16
"""Of one project."""
TESTS_MAX = 4
"""At once, of everybody."""
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class NewWebhook:
    """What a caller asks for; the api has checked the form of all but the URL and the events."""

    url: str
    events: Sequence[str]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """What is posted: a body, and the headers that prove whose it is."""

    id: str
    type: str
    body: bytes


async def request_webhook(
    control: Control, project_id: str, wanted: NewWebhook, asked_once: Once | None = None
) -> tuple[Webhook, str]:
    """Make a webhook that is told of everything from now on; return it and its secret, shown here only.

    Raises ``InvalidRequest`` for a URL or events that cannot be, ``LimitExceeded`` when the project has too many.
    """
    check_url(wanted.url, control.outbound.allowed)
    if wrong := unknown(wanted.events):
        raise InvalidRequest(f"events: There are no events called {wrong[0]}.", field="events", events=sorted(KINDS))
    now, webhook_id = control.now(), new_id("whk")

    def record(connection: Connection) -> Webhook:
        latest = webhooks.lock_project(connection, project_id)
        earlier = once.first(connection, asked_once, project_id, subject_id=webhook_id, now=now)
        if earlier is not None:
            return _owned(webhooks.get(connection, earlier.subject_id), project_id)
        if webhooks.count(connection, project_id) >= WEBHOOKS_MAX:
            raise LimitExceeded(
                f"A project may have {WEBHOOKS_MAX} webhooks. Delete one first.",
                code="webhooks-max",
                limit=WEBHOOKS_MAX,
            )
        made = Webhook(
            webhook_id, project_id, wanted.url, tuple(wanted.events), wanted.description, cursor=latest, created_at=now
        )
        webhooks.add(connection, made)
        return made

    made = await control.store.write(record)
    control.changes.notify(WEBHOOKS)
    return made, secret_of(control, made.id)


async def get(control: Control, project_id: str, webhook_id: str) -> Webhook:
    """Return one of the project's webhooks, or raise ``NotFound``."""
    found = None
    if is_id("whk", webhook_id):
        found = await control.store.read(lambda connection: webhooks.get(connection, webhook_id))
    return _owned(found, project_id)


async def page(control: Control, project_id: str, *, after: Position | None, limit: int) -> list[Webhook]:
    return await control.store.read(lambda connection: webhooks.page(connection, project_id, after=after, limit=limit))


async def remove(control: Control, project_id: str, webhook_id: str) -> None:
    """Delete a webhook; an attempt under way may still arrive. Raises ``NotFound``."""
    removed = is_id("whk", webhook_id) and await control.store.write(
        lambda connection: webhooks.remove(connection, webhook_id, project_id)
    )
    if not removed:
        raise _not_found()


async def page_deliveries(control: Control, webhook: Webhook, *, after: Position | None, limit: int) -> list[Delivery]:
    """Return the latest attempts, newest first."""
    return await control.store.read(
        lambda connection: webhooks.page_deliveries(connection, webhook.id, after=after, limit=limit)
    )


async def test(control: Control, webhook: Webhook) -> Delivery:
    """Send a message of its own kind now. If it arrives, what waits for the webhook is delivered at once, too."""
    if control.outbound.testing >= TESTS_MAX:
        raise LimitExceeded("Other webhooks are being tested.", code="too-many-tests", limit=TESTS_MAX, retry_after_s=1)
    now = control.now()
    message = Message(f"msg_{webhook.id}_test{secrets.token_hex(8)}", TEST_TYPE, _body(TEST_TYPE, now, {}))
    control.outbound.testing += 1
    try:
        made = await attempt(control, webhook, message, number=1)
    finally:
        control.outbound.testing -= 1

    def record(connection: Connection) -> None:
        if webhooks.get(connection, webhook.id) is None:
            return
        webhooks.note(connection, made)
        if made.reason is None:
            webhooks.revive(connection, webhook.id)

    await control.store.write(record)
    control.changes.notify(WEBHOOKS)
    return made


async def attempt(control: Control, webhook: Webhook, message: Message, *, number: int) -> Delivery:
    """Post a message once and say what became of it."""
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "SPACE-Webhooks/1",
        **signed(secret_of(control, webhook.id), message, control.now()),
    }
    sent = await control.outbound.post(webhook.url, headers, message.body)
    return Delivery(
        id=new_id("dlv"),
        webhook_id=webhook.id,
        message_id=message.id,
        type=message.type,
        attempt=number,
        outcome="delivered" if sent.good else "failed",
        reason=sent.reason,
        status=sent.status,
        seconds=round(sent.seconds, 6),
        created_at=control.now(),
    )


def message_of(webhook: Webhook, event: Event) -> Message:
    """Return what tells of an event. The id is the same however often it is tried, so a receiver can tell."""
    kind = type_of(event)
    body = _body(kind, event.created_at, event.data, number=event.number)
    return Message(f"msg_{webhook.id}_{event.number}", kind, body)


def secret_of(control: Control, webhook_id: str) -> str:
    """Return the webhook's secret, in the form in which it is shown."""
    key = kept(control.settings.api_dir / "webhook.key", lambda: secrets.token_bytes(KEY_BYTES))
    derived = HKDF(SHA256(), KEY_BYTES, salt=None, info=f"space webhook {webhook_id}".encode()).derive(key)
    return "whsec_" + base64.b64encode(derived).decode()


def signed(secret: str, message: Message, now: datetime) -> dict[str, str]:
    """Return the three headers of Standard Webhooks."""
    stamp = str(int(now.timestamp()))
    content = f"{message.id}.{stamp}.".encode() + message.body
    digest = hmac.digest(base64.b64decode(secret.removeprefix("whsec_")), content, hashlib.sha256)
    return {
        "webhook-id": message.id,
        "webhook-timestamp": stamp,
        "webhook-signature": "v1," + base64.b64encode(digest).decode(),
    }


def _body(kind: str, at: datetime, data: dict[str, Any], **more: int) -> bytes:
    message = {"type": kind, "timestamp": at.isoformat().replace("+00:00", "Z"), **more, "data": data}
    return json.dumps(message, separators=(",", ":")).encode()


def _owned(found: Webhook | None, project_id: str) -> Webhook:
    if found is None or found.project_id != project_id:
        raise _not_found()
    return found


def _not_found() -> NotFound:
    return NotFound("There is no such webhook.")

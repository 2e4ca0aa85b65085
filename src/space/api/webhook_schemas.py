"""What requests and answers about webhooks look like."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from space.api.bodies import Body
from space.api.schemas import Out, Page
from space.control.outbound import URL_CHARS_MAX
from space.model.webhook import DISABLED, KINDS, Delivery, Webhook

EventName = Annotated[str, StringConstraints(max_length=48)]


class WebhookCreate(Body):
    """A receiver of the project's events, as Standard Webhooks has it."""

    url: Annotated[str, StringConstraints(min_length=1, max_length=URL_CHARS_MAX)]
    """An https:// URL at a public address."""
    events: Annotated[list[EventName], Field(default_factory=list, max_length=len(KINDS))]
    """Kinds of events, such as `sandbox` or `sandbox.failed`; an empty list: all of them."""
    description: Annotated[str, StringConstraints(max_length=256, pattern=r"^[^\x00]*$")] = ""


class DisabledOut(Out):
    """Why and since when a webhook is told nothing any more. A test that arrives enables it again."""

    reason: Literal["failing", "gone"]
    message: str
    at: datetime


class WebhookOut(Out):
    """One receiver of events. `failures` counts attempts in a row; the next one is at `next_attempt_at`."""

    id: str
    url: str
    events: list[str]
    description: str
    failures: int
    failing_since: datetime | None
    next_attempt_at: datetime | None
    given_up: int
    """Events that became too old, or were removed, before they could be delivered."""
    disabled: DisabledOut | None
    created_at: datetime


class WebhookCreated(WebhookOut):
    """A webhook that was just made; `secret` signs what it is sent, and is shown here only."""

    secret: str


class DeliveryOut(Out):
    """One attempt. `reason` says why it failed; of an answer only the status is kept."""

    id: str
    message_id: str
    type: str
    attempt: int
    outcome: Literal["delivered", "failed"]
    reason: Literal["status", "timeout", "address-refused", "name-unknown", "connect", "tls", "protocol"] | None
    status: int | None
    seconds: float
    created_at: datetime


class WebhookPage(Page):
    items: list[WebhookOut]


class DeliveryPage(Page):
    items: list[DeliveryOut]


def webhook_out(webhook: Webhook) -> WebhookOut:
    disabled = None
    if webhook.disabled_at is not None:
        reason = webhook.disabled_reason or "failing"
        disabled = DisabledOut.model_validate(
            {"reason": reason, "message": DISABLED[reason], "at": webhook.disabled_at}
        )
    return WebhookOut(
        id=webhook.id,
        url=webhook.url,
        events=list(webhook.events),
        description=webhook.description,
        failures=webhook.failures,
        failing_since=webhook.failing_since,
        next_attempt_at=webhook.next_at,
        given_up=webhook.given_up,
        disabled=disabled,
        created_at=webhook.created_at,
    )


def delivery_out(delivery: Delivery) -> DeliveryOut:
    return DeliveryOut.model_validate(delivery)

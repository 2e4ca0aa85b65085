"""Tokens of OAuth 2.0: fetched here, outside every sandbox, ahead of their end; what fetches them is never placed.

Two ways, RFC 6749 §4.4 (client credentials) and §6 (refresh). The server's address is a customer's: requests go as
`outbound` lets them, to public addresses over TLS, and an answer is data of a stranger.
"""

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast
from urllib.parse import quote_plus, urlencode

import structlog
from sqlalchemy import Connection

from space.control import attachments
from space.control.control import Control
from space.control.outbound import Sent, check_url
from space.control.values import TOKEN, opened, sealed
from space.errors import InvalidRequest, SpaceError
from space.model.grant import SecretValue, check_value
from space.model.policy_fields import PolicyInvalid
from space.model.sandbox import Failure
from space.store import grants, policies, secrets
from space.store.secrets import Secret

log = structlog.get_logger(__name__)

NEEDED = ("token_url", "client_id")
MAY_HAVE = ("client_secret", "refresh_token", "scope", "audience", "client_auth")
CLIENT_AUTH = ("basic", "body")
FIELD_CHARS_MAX = 4096
REFRESH_TOKEN_CHARS_MAX = 8192
LIFETIME_S_DEFAULT = 3600.0
LIFETIME_S_MAX = 30 * 24 * 3600.0
AHEAD_S, AHEAD_PART = 60.0, 0.2
"""How long before its end a token is fetched anew: so much, or that part of its life where it is short."""
SOONEST_S = 5.0
CLAIM_S = 60.0
AT_ONCE, OF_A_PROJECT = 64, 4
"""How many are fetched side by side: a customer's server may take its time, and those of others have theirs."""
REFUSED = "token-refused"
RETRY_S, RETRY_S_MAX = 10.0, 600.0
_ERROR_CHARS_MAX = 64


@dataclass(frozen=True, slots=True)
class Token:
    """When a token that was just fetched ends, and when the next one is to be fetched."""

    expires_at: datetime
    refresh_at: datetime


async def first(control: Control, value: Mapping[str, Any]) -> tuple[dict[str, Any], Token]:
    """Return what of a new secret is kept, with its first token. Raises ``InvalidRequest`` when none can be had."""
    fields = _checked(control, value)
    sent = await _ask(control, fields)
    found = _read(sent)
    if isinstance(found, str):
        raise InvalidRequest(
            f"value.token_url: No token can be had there: {found}.", code="token-refused", field="value.token_url"
        )
    return _with_token(fields, found), _token(control, found)


async def refresh_due(control: Control) -> None:
    """Fetch the tokens that are about to end, and tell the sandboxes that have them."""
    now = control.now()
    until = now + timedelta(seconds=CLAIM_S)

    async def refresh(secret: Secret) -> None:
        if await control.store.write(lambda connection: secrets.claim(connection, secret, until)):
            try:
                await _refresh(control, secret)
            except SpaceError as error:
                log.warning("token-not-refreshed", secret=secret.id, code=error.code)

    due = await control.store.read(lambda connection: secrets.due(connection, now, AT_ONCE, OF_A_PROJECT))
    async with asyncio.TaskGroup() as group:
        for secret in due:
            group.create_task(refresh(secret))


async def _refresh(control: Control, secret: Secret) -> None:
    keys = await control.key_store.opening(secret.key_id)
    fields = opened(keys, secret)
    found = _read(await _ask(control, fields))
    now = control.now()
    if isinstance(found, str):
        pause_s = min(RETRY_S * 2 ** min(secret.failures, 10), RETRY_S_MAX)
        values: dict[str, Any] = {
            "failures": secret.failures + 1,
            "failure": Failure(REFUSED, f"The token could not be fetched: {found}."),
            "refresh_at": now + timedelta(seconds=pause_s),
        }
        log.warning("token-refused", secret=secret.id, reason=found, failures=secret.failures + 1)
        await control.store.write(lambda connection: secrets.change(connection, secret, **values))
        return
    token, sealing = _token(control, found), await control.key_store.sealing(make=False)
    values = {
        **sealed(sealing, secret, _with_token(fields, found)),
        "refresh_at": token.refresh_at,
        "token_expires_at": token.expires_at,
        "failures": 0,
        "failure": None,
    }

    def record(connection: Connection) -> list[str]:
        """A value that was given meanwhile, with a token of its own, stays; one that was only sealed anew does not."""
        fresh = secrets.by_id(connection, secret.id)
        if fresh is None or fresh.version != secret.version or secrets.change(connection, fresh, **values) is None:
            return []
        holders = grants.holders(connection, secret.id, now)
        policies.changed(connection, holders)
        return holders

    await attachments.confirm(control, await control.store.write(record))


def _checked(control: Control, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a secret of this kind, or raise ``InvalidRequest`` that shows none of them."""
    for name in value:
        if name not in NEEDED + MAY_HAVE:
            raise InvalidRequest(
                f"value: A secret of the kind oauth has {', '.join(NEEDED + MAY_HAVE)}, and nothing else.",
                field="value",
            )
    fields = {name: text for name, text in value.items() if text is not None}
    for name in NEEDED + MAY_HAVE:
        text = fields.get(name)
        if text is None and name not in NEEDED:
            continue
        most = REFRESH_TOKEN_CHARS_MAX if name == "refresh_token" else FIELD_CHARS_MAX
        if not isinstance(text, str) or not _is_text(text, most):
            raise InvalidRequest(
                f"value.{name}: It must be a text of 1 to {most} printable characters.", field=f"value.{name}"
            )
    if fields.setdefault("client_auth", "basic") not in CLIENT_AUTH:
        raise InvalidRequest("value.client_auth: It must be basic or body.", field="value.client_auth")
    if "client_secret" not in fields and "refresh_token" not in fields:
        raise InvalidRequest("value.client_secret: It or refresh_token is needed.", field="value.client_secret")
    try:
        check_url(fields["token_url"], control.token_servers.allowed)
    except InvalidRequest as error:
        text = error.message.removeprefix("url: ").replace("webhook_private_hosts", "egress_private_hosts")
        raise InvalidRequest(f"value.token_url: {text}", field="value.token_url") from None
    return fields


async def _ask(control: Control, fields: Mapping[str, Any]) -> Sent:
    refresh = fields.get("refresh_token")
    form = {"grant_type": "client_credentials"} if refresh is None else _refreshing(str(refresh))
    form |= {name: str(fields[name]) for name in ("scope", "audience") if name in fields}
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
    client, secret = str(fields["client_id"]), fields.get("client_secret")
    if secret is not None and fields["client_auth"] == "basic":
        # RFC 6749 §2.3.1: both are form-encoded first.
        pair = f"{quote_plus(client)}:{quote_plus(str(secret))}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    else:
        form |= {"client_id": client} | ({} if secret is None else {"client_secret": str(secret)})
    return await control.token_servers.ask(str(fields["token_url"]), headers, urlencode(form).encode())


def _refreshing(token: str) -> dict[str, str]:
    return {"grant_type": "refresh_token", "refresh_token": token}


def _read(sent: Sent) -> dict[str, Any] | str:
    """Return the answer with a token that can be placed, or why there is none; nothing else of it is repeated."""
    try:
        loaded: Any = json.loads(sent.body) if sent.body else {}
    except (ValueError, RecursionError):
        loaded = None
    answer = cast("dict[str, Any]", loaded) if isinstance(loaded, dict) else {}
    if sent.reason is not None:
        error = answer.get("error")
        known = isinstance(error, str) and error in _ERRORS
        return f"{sent.reason} {sent.status or ''}".strip() + (f" ({error})" if known else "")
    token, kind = answer.get(TOKEN), answer.get("token_type", "bearer")
    if not isinstance(token, str) or not isinstance(kind, str) or kind.lower() != "bearer":
        return "the answer has no bearer token"
    try:
        check_value(SecretValue("text", {"value": token}))
    except PolicyInvalid:
        return "the answer's token cannot be sent in a header"
    return answer


_ERRORS = frozenset(
    (
        "invalid_request",
        "invalid_client",
        "invalid_grant",
        "unauthorized_client",
        "unsupported_grant_type",
        "invalid_scope",
    )
)
"""Of RFC 6749: said to the caller; others could be anything."""


def _with_token(fields: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept: a refresh token that came along replaces the one that was used."""
    kept = {**fields, TOKEN: answer[TOKEN]}
    renewed = answer.get("refresh_token")
    if "refresh_token" in fields and isinstance(renewed, str) and _is_text(renewed, REFRESH_TOKEN_CHARS_MAX):
        kept["refresh_token"] = renewed
    return kept


def _is_text(text: str, most: int) -> bool:
    """Whether it is one that can be sent: halves of characters are not."""
    return 0 < len(text) <= most and text.isprintable()


def _token(control: Control, answer: Mapping[str, Any]) -> Token:
    told = answer.get("expires_in")
    if isinstance(told, str) and told.isascii() and told.isdecimal() and len(told) <= _ERROR_CHARS_MAX:
        told = float(told)
    lifetime_s = LIFETIME_S_DEFAULT
    if isinstance(told, int | float) and not isinstance(told, bool) and told > 0:
        lifetime_s = float(min(told, LIFETIME_S_MAX))  # in this order: an integer may be too large for a float
    ahead_s = min(AHEAD_S, lifetime_s * AHEAD_PART)
    now = control.now()
    return Token(now + timedelta(seconds=lifetime_s), now + timedelta(seconds=max(lifetime_s - ahead_s, SOONEST_S)))

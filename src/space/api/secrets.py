"""HTTP for secrets: values come in, and never out."""

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import IDEMPOTENCY_KEY, IdempotencyKey, control_of, reply
from space.api.egress_bodies import NameInPath, SecretCreate, SecretReplace
from space.api.egress_schemas import RotatedOut, SecretOut, SecretPage
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.control import secrets
from space.control.once import Once, fingerprint
from space.control.secrets import NewSecret, Shown
from space.errors import InvalidRequest


async def create(request: Request, body: SecretCreate, idempotency_key: IdempotencyKey = None) -> Response:
    """Keep a secret."""
    wanted = NewSecret(body.name, body.kind, body.value.fields, body.metadata)
    asked_once = await _once(request, wanted, idempotency_key)
    made = await secrets.request_secret(control_of(request), caller(request).project_id, wanted, asked_once)
    return reply(_out(made), 201)


async def page(request: Request, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None) -> Response:
    """List the project's secrets, newest first."""
    found = await secrets.page(control_of(request), caller(request).project_id, after=position(cursor), limit=limit)
    following = next_cursor([one.secret for one in found], limit)
    return reply(SecretPage(items=[_out(one) for one in found], next_cursor=following))


async def get(request: Request, name: str) -> Response:
    """One secret, without its value."""
    return reply(_out(await secrets.get(control_of(request), caller(request).project_id, name)))


async def replace(request: Request, name: NameInPath, body: SecretReplace) -> Response:
    """Give a secret its next value, or make it. When this is answered, every request to come gets the new value."""
    wanted = NewSecret(name, body.kind, body.value.fields, body.metadata)
    changed, is_new = await secrets.set_secret(control_of(request), caller(request).project_id, wanted)
    return reply(_out(changed), 201 if is_new else 200)


async def delete(request: Request, name: str) -> Response:
    """Delete a secret and revoke its grants. When this is answered, no request to come gets it."""
    await secrets.remove(control_of(request), caller(request).project_id, name)
    return Response(status_code=204)


async def rotate_key(request: Request) -> Response:
    """Seal everybody's secrets with a new key; with `secrets_key_command`, with the one that it tells first."""
    rotated = await secrets.rotate(control_of(request))
    return reply(RotatedOut.model_validate(rotated))


def _out(shown: Shown) -> SecretOut:
    secret = shown.secret
    told: dict[str, Any] = {
        name: getattr(secret, name)
        for name in ("name", "kind", "version", "metadata", "token_expires_at", "failure", "created_at", "updated_at")
    }
    return SecretOut.model_validate({**told, "grants": shown.grants})


async def _once(request: Request, wanted: NewSecret, key: str | None) -> Once | None:
    """Return the request as one that may be repeated. Of the value only what nobody can guess it from is remembered."""
    if key is None:
        return None
    if not IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidRequest(
            "Idempotency-Key: It must be 1 to 255 printable ASCII characters.", field="idempotency-key"
        )
    digest = await secrets.fingerprint_of(control_of(request), wanted.value)
    said = {"name": wanted.name, "kind": wanted.kind, "value": digest, "metadata": wanted.metadata}
    return Once(key, fingerprint(request.method, request.url.path, said))

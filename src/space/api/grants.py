"""HTTP for grants: which secrets are placed into which requests of a sandbox."""

from fastapi import Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import IdempotencyKey, control_of, once, reply
from space.api.egress_bodies import GrantBody
from space.api.egress_schemas import GrantOut, GrantPage
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.control import grants
from space.control.grants import NewGrant
from space.store.grants import GrantRow


async def create(
    request: Request, sandbox_id: str, body: GrantBody, idempotency_key: IdempotencyKey = None
) -> Response:
    """Grant a secret to a sandbox. When this is answered, its next requests get it."""
    asked_once = await once(request, idempotency_key)
    wanted = NewGrant(body.secret, body.terms(), expires_in_s=body.expires_in_s)
    made = await grants.request_grant(control_of(request), caller(request).project_id, sandbox_id, wanted, asked_once)
    return reply(_out(made), 201)


async def page(request: Request, sandbox_id: str, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None) -> Response:
    """List a sandbox's grants that are in force, newest first."""
    found = await grants.page(
        control_of(request), caller(request).project_id, sandbox_id, after=position(cursor), limit=limit
    )
    return reply(GrantPage(items=[_out(grant) for grant in found], next_cursor=next_cursor(found, limit)))


async def delete(request: Request, sandbox_id: str, grant_id: str) -> Response:
    """Revoke a grant. When this is answered, no request to come gets the secret, on open connections neither."""
    await grants.revoke(control_of(request), caller(request).project_id, sandbox_id, grant_id)
    return Response(status_code=204)


def _out(grant: GrantRow) -> GrantOut:
    return GrantOut(
        id=grant.id,
        sandbox_id=grant.sandbox_id,
        secret=grant.secret,
        placeholder=grant.placeholder,
        env=grant.env,
        created_at=grant.created_at,
        expires_at=grant.expires_at,
        **grant.terms,
    )

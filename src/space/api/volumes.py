"""HTTP for volumes."""

from fastapi import Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import IdempotencyKey, control_of, once, reply
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.api.schemas import VolumeOut, VolumePage
from space.api.volume_bodies import VolumeCreate
from space.control import contents, volumes
from space.control.volumes import Shown


async def create(request: Request, body: VolumeCreate, idempotency_key: IdempotencyKey = None) -> Response:
    """Make a volume: a directory that outlives sandboxes, and that several of them can mount."""
    control, asked_once = control_of(request), await once(request, idempotency_key)
    made = await volumes.request_volume(control, caller(request).project_id, body.name, body.size_mib, asked_once)
    return reply(_out(Shown(made)), 201)


async def page(request: Request, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None) -> Response:
    """List the project's volumes, newest first."""
    found = await volumes.page(control_of(request), caller(request).project_id, after=position(cursor), limit=limit)
    following = next_cursor([one.volume for one in found], limit)
    return reply(VolumePage(items=[_out(one) for one in found], next_cursor=following))


async def get(request: Request, name: str) -> Response:
    """One volume."""
    return reply(_out(await volumes.get(control_of(request), caller(request).project_id, name)))


async def delete(request: Request, name: str) -> Response:
    """Delete a volume with all that is in it. One that a sandbox mounts, in whatever state, is not deleted."""
    await contents.delete_volume(control_of(request), caller(request).project_id, name)
    return Response(status_code=204)


def _out(shown: Shown) -> VolumeOut:
    volume = shown.volume
    return VolumeOut(
        id=volume.id,
        name=volume.name,
        size_mib=volume.size_mib,
        sandboxes=shown.sandboxes,
        created_at=volume.created_at,
    )

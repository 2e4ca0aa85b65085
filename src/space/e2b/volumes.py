"""E2B's volumes are our volumes; their id is ours, and a token is good for what is in one of them."""

from typing import Any

from space.control import contents, volumes
from space.e2b import bodies, listing
from space.e2b.call import Call
from space.model.volume import Volume
from space.store.paging import Position

NOWHERE = "e2b-volume-api-url-is-not-set.invalid"
"""Without a domain here a client sends what is in volumes to E2B's own, unless it is told of a URL: no name at all."""


async def create(call: Call) -> None:
    body = await bodies.read(call, bodies.NewVolume)
    await call.answer(_with_token(call, await volumes.request_volume(call.control, call.project_id, body.name)), 201)


async def list_(call: Call) -> None:
    async def page(after: Position | None) -> list[Volume]:
        rows = await volumes.page(call.control, call.project_id, after=after, limit=listing.PAGE)
        return [row.volume for row in rows]

    await call.answer([_shown(one) for one in await listing.everything(page)])


async def get(call: Call) -> None:
    await call.answer(_with_token(call, await _named(call)))


async def delete(call: Call) -> None:
    """Delete a volume that no sandbox mounts."""
    volume = await _named(call)
    await contents.delete_volume(call.control, call.project_id, volume.name)
    await call.answer_empty()


async def _named(call: Call) -> Volume:
    return await volumes.by_id(call.control, call.project_id, call.params["volume"])


def _shown(volume: Volume) -> dict[str, Any]:
    return {"volumeID": volume.id, "name": volume.name}


def _with_token(call: Call, volume: Volume) -> dict[str, Any]:
    token = call.parts.tokens.volume(call.key_id, volume.id)
    return {**_shown(volume), "token": token, "domain": call.control.settings.e2b_domain or NOWHERE}

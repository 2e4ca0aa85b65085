"""E2B's secrets are our secrets of the kind text. Their id is their name, which is unique in a project."""

from typing import Any

from space.control import secrets, unnamed
from space.control.secrets import NewSecret, Shown
from space.e2b import bodies, listing, shapes
from space.e2b.call import Call
from space.store.paging import Position
from space.store.secrets import Secret

KIND = "text"


async def create(call: Call) -> None:
    body = await bodies.read(call, bodies.NewSecret)
    made = await secrets.request_secret(call.control, call.project_id, _wanted(body.name, body))
    await call.answer(_shown(made), 201)


async def list_(call: Call) -> None:
    """Secrets by pages, the newest first."""
    shown: dict[str, Shown] = {}

    async def page(after: Position | None) -> list[Secret]:
        rows = await secrets.page(call.control, call.project_id, after=after, limit=listing.PAGE)
        shown.update({row.secret.id: row for row in rows})
        return [row.secret for row in rows]

    # Values that came with network rules are no secrets to who speaks E2B.
    found = [one for one in await listing.everything(page) if not one.name.startswith(unnamed.PREFIX)]
    await listing.answer(call, found, lambda one: _shown(shown[one.id]))


async def get(call: Call) -> None:
    await call.answer(_shown(await secrets.get(call.control, call.project_id, call.params["secret"])))


async def update(call: Call) -> None:
    """Give a secret its next value; when this is answered every request to come gets it."""
    body, name = await bodies.read(call, bodies.SecretValue), call.params["secret"]
    await secrets.get(call.control, call.project_id, name)
    changed, _ = await secrets.set_secret(call.control, call.project_id, _wanted(name, body))
    await call.answer(_shown(changed))


async def delete(call: Call) -> None:
    await secrets.remove(call.control, call.project_id, call.params["secret"])
    await call.answer_empty()


def _wanted(name: str, body: bodies.SecretValue) -> NewSecret:
    return NewSecret(name, KIND, {"value": body.value}, body.metadata)


def _shown(one: Shown) -> dict[str, Any]:
    secret = one.secret
    return {
        "secretID": secret.name,
        "name": secret.name,
        "currentVersion": secret.version,
        "metadata": dict(secret.metadata),
        "createdAt": shapes.time(secret.created_at),
        "updatedAt": shapes.time(secret.updated_at),
    }

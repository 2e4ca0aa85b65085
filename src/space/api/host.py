"""HTTP for the host as its operator sees it: the warm pool, and what belongs to nobody."""

from fastapi import Request
from fastapi.responses import Response

from space.api.answers import control_of, reply
from space.api.build_bodies import Gc
from space.api.schemas import E2BOut, GcOut, PoolOut
from space.control import leftovers
from space.control.leftovers import Limits


async def pool(request: Request) -> Response:
    """Machines that are kept ready, and how often one was."""
    return reply(PoolOut.model_validate(await control_of(request).node.pool()))


async def e2b(request: Request) -> Response:
    """Where E2B's clients are served, and the domain that they are told."""
    settings = control_of(request).settings
    return reply(E2BOut(url=settings.e2b_url, domain=settings.e2b_domain))


async def gc(request: Request, body: Gc) -> Response:
    """Look for what belongs to nobody, in the store and on the host, or is older than it may be, and remove it."""
    limits = {"max_age_s": body.cache_age_s, "max_bytes": body.cache_bytes_max}
    cache = {name: value for name, value in limits.items() if value is not None}
    found = await leftovers.clear(
        control_of(request), dry_run=body.dry_run, limits=Limits(untagged_s=body.untagged_s, cache=cache)
    )
    return reply(GcOut.model_validate({"strays": found}))

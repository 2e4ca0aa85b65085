"""Routes of the api alone: builds of templates, the uploads they read, their cache, and templates themselves."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from space.errors import NotFound
from space.model.ids import is_id
from space.node.builds.spec import parse_spec
from space.node.call import NDJSON_TYPE, Call
from space.node.parse import invalid, parse_flag, parse_object, parse_offset

SPEC_BYTES_MAX = 4 * 1024 * 1024
AGE_S_MAX = 10 * 365 * 24 * 3600


async def begin(call: Call) -> None:
    """Begin a build. What is wrong with the request itself is refused here, everything else is told by the build."""
    spec = parse_spec(parse_object(await call.body(SPEC_BYTES_MAX)), call.node.settings)
    await call.answer(call.node.builds.begin(_build(call), spec), 202)


async def list_builds(call: Call) -> None:
    await call.answer({"builds": call.node.builds.list()})


async def show(call: Call) -> None:
    await call.answer(call.node.builds.show(_build(call)))


async def log(call: Call) -> None:
    """The log's lines, and with ``follow`` those to come, until the build has ended or the client goes."""
    start, follow = parse_offset(call.query, "from"), parse_flag(call.query, "follow")
    build = _build(call)
    call.node.builds.show(build)
    await call.body(1)
    await call.begin(200, {"content-type": NDJSON_TYPE})
    async with call.while_connected(), aclosing(call.node.builds.log(build, start, follow=follow)) as lines:
        async for data in lines:
            await call.write(data)
    await call.finish()


async def cancel(call: Call) -> None:
    await call.answer(await call.node.builds.cancel(_build(call)))


async def remove(call: Call) -> None:
    await call.node.builds.remove(call.params["build"])
    await call.answer({})


async def append(call: Call) -> None:
    """Add the body to an upload. What has arrived of one that breaks off is kept."""
    offset = parse_offset(call.query, "offset")
    await call.answer({"bytes": await call.node.builds.uploads.append(call.params["upload"], offset, call.chunks())})


async def show_upload(call: Call) -> None:
    await call.answer({"bytes": call.node.builds.uploads.size(call.params["upload"])})


async def remove_upload(call: Call) -> None:
    call.node.builds.uploads.remove(call.params["upload"])
    await call.answer({})


async def show_cache(call: Call) -> None:
    entries = call.node.builds.cache.report()
    await call.answer({"bytes": sum(entry["bytes"] for entry in entries), "entries": entries})


async def collect_cache(call: Call) -> None:
    """Make room in the build cache, or only say what would go."""
    body = await call.json()
    dry_run = body.pop("dry_run", False)
    limits = {name: _limit(body.pop(name, None), name) for name in ("max_age_s", "max_bytes")}
    if body:
        raise invalid(next(iter(body)), "is not a field of this request")
    if type(dry_run) is not bool:
        raise invalid("dry_run", "must be true or false")
    removed = await call.node.builds.cache.collect(dry_run=dry_run, **limits)
    await call.answer({"removed": removed, "bytes": sum(entry["bytes"] for entry in removed)})


async def drop_template(call: Call) -> None:
    """Leave nothing of a template: first what this node itself has made of it."""
    digest = call.params["digest"]
    async with call.node.pool.without(digest):
        await call.node.builds.drop_template(digest)
    await call.answer({})


def _build(call: Call) -> str:
    build = call.params["build"]
    if not is_id("bld", build):
        raise NotFound("There is no such build on this node.", code="build-not-found")
    return build


def _limit(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if type(value) not in {int, float} or not 0 <= value <= (AGE_S_MAX if name == "max_age_s" else 2**60):
        raise invalid(name, "must be a number of at least 0")
    return int(value)

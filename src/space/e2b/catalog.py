"""E2B's templates and their tags on ours: a template is a name of ours, with everything that its tags point to."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from space.control import builds, catalog, dropping, snapshots
from space.control.catalog import TAGS_MAX, Shown
from space.control.control import Control
from space.e2b import build_ids, listing, shapes
from space.e2b import query as queries
from space.e2b.bodies import read
from space.e2b.build_bodies import GoneTags, NewTags, TemplateChange
from space.e2b.builds import STATUS
from space.e2b.call import Call
from space.e2b.templates import DEFAULT, found_by_name, named, split
from space.errors import Forbidden, InvalidRequest, NotFound, RequestError
from space.model.build import Build
from space.model.sandbox import Resources
from space.model.template import TAG_DEFAULT, default_resources, parse_reference

BUILDS_SHOWN = 100


async def alias(call: Call) -> None:
    """Say whether there is a template of that name, with that tag if one is named."""
    text = call.params["alias"]
    found = await _called(call.control, call.project_id, text)
    await call.answer({"templateID": found[0].name, "public": all(one.builtin for one in found)})


async def list_(call: Call) -> None:
    """All templates that the project sees, by name."""
    await call.answer([_listed(found) for found in _by_name(await _all(call.control, call.project_id))])


async def page(call: Call) -> None:
    """As ``list_``, by pages."""
    found = _by_name(await _all(call.control, call.project_id))
    after, limit = call.query.get("nextToken", ""), queries.limit(call.query, listing.LIMIT_MAX)
    left = [one for one in found if (one[0].name or "") > after]
    headers = {"x-next-token": str(left[limit - 1][0].name)} if len(left) > limit else {}
    await call.answer([_listed(one) for one in left[:limit]], 200, headers)


async def get(call: Call) -> None:
    """One template with its latest builds."""
    found = await _called(call.control, call.project_id, call.params["template"])
    made = await builds.page(
        call.control, call.project_id, name=found[0].name, states=(), after=None, limit=BUILDS_SHOWN
    )
    await call.answer({**_listed(found), "builds": [_built(one) for one in made]})


async def defaults(call: Call) -> None:
    """The templates that the installation brings along."""
    found = _by_name(await _all(call.control, call.project_id))
    await call.answer([_listed(one) for one in found if all(tag.builtin for tag in one)])


async def change_v1(call: Call) -> None:
    await _change(call)
    await call.answer({})


async def change(call: Call) -> None:
    """As ``change_v1``; the template's names are told."""
    await call.answer({"names": [await _change(call)]})


async def tags(call: Call) -> None:
    """The tags of a template, and the builds that they point to."""
    found = await _called(call.control, call.project_id, call.params["template"])
    await call.answer([_tagged(one) for one in found])


async def add_tags(call: Call) -> None:
    """Let further tags point to where one does; each takes effect by itself."""
    body = await read(call, NewTags)
    name, _ = split(body.target)
    reference = await found_by_name(call.control, call.project_id, body.target)
    if reference is None:
        raise NotFound(f"Template {body.target[:200]} not found")
    for tag in body.tags:
        catalog.check_reference(name, tag)
    found = await catalog.get(call.control, call.project_id, reference)
    if found.builtin:
        raise _builtin()
    for tag in dict.fromkeys(body.tags):
        await catalog.move_tag(call.control, call.project_id, name, tag, found.digest)
    await call.answer({"tags": body.tags, "buildID": build_ids.of_template(found)}, 201)


async def remove_tags(call: Call) -> None:
    """Take tags away; what they pointed to stays."""
    body = await read(call, GoneTags)
    name, tag = split(body.name)
    if tag is not None:
        raise InvalidRequest("name: It must be without a tag.", field="name")
    for gone in dict.fromkeys(body.tags):
        await catalog.remove_tag(call.control, call.project_id, name, gone)
    await call.answer_empty()


async def delete(call: Call) -> None:
    """Delete a template with all its tags, one tag of it where that is named, or a snapshot: all have one path."""
    control, project_id, text = call.control, call.project_id, call.params["template"]
    reference = parse_reference(text)
    found: list[Shown] = []
    if reference is not None and reference.name is not None:
        found = await catalog.page(control, project_id, name=reference.name, after=None, limit=TAGS_MAX)
        if ":" in text:
            found = [one for one in found if one.tag == reference.tag]
    own = [one for one in found if not one.builtin]
    if found and not own:
        raise _builtin()
    for one in own:
        await dropping.delete(control, project_id, f"{one.name}:{one.tag}")
    if not own:
        snapshot = await named(control, project_id, text)
        if snapshot is None:
            raise NotFound(f"Template {text[:200]} not found")
        await snapshots.delete(control, project_id, snapshot.id)
    await call.answer_empty()


async def _change(call: Call) -> str:
    """Make a template public or not, which none of a project is, and return its name."""
    body = await read(call, TemplateChange)
    found = await _called(call.control, call.project_id, call.params["template"])
    if found[0].builtin:
        raise _builtin()
    if body.public:
        raise RequestError("public: A template is its project's: others cannot be shown it.", code="unimplemented")
    return str(found[0].name)


def _builtin() -> Forbidden:
    return Forbidden("The installation brings this template along: it is not the project's.", code="template-builtin")


async def _called(control: Control, project_id: str, text: str) -> list[Shown]:
    """Return what a name's tags point to, or what one tag does; the first is what the name alone means."""
    reference = parse_reference(text)
    found: list[Shown] = []
    if reference is not None and reference.name is not None:
        found = await catalog.page(control, project_id, name=reference.name, after=None, limit=TAGS_MAX)
    if ":" in text and reference is not None:
        found = [one for one in found if one.tag == reference.tag]
    if not found:
        raise NotFound(f"Template {text[:200]} not found")
    return sorted(found, key=_rank)


async def _all(control: Control, project_id: str) -> list[Shown]:
    return await catalog.page(control, project_id, name=None, after=None, limit=TAGS_MAX + catalog.BUILTINS_MAX)


def _by_name(found: Sequence[Shown]) -> list[list[Shown]]:
    names: dict[str, list[Shown]] = {}
    for one in found:
        names.setdefault(str(one.name), []).append(one)
    return [sorted(names[name], key=_rank) for name in sorted(names)]


def _rank(one: Shown) -> tuple[int, str]:
    first = {DEFAULT: 0, TAG_DEFAULT: 1}
    return first.get(str(one.tag), 2), str(one.tag)


def _listed(found: list[Shown]) -> dict[str, Any]:
    """Return a ``Template``."""
    chief = found[0]
    resources = Resources(**default_resources(chief.defaults))
    return {
        "templateID": chief.name,
        "buildID": build_ids.of_template(chief),
        "names": [chief.name],
        "aliases": [chief.name],
        "public": chief.builtin,
        "cpuCount": max(1, round(resources.cpus)),
        "memoryMB": resources.memory_mib,
        "diskSizeMB": resources.disk_mib,
        "createdAt": shapes.time(min(one.created_at for one in found)),
        "updatedAt": shapes.time(max(_since(one) for one in found)),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": len({one.digest for one in found}),
        "envdVersion": shapes.ENVD_VERSION,
        "buildStatus": "ready",
    }


def _built(build: Build) -> dict[str, Any]:
    """Return a ``TemplateBuild``."""
    told = {
        "buildID": build_ids.shown(build.id),
        "status": STATUS[build.state],
        "createdAt": shapes.time(build.created_at),
        "updatedAt": shapes.time(build.updated_at),
        "cpuCount": max(1, round(build.resources.cpus)),
        "memoryMB": build.resources.memory_mib,
        "envdVersion": shapes.ENVD_VERSION,
    }
    return told | ({} if build.finished_at is None else {"finishedAt": shapes.time(build.finished_at)})


def _tagged(one: Shown) -> dict[str, Any]:
    return {"tag": one.tag, "buildID": build_ids.of_template(one), "createdAt": shapes.time(_since(one))}


def _since(one: Shown) -> datetime:
    return one.tagged_at or one.created_at

"""Builds of templates as their owners see them: recorded, looked at, waited for, ended. `building` follows them."""

import asyncio
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from space.control import catalog, once, policies, quotas, snapshots, templates, uploads
from space.control.changes import BUILDS
from space.control.control import Control
from space.control.creation import check_resources
from space.control.once import Once
from space.error_wire import class_of_kind
from space.errors import (
    Conflict,
    Forbidden,
    HostError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    SpaceError,
)
from space.model.build import BUILDER, OPEN, TIMEOUT_S_DEFAULT, Build, BuildState
from space.model.ids import is_id, new_id
from space.model.sandbox import Resources
from space.model.snapshot import SnapshotKind
from space.model.template import TAG_DEFAULT, Resolved, is_trusted
from space.store import builds, releases, tags
from space.store import templates as builtins
from space.store.paging import Position

WAIT_S_MAX = 300.0
BUSY_RETRY_S = 5
SPEC_BYTES_MAX = 3 * 1024 * 1024
SHOWN = ("kind", "reference", "template", "snapshot", "dockerfile")
"""What of a source a caller sees again."""


@dataclass(frozen=True, slots=True)
class NewBuild:
    """What a caller asks for; the api has checked every field's form.

    ``source`` has ``kind`` and what belongs to it. ``auth`` are the credentials for its registry; ``rest`` are
    ``steps``, ``shell``, ``defaults``, ``build_args``, ``target`` and ``no_cache``, as the node takes them.
    """

    name: str
    source: Mapping[str, Any]
    tag: str = TAG_DEFAULT
    auth: Mapping[str, Any] | None = field(default=None, repr=False)
    rest: Mapping[str, Any] = field(default_factory=dict[str, Any])
    resources: Mapping[str, Any] = field(default_factory=dict[str, Any])
    timeout_s: float = TIMEOUT_S_DEFAULT
    policy: str | dict[str, Any] | None = None
    """What may leave the machine that builds."""
    template_policy: str | dict[str, Any] | None = None
    """What may leave sandboxes of the template."""
    more_tags: tuple[str, ...] = ()
    """Further tags of the name that shall point to the template."""
    id: str | None = None
    """The id that the build was promised; a fresh one otherwise."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What a build begins with."""

    spec: Mapping[str, Any]
    template: Resolved | None = None
    snapshot_id: str | None = None
    digests: frozenset[str] = frozenset()


async def request_build(control: Control, project_id: str, wanted: NewBuild, asked_once: Once | None = None) -> Build:
    """Record a build, which then goes on by itself. With ``asked_once`` a repeated request gets the first one's.

    Raises ``InvalidRequest``, ``Conflict``, ``Forbidden`` for a registry that is not trusted, or ``LimitExceeded``.
    """
    earlier = await control.store.read(lambda connection: _earlier(connection, project_id, asked_once, control.now()))
    if earlier is not None:
        # What it was made from may be gone by now.
        return earlier
    resources = _check(control, wanted)
    read = _uploads(wanted)
    for upload_id in sorted(read):
        await uploads.check_whole(control, project_id, upload_id)
    begun = await _begin(control, project_id, wanted)
    now, build_id = control.now(), wanted.id or new_id("bld")
    build = Build(
        id=build_id,
        project_id=project_id,
        name=wanted.name,
        tag=wanted.tag,
        state=BuildState.PENDING,
        resources=resources,
        timeout_s=wanted.timeout_s,
        created_at=now,
        updated_at=now,
        source={name: value for name, value in wanted.source.items() if name in SHOWN},
        needs_auth=wanted.auth is not None,
        snapshot_id=begun.snapshot_id,
        uploads=tuple(sorted(read)),
        # Who has the credentials follows it.
        lease_owner=control.leases.owner,
        lease_until=control.leases.until(),
        policy=wanted.policy,
        template_policy=wanted.template_policy,
        more_tags=wanted.more_tags,
    )

    def record(connection: Connection) -> Build:
        earlier = once.first(connection, asked_once, project_id, subject_id=build_id, now=now)
        if earlier is not None:
            return _owned(builds.get(connection, earlier.subject_id), project_id)
        if wanted.id is not None and builds.get(connection, wanted.id) is not None:
            raise Conflict("The build has begun already.", code="build-exists")
        made = _admitted(control, connection, build, wanted, begun)
        builds.add(connection, made)
        return made

    if wanted.auth is not None:
        control.registry_auth[build_id] = dict(wanted.auth)
    try:
        made = await control.store.write(record)
    except BaseException:
        control.registry_auth.pop(build_id, None)
        raise
    if made.id != build_id:  # it was there before, and has its credentials
        control.registry_auth.pop(build_id, None)
    control.changes.notify(BUILDS)
    return made


async def get(control: Control, project_id: str, build_id: str) -> Build:
    """Return one of the project's builds, or raise ``NotFound``."""
    found = None
    if is_id("bld", build_id):
        found = await control.store.read(lambda connection: builds.get(connection, build_id))
    return _owned(found, project_id)


async def page(
    control: Control,
    project_id: str,
    *,
    name: str | None,
    states: Collection[BuildState],
    after: Position | None,
    limit: int,
) -> list[Build]:
    return await control.store.read(
        lambda connection: builds.page(connection, project_id, name=name, states=states, after=after, limit=limit)
    )


async def wait(control: Control, project_id: str, build_id: str, timeout_s: float) -> Build:
    """Return the build once it has ended, or as it is after ``timeout_s``."""
    ends = asyncio.get_running_loop().time() + min(timeout_s, WAIT_S_MAX)
    with control.changes.watch(build_id) as watch:
        while True:
            build = await get(control, project_id, build_id)
            left = ends - asyncio.get_running_loop().time()
            if build.state not in OPEN or left <= 0:
                return build
            await watch.wait(left)


async def cancel(control: Control, project_id: str, build_id: str) -> Build:
    """Have a build end without a result; nothing of it is published from now on. One that has ended stays as it is."""
    now = control.now()

    def record(connection: Connection) -> Build:
        found = _owned(builds.get(connection, build_id, lock=True), project_id)
        builds.ask_to_end(connection, build_id, now)
        return replace(found, cancelling=True) if found.state in OPEN else found

    if not is_id("bld", build_id):
        raise _not_found()
    asked = await control.store.write(record)
    control.changes.notify(build_id)
    return asked


def error_of(build: Build) -> SpaceError:
    """Return the error that a build ended with, for a caller who waited for it."""
    failure = build.failure
    if failure is None:
        return Conflict("The build was cancelled.", code="cancelled", build_id=build.id)
    cls = class_of_kind(failure.kind) or HostError
    return cls(failure.message, code=failure.code, **{**failure.details, "build_id": build.id})


def _earlier(connection: Connection, project_id: str, asked_once: Once | None, now: datetime) -> Build | None:
    seen = once.seen(connection, asked_once, project_id, now)
    return None if seen is None else _owned(builds.get(connection, seen.subject_id), project_id)


def _check(control: Control, wanted: NewBuild) -> Resources:
    """Raise what can be said without looking anything up; return what the builder gets."""
    for tag in (wanted.tag, *wanted.more_tags):
        catalog.check_reference(wanted.name, tag)
    image: str = wanted.source.get("reference", "")
    if wanted.source["kind"] == "image" and not is_trusted(image, control.settings.trusted_template_registries):
        raise Forbidden(
            "This installation does not take images from that registry. `trusted_template_registries` lists those that "
            "it does.",
            code="registry-not-trusted",
        )
    resources = replace(BUILDER, **wanted.resources)
    check_resources(control, resources)
    return resources


def _uploads(wanted: NewBuild) -> set[str]:
    copies = [step["copy"]["upload"] for step in wanted.rest.get("steps", []) if "copy" in step]
    return {*copies, *([wanted.source["upload"]] if "upload" in wanted.source else [])}


async def _begin(control: Control, project_id: str, wanted: NewBuild) -> Begun:
    source = dict(wanted.source)
    if source["kind"] == "template":
        found = await templates.resolve(control, project_id, source["template"])
        spec = {
            "kind": "template",
            "digest": found.digest,
            "defaults": templates.without_policy(found.defaults),
            "ref": source["template"],
        }
        return Begun(spec, found, digests=frozenset({found.digest}))
    if source["kind"] == "snapshot":
        return await _begin_with_snapshot(control, project_id, source["snapshot"])
    return Begun(source)


async def _begin_with_snapshot(control: Control, project_id: str, snapshot_id: str) -> Begun:
    found = await control.store.read(lambda connection: snapshots.usable(connection, project_id, snapshot_id))
    if found.kind != SnapshotKind.DISK:
        raise Conflict(
            "The snapshot has memory in it, which a template has not. Take one of the disk alone (`kind: disk`).",
            code="wrong-snapshot-kind",
            kind=str(found.kind),
        )
    spec = {
        "kind": "snapshot",
        "snapshot": found.id,
        "template_digest": found.template_digest,
        "defaults": found.details.get("template_defaults", {}),
    }
    return Begun(spec, snapshot_id=found.id, digests=frozenset({found.template_digest}))


def _admitted(control: Control, connection: Connection, build: Build, wanted: NewBuild, begun: Begun) -> Build:
    """Return the build as it is to be stored. What it begins with cannot be dropped any more once it is."""
    project_id = build.project_id
    if begun.snapshot_id is not None:
        snapshots.usable(connection, project_id, begun.snapshot_id)
    for upload_id in build.uploads:
        uploads.usable(connection, project_id, upload_id)
    policies.check(control.settings, connection, project_id, build.policy)
    policies.check(control.settings, connection, project_id, build.template_policy, "defaults.policy")
    quotas.check_room(control, connection)
    quotas.admit(connection, project_id, quotas.of_new(build.resources))
    _check_limits(control, connection, project_id, wanted)
    if begun.template is not None:
        templates.usable(connection, project_id, begun.template)
    return _with_spec(connection, build, wanted, begun)


def _check_limits(control: Control, connection: Connection, project_id: str, wanted: NewBuild) -> None:
    """Raise when the project builds or has too much already, or the name is not for it. Under the project's lock."""
    most, going_on = control.settings.project_builds_max, builds.count_open(connection, project_id)
    if going_on >= most:
        raise LimitExceeded(
            f"A project may have {most} builds under way. Wait for one, or cancel it.",
            code="builds-max",
            limit=most,
            retry_after_s=BUSY_RETRY_S,
        )
    catalog.check_name(connection, wanted.name)
    # Each that goes on may become one more of both.
    more = going_on + 1
    catalog.check_room(connection, project_id, releases_more=more, tags_more=more + len(wanted.more_tags))


def _with_spec(connection: Connection, build: Build, wanted: NewBuild, begun: Begun) -> Build:
    """Return the build with what the node is told. A Dockerfile may name any template that the project sees."""
    visible: dict[str, dict[str, Any]] = {}
    if wanted.source["kind"] == "dockerfile":
        visible = _visible(connection, build.project_id)
    spec = {
        "source": dict(begun.spec),
        "templates": visible,
        **wanted.rest,
        "resources": {name: getattr(build.resources, name) for name in ("cpus", "memory_mib", "disk_mib", "pids")},
        "timeout_s": build.timeout_s,
    }
    if len(json.dumps(spec)) > SPEC_BYTES_MAX:
        raise InvalidRequest(
            "The build is too large, with the defaults of all templates that its Dockerfile may name. Delete templates "
            "that are no longer used, or ask for less.",
            code="build-too-large",
            limit_bytes=SPEC_BYTES_MAX,
        )
    digests = begun.digests | {str(template["digest"]) for template in visible.values()}
    return replace(build, spec=spec, digests=tuple(sorted(digests)))


def _visible(connection: Connection, project_id: str) -> dict[str, dict[str, Any]]:
    """Return every ``name:tag`` that means something to the project, with what it means now."""
    found: dict[str, dict[str, Any]] = {}
    for template in builtins.page(connection, after=None, limit=catalog.BUILTINS_MAX):
        found[f"{template.name}:{template.tag}"] = {"digest": template.digest, "defaults": template.defaults}
    own = releases.of_project(connection, project_id)
    for tag in tags.of_project(connection, project_id):
        found[f"{tag.name}:{tag.tag}"] = {
            "digest": tag.digest,
            "defaults": templates.without_policy(own[tag.digest].defaults),
        }
    return found


def _owned(found: Build | None, project_id: str) -> Build:
    if found is None or found.project_id != project_id:
        raise _not_found()
    return found


def _not_found() -> NotFound:
    return NotFound("There is no such build.")

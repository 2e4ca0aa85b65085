"""Following one build at the node until it ends, and publishing what it has made.

The node carries it out by itself; here is looked now and then how far it is.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, cast

import structlog
from sqlalchemy import Connection

from space import error_wire
from space.control import attachments, templates
from space.control.catalog import images_of
from space.control.control import Control
from space.errors import (
    Conflict,
    HostError,
    LimitExceeded,
    NotFound,
    OutcomeUnknown,
    SandboxError,
    SpaceError,
    Unavailable,
)
from space.model.build import OPEN, Build, BuildState
from space.model.sandbox import Failure
from space.model.template import Release, Tag, is_digest
from space.store import builds, drops, events, projects, releases, tags

log = structlog.get_logger(__name__)

LOOK_S = 0.5
SILENT_S_MAX = 600.0
"""So long without an answer of the node, a build is given up."""
OVERTIME_S = 300.0
"""How much longer than it may a build takes until it is given up, whatever the node says."""
TEXT_CHARS_MAX = 2000
NOTE_BYTES_MAX = 256 * 1024
PACKAGES_BYTES_MAX = 4 * 1024 * 1024
IMAGES_MAX = 256


async def follow(control: Control, build: Build) -> Build | None:
    """Bring a build that is leased to this process to its end; None when somebody else has it, or has ended it."""
    heard = time.monotonic()
    with control.changes.watch(build.id) as watch:
        while True:
            fresh = await control.store.read(lambda connection: builds.get(connection, build.id))
            if fresh is None or fresh.state not in OPEN or fresh.lease_owner != build.lease_owner:
                return None
            try:
                ended = await _look(control, fresh)
                heard = time.monotonic()
            except (Unavailable, OutcomeUnknown) as error:
                log.info("build-not-seen", code=error.code)
                ended = None
                if time.monotonic() - heard > SILENT_S_MAX:
                    gone = HostError("The host that carried the build out is not answering.", code="build-interrupted")
                    ended = await _fail(control, fresh, gone, abandoned=True)
            except SpaceError as error:
                ended = await _fail(control, fresh, error, abandoned=True)
            if ended is not None:
                return ended
            await watch.wait(LOOK_S, LOOK_S)


async def _look(control: Control, build: Build) -> Build | None:
    """Do the next thing about a build; return it when it has ended."""
    if not build.sent:
        if build.cancelling:
            # The node may have been told although its answer was lost.
            return await _end(control, build, BuildState.CANCELLED, abandoned=True)
        return await _send(control, build)
    if build.cancelling:
        with contextlib.suppress(Conflict, NotFound):
            await control.node.cancel_build(build.id)
    try:
        shown = await control.node.build(build.id)
    except NotFound:
        return await _fail(control, build, _interrupted())
    return await _judge(control, build, shown)


async def _judge(control: Control, build: Build, shown: Mapping[str, Any]) -> Build | None:
    """Do what the node's description of a build calls for."""
    state = shown.get("state")
    if state == BuildState.SUCCEEDED and not build.cancelling:
        return await _publish(control, build, shown)
    if state in {BuildState.SUCCEEDED, BuildState.CANCELLED}:
        return await _end(control, build, BuildState.CANCELLED, **_told(control, build, shown))
    if state == BuildState.FAILED:
        failure = error_wire.parse(shown.get("error"), HostError)
        return await _fail(control, build, failure, **_told(control, build, shown))
    return await _note(control, build, shown)


async def _send(control: Control, build: Build) -> Build | None:
    """Tell the node of a build, with the credentials if this process has them."""
    auth = control.registry_auth.get(build.id)
    if build.needs_auth and auth is None:
        try:
            await control.node.build(build.id)
        except NotFound:
            return await _fail(control, build, _interrupted())
    else:
        # Its machine has this id, so that the gateway can be told before there is one.
        spec = {**build.spec, "scope": build.project_id, "machine": attachments.machine_of(build.id)}
        if auth is not None:
            spec["source"] = {**build.spec["source"], "auth": auth}
        await attachments.attach_build(control, build)
        try:
            await control.node.start_build(build.id, spec)
        except LimitExceeded:
            return None  # It has enough to do; the build waits.
    control.registry_auth.pop(build.id, None)
    await control.store.write(lambda connection: builds.change(connection, build, sent=True))
    return None


async def _note(control: Control, build: Build, shown: Mapping[str, Any]) -> Build | None:
    """Write down how far a build is; one that takes longer than it may is given up."""
    now = control.now()
    running = shown.get("state") == BuildState.RUNNING
    began = build.started_at or now
    if running and now > began + timedelta(seconds=build.timeout_s + OVERTIME_S):
        late = SandboxError(f"The build did not end within {build.timeout_s:g} s.", code="build-timed-out")
        return await _fail(control, build, late, abandoned=True)
    seen = {**_steps(shown), "state": BuildState.RUNNING, "started_at": began} if running else _steps(shown)
    if any(getattr(build, name) != value for name, value in seen.items()):
        await control.store.write(lambda connection: builds.change(connection, build, **seen, updated_at=now))
        control.changes.notify(build.id)
    return None


async def _publish(control: Control, build: Build, shown: Mapping[str, Any]) -> Build | None:
    """Make what a build has made a release, and let its tag point to it: all of it or nothing."""
    digest: Any = shown.get("digest")
    if not is_digest(digest):
        raise HostError("The node's answer has no digest of what was built.", code="node-protocol")
    since = control.now()
    if digest not in {str(item.get("digest")) for item in await control.node.templates()}:
        lost = HostError("What was built was removed from the host before it was published.", code="template-lost")
        return await _fail(control, build, lost)
    now = control.now()

    def record(connection: Connection) -> Build | None:
        fresh = builds.get(connection, build.id, lock=True)
        if fresh is None or fresh.state not in OPEN or fresh.lease_owner != build.lease_owner or fresh.cancelling:
            return None
        projects.lock(connection, build.project_id)
        if drops.interferes(connection, digest, since):
            raise Conflict("The same template is just being dropped.", code="busy")
        release = _release(connection, fresh, shown, now)
        releases.keep(connection, release)
        for tag in (fresh.tag, *fresh.more_tags):
            tags.move(connection, Tag(build.project_id, build.name, tag, digest, now), build.id)
        made = {"digest": digest, "bytes": release.bytes, "base": release.base}
        return _ended(connection, fresh, BuildState.SUCCEEDED, now, {**made, **_told(control, build, shown)})

    try:
        ended = await control.store.write(record)
    except Conflict:
        return None  # In a moment it is known whether it is still there.
    await _tell(control, ended)
    return ended


def _release(connection: Connection, build: Build, shown: Mapping[str, Any], now: datetime) -> Release:
    lineage = _object(shown.get("lineage")) or {}
    packages: Any = shown.get("packages")
    told = isinstance(packages, list) and len(json.dumps(packages)) <= PACKAGES_BYTES_MAX
    return Release(
        project_id=build.project_id,
        digest=str(shown["digest"]),
        created_at=now,
        defaults=_defaults(build, shown),
        bytes=_count(shown.get("bytes")) or 0,
        source=build.source,
        base=_object(shown.get("base")),
        lineage={**lineage, "images": _images(connection, build, lineage)},
        packages=cast("list[Any]", packages) if told else None,
        build_id=build.id,
        untagged_at=now,
    )


def _defaults(build: Build, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that the node tells, and the policy, which it knows nothing of."""
    told = {name: value for name, value in (_object(shown.get("defaults")) or {}).items() if name != "policy"}
    return told if build.template_policy is None else {**told, "policy": build.template_policy}


def _images(connection: Connection, build: Build, lineage: Mapping[str, Any]) -> list[str]:
    """Return the references of the images that a build's bases are, and of those that its templates came from."""
    listed: Any = lineage.get("bases")
    bases = [_object(one) or {} for one in cast("list[Any]", listed)] if isinstance(listed, list) else []
    found = {str(base["ref"]) for base in bases if base.get("kind") == "image" and base.get("ref")}
    if build.source.get("kind") == "image":
        found.add(str(build.source["reference"]))
    parents = {str(base["digest"]) for base in bases if base.get("kind") == "template"}
    if build.snapshot_id is not None:
        parents |= {*build.digests}
    for parent in releases.among(connection, build.project_id, parents).values():
        found |= {*images_of(parent)}
    return sorted(found)[:IMAGES_MAX]


async def _fail(control: Control, build: Build, error: SpaceError, **values: Any) -> Build | None:
    return await _end(control, build, BuildState.FAILED, failure=_failure(error), **values)


async def _end(control: Control, build: Build, state: BuildState, **values: Any) -> Build | None:
    """End a build without a result; None when somebody else has, or has it now."""
    control.registry_auth.pop(build.id, None)
    now = control.now()
    ended = await control.store.write(lambda connection: _ended(connection, build, state, now, values))
    await _tell(control, ended)
    return ended


def _ended(
    connection: Connection, build: Build, state: BuildState, now: datetime, values: dict[str, Any]
) -> Build | None:
    ended = builds.change(connection, build, state=state, finished_at=now, updated_at=now, **values)
    if ended is not None:
        failure = None if ended.failure is None else asdict(ended.failure)
        data = {"build_id": ended.id, "state": str(state), "name": ended.name, "tag": ended.tag}
        events.add(connection, ended.project_id, "build", {**data, "digest": ended.digest, "failure": failure}, now)
    return ended


async def _tell(control: Control, ended: Build | None) -> None:
    if ended is not None:
        await attachments.detach(control, attachments.machine_of(ended.id))
        templates.forget(control)
        control.changes.notify(ended.id)
        control.changes.notify(ended.project_id)


def _interrupted() -> SpaceError:
    return HostError("The build was interrupted. Begin it again.", code="build-interrupted")


def _failure(error: SpaceError) -> Failure:
    details = error.details if len(json.dumps(error.details, default=str)) <= NOTE_BYTES_MAX else {}
    return Failure(str(error.code)[:64], error.message[:TEXT_CHARS_MAX], error_wire.kind_of(error), details)


def _timings(shown: Mapping[str, Any]) -> dict[str, float]:
    found = _object(shown.get("timings")) or {}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _steps(shown: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _count(shown.get(name)) for name in ("step", "steps")}


def _told(control: Control, build: Build, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is written down of a build when it has ended, however it has."""
    # One that was over before it was looked at began some time, if it did.
    began = None if shown.get("started_at") is None else control.now()
    return {**_steps(shown), "timings": _timings(shown), "started_at": build.started_at or began}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def _object(value: Any) -> dict[str, Any] | None:
    """Return an object of the node's answer; one of unreasonable size is left out."""
    small = isinstance(value, dict) and len(json.dumps(value)) <= NOTE_BYTES_MAX
    return cast("dict[str, Any]", value) if small else None

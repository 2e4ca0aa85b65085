"""Templates as a project sees them: lists, one, tags that move, deletion, and what came from where."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from sqlalchemy import Connection

from space.control import templates
from space.control.control import Control
from space.errors import Conflict, Forbidden, InvalidRequest, LimitExceeded, NotFound
from space.model.sandbox import Resources
from space.model.template import (
    RESERVED,
    TAG_DEFAULT,
    Reference,
    Release,
    Tag,
    TagMove,
    Template,
    default_resources,
    is_digest,
    is_trusted,
    parse_reference,
)
from space.store import projects, releases, tags
from space.store import templates as builtins

TAGS_MAX = 500
"""Of one project: a Dockerfile may name any of them, so a build is told of all."""
RELEASES_MAX = 1000
BUILTINS_MAX = 1000
MOVES_KEPT = 1000
"""Of one name."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A template as one list or one answer shows it; ``tags`` are all of the project's that point to it."""

    digest: str
    defaults: Mapping[str, Any]
    bytes: int
    builtin: bool
    created_at: datetime
    name: str | None = None
    tag: str | None = None
    tagged_at: datetime | None = None
    driver: str | None = None
    source: Mapping[str, Any] = field(default_factory=dict[str, Any])
    base: Mapping[str, Any] | None = None
    build_id: str | None = None
    untagged_at: datetime | None = None
    deleted_at: datetime | None = None
    tags: list[str] = field(default_factory=list[str])
    lineage: Mapping[str, Any] = field(default_factory=dict[str, Any])
    packages: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Audited:
    """A release, the images that it came from, and those of them that the settings do not trust."""

    digest: str
    tags: list[str]
    images: list[str]
    untrusted: list[str]


async def page(
    control: Control, project_id: str, *, name: str | None, after: tuple[str, str] | None, limit: int
) -> list[Shown]:
    """Return one's own tags and those that the installation brings along, by name and tag.

    Where both have the same, one's own is what it means and the other is not shown.
    """

    def look(connection: Connection) -> list[Shown]:
        # All of them: there are not many, and each database has an order of its own.
        own = {(tag.name, tag.tag): tag for tag in tags.of_project(connection, project_id)}
        along = {(one.name, one.tag): one for one in builtins.page(connection, after=None, limit=BUILTINS_MAX)}
        wanted = sorted(key for key in own.keys() | along.keys() if name in {None, key[0]})
        shown = [key for key in wanted if after is None or key > after][:limit]
        found = releases.among(connection, project_id, {own[key].digest for key in shown if key in own})
        return [of_release(found[own[key].digest], own[key]) if key in own else of_builtin(along[key]) for key in shown]

    return await control.store.read(look)


async def page_untagged(control: Control, project_id: str, *, after: str | None, limit: int) -> list[Shown]:
    """Return one's own releases that no tag points to, by digest."""
    found = await control.store.read(
        lambda connection: releases.page_untagged(connection, project_id, after=after, limit=limit)
    )
    return [of_release(release) for release in found]


async def get(control: Control, project_id: str, text: str) -> Shown:
    """Return a template with all that is known of it, or raise ``NotFound``; a deleted release for a day."""
    reference = parse_reference(text)
    if reference is None:
        raise templates.not_found()
    # Looks at the node, too, where it must.
    await templates.find(control, project_id, reference)
    return await control.store.read(lambda connection: _get(connection, project_id, reference))


async def move_tag(control: Control, project_id: str, name: str, tag: str, digest: str) -> Shown:
    """Let ``name:tag`` point to one of the project's releases, which is one change for everybody who looks."""
    to = _named(name, tag)
    if not is_digest(digest):
        raise InvalidRequest("digest: It must be `sha256:` and 64 hexadecimal digits.", field="digest")
    now = control.now()

    def record(connection: Connection) -> Shown:
        projects.lock(connection, project_id)
        release = releases.get(connection, project_id, digest)
        if release is None or release.deleted_at is not None:
            raise NotFound("The project has released nothing with that digest.")
        check_name(connection, name)
        if tags.get(connection, project_id, name, tag) is None:
            check_room(connection, project_id, releases_more=0)
        tags.move(connection, Tag(project_id, name, tag, digest, now))
        return _get(connection, project_id, to)

    moved = await control.store.write(record)
    templates.forget(control)
    return moved


async def remove_tag(control: Control, project_id: str, name: str, tag: str) -> None:
    """Take a tag away; what it pointed to stays, and can be had by its digest. Raises ``NotFound``."""
    now = control.now()
    reference = _named(name, tag, missing=True)

    def record(connection: Connection) -> None:
        projects.lock(connection, project_id)
        found = tags.get(connection, project_id, name, tag)
        if found is None:
            if builtins.find(connection, reference) is not None:
                raise _builtin()
            raise templates.not_found()
        tags.remove(connection, found, now)

    await control.store.write(record)
    templates.forget(control)


async def delete(control: Control, project_id: str, text: str) -> Shown:
    """Delete a release. By digest with all its tags; by name the tag, and the release when that was its last one.

    Nothing begins from it any more; what did lives on, and its bytes go when the last of that is gone. Idempotent for a
    digest. Raises ``NotFound``, or ``Forbidden`` for what the installation brings along.
    """
    reference, now = parse_reference(text), control.now()

    def record(connection: Connection) -> Shown:
        if reference is None:
            raise templates.not_found()
        projects.lock(connection, project_id)
        shown = _get(connection, project_id, reference)
        if shown.builtin:
            raise _builtin()
        pointing = tags.of_project(connection, project_id, shown.digest)
        going = pointing if reference.digest else [t for t in pointing if (t.name, t.tag) == (shown.name, shown.tag)]
        for tag in going:
            tags.remove(connection, tag, now)
        if len(going) == len(pointing) and shown.deleted_at is None:
            releases.remove(connection, project_id, shown.digest, now)
        return _get(connection, project_id, Reference(digest=shown.digest))

    deleted = await control.store.write(record)
    templates.forget(control)
    return deleted


async def history(control: Control, project_id: str, name: str, *, before: int | None, limit: int) -> list[TagMove]:
    """Return what became of a name's tags, newest first. A name that nothing is known of is ``NotFound``."""

    def look(connection: Connection) -> list[TagMove]:
        found = tags.history(connection, project_id, name, before=before, limit=limit)
        if not found and before is None:
            raise NotFound("Nothing of the project was ever called that.")
        return found

    if parse_reference(name) is None or ":" in name:
        raise NotFound("Nothing of the project was ever called that.")
    return await control.store.read(look)


async def audit(control: Control, project_id: str) -> list[Audited]:
    """Return every release with the images that it and its bases came from, and which of those are not trusted."""
    trusted = control.settings.trusted_template_registries

    def look(connection: Connection) -> list[Audited]:
        found = releases.of_project(connection, project_id)
        pointing: dict[str, list[str]] = {}
        for tag in tags.of_project(connection, project_id):
            pointing.setdefault(tag.digest, []).append(f"{tag.name}:{tag.tag}")
        audited: list[Audited] = []
        for digest, release in sorted(found.items()):
            images = images_of(release)
            untrusted = [image for image in images if not is_trusted(image, trusted)]
            audited.append(Audited(digest, pointing.get(digest, []), images, untrusted))
        return audited

    return await control.store.read(look)


async def warm(
    control: Control, project_id: str, text: str, *, memory_mib: int | None, timeout_s: float
) -> dict[str, Any]:
    """Have the node prepare a template for starts of that size; returns ``{digest, timings}`` when it has."""
    reference = parse_reference(text)
    found = None if reference is None else await templates.find(control, project_id, reference)
    if found is None:
        raise templates.not_found()
    size = memory_mib or default_resources(found.defaults).get("memory_mib") or Resources().memory_mib
    driver = control.settings.driver or found.driver
    asked = {"template_defaults": templates.without_policy(found.defaults), "driver": driver, "memory_mib": size}
    answer = await control.node.warm(found.digest, asked, timeout_s)
    return {"digest": found.digest, "timings": answer.get("timings", {})}


def images_of(release: Release) -> list[str]:
    """Return the references of all images that went into a release and into what it was made from."""
    named: Any = release.lineage.get("images")
    return [str(image) for image in cast("list[Any]", named)] if isinstance(named, list) else []


def check_reference(name: str, tag: str) -> None:
    """Raise ``InvalidRequest`` for what cannot be the name and tag of a project's template."""
    if parse_reference(f"{name}:{tag}") is None or name in RESERVED:
        raise InvalidRequest("This cannot be the name and tag of a template.", field="name")


def check_name(connection: Connection, name: str) -> None:
    """Raise ``Conflict`` when the installation brings along something of that name, which is not to be hidden."""
    if builtins.has_name(connection, name):
        raise Conflict(
            f"{name!r} is a template that the installation brings along. Choose another name.",
            code="name-taken",
            field="name",
        )


def check_room(connection: Connection, project_id: str, *, releases_more: int = 1, tags_more: int = 1) -> None:
    """Raise ``LimitExceeded`` when the project has too many releases or tags for so many more."""
    if releases.count(connection, project_id) + releases_more > RELEASES_MAX:
        raise LimitExceeded(
            f"A project may have {RELEASES_MAX} releases of templates. Delete some first.",
            code="releases-max",
            limit=RELEASES_MAX,
        )
    if tags.count(connection, project_id) + tags_more > TAGS_MAX:
        raise LimitExceeded(
            f"A project may have {TAGS_MAX} tags of templates. Remove some first.", code="tags-max", limit=TAGS_MAX
        )


def of_release(release: Release, tag: Tag | None = None, pointing: list[Tag] | None = None) -> Shown:
    all_tags = pointing if pointing is not None else [] if tag is None else [tag]
    return Shown(
        digest=release.digest,
        defaults=release.defaults,
        bytes=release.bytes,
        builtin=False,
        created_at=release.created_at,
        name=None if tag is None else tag.name,
        tag=None if tag is None else tag.tag,
        tagged_at=None if tag is None else tag.moved_at,
        source=release.source,
        base=release.base,
        build_id=release.build_id,
        untagged_at=release.untagged_at,
        deleted_at=release.deleted_at,
        tags=[f"{one.name}:{one.tag}" for one in all_tags],
        lineage=release.lineage,
        packages=release.packages,
    )


def of_builtin(template: Template) -> Shown:
    return Shown(
        digest=template.digest,
        defaults=template.defaults,
        bytes=template.bytes,
        builtin=True,
        created_at=template.seen_at,
        name=template.name,
        tag=template.tag,
        driver=template.driver,
        tags=[f"{template.name}:{template.tag}"],
    )


def _get(connection: Connection, project_id: str, reference: Reference) -> Shown:
    tag = None
    if reference.name is not None:
        tag = tags.get(connection, project_id, reference.name, reference.tag or TAG_DEFAULT)
    digest = reference.digest if tag is None else tag.digest
    release = None if digest is None else releases.get(connection, project_id, digest)
    builtin = None if tag is not None else builtins.find(connection, reference)
    if release is not None and (release.deleted_at is None or builtin is None):
        return of_release(release, tag, tags.of_project(connection, project_id, release.digest))
    if builtin is None:
        raise templates.not_found()
    return of_builtin(builtin)


def _named(name: str, tag: str, *, missing: bool = False) -> Reference:
    """Return the reference; what cannot be one is not there, or not a name to give."""
    reference = parse_reference(f"{name}:{tag}")
    if reference is None or reference.digest is not None:
        if missing:
            raise templates.not_found()
        raise InvalidRequest("This cannot be the name and tag of a template.", field="name")
    return reference


def _builtin() -> Forbidden:
    return Forbidden("The installation brings this template along: it is not the project's.", code="template-builtin")

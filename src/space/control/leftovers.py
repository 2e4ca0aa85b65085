"""What belongs to nobody, or is old, looked for on demand: the store beside the node, then the host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from space.control import dropping, snapshots, uploads, volumes, watcher
from space.control.control import Control


@dataclass(frozen=True, slots=True)
class Limits:
    """What is too old or too much although it belongs to somebody; nothing is unless it is said here.

    ``untagged_s``: releases that no tag has pointed to for so long, and nothing is made from. ``cache`` is the node's
    ``max_age_s`` and ``max_bytes`` for the kept steps of builds.
    """

    untagged_s: float | None = None
    cache: Mapping[str, float] = field(default_factory=dict[str, float])


async def clear(control: Control, *, dry_run: bool, limits: Limits = Limits()) -> list[dict[str, Any]]:
    """Remove what has no counterpart, or only look; return all of it as ``{kind, name, removed}``."""
    if not dry_run:
        await snapshots.drop_unwanted(control)
        await volumes.drop_unwanted(control)
        await uploads.drop_unwanted(control)
        await dropping.forget_builds(control)
    found = [(stray.kind, stray.name) for stray in await watcher.compare(control, dry_run=dry_run)]
    if limits.untagged_s is not None:
        found += await dropping.delete_untagged(control, limits.untagged_s, dry_run=dry_run)
    found += await dropping.compare(control, dry_run=dry_run)
    listed = [{"kind": kind, "name": name, "removed": not dry_run} for kind, name in found]
    if limits.cache:
        kept = await control.node.build_cache_gc(limits.cache, dry_run=dry_run)
        listed += [{"kind": "build-cache", "name": str(one.get("id")), "removed": not dry_run} for one in kept]
    for shown in await control.node.gc(dry_run=dry_run):
        kind, name = str(shown.get("kind")), str(shown.get("name"))
        listed.append({"kind": kind, "name": name, "removed": shown.get("removed") is True})
    return listed

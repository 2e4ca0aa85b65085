"""Finding and removing what carries this installation's names on the host and belongs to nobody.

Only names that are ids are touched, and never what a request is working on: an entry is journaled before anything is
made for it and removed after everything is gone, a request holds its machine's lock, and under that lock is looked
again before anything is removed.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

import structlog

from space.broker.journal import AT_REST, RESIDENT, Phase
from space.broker.machines import Machines
from space.drivers.base import Driver
from space.errors import SpaceError
from space.model import ids

REMOVE_S = 60.0
_IMAGELESS = AT_REST - {Phase.SUSPENDED} | RESIDENT

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Stray:
    """One thing that belonged to nobody."""

    kind: str
    name: str
    removed: bool


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of thing: which there are, whose they may be, and how one is removed."""

    name: str
    found: Iterable[str]
    owned: Callable[[], set[str]]
    remove: Callable[[str], Awaitable[object]]


async def sweep(machines: Machines, *, dry_run: bool = False) -> list[Stray]:
    """Remove all strays, or only name them. What is in use, and what cannot be removed now, waits for the next time."""
    strays: list[Stray] = []
    seen = {(kind.name, name) for kind, name in await _unowned(machines)}
    # What is gone at a second look was only just being removed.
    for kind, name in await _unowned(machines) if seen else []:
        if (kind.name, name) in seen:
            strays += await _remove(machines, kind, name, dry_run=dry_run)
    for entry in machines.entries.values():
        if entry.phase is Phase.RUNNING and not dry_run and not machines.is_locked(entry.machine):
            machines.host.settle_memory(entry, machines.driver(entry.driver))
    if not machines.damaged:
        strays += await _links(machines, dry_run=dry_run)
    if machines.host.stores:
        unfinished = await machines.host.templates.sweep(dry_run=dry_run)
        strays += [_told(Stray("template", name, removed)) for name, removed in unfinished.items()]
    if machines.host.stores and not dry_run:
        await machines.host.disks.sweep()
        await machines.host.sweep_images()
    return strays


async def _unowned(machines: Machines) -> list[tuple[_Kind, str]]:
    kinds = [*await _of_machines(machines), *_of_storage(machines)]
    found = [(kind, name) for kind in kinds for name in sorted(set(kind.found) - kind.owned())]
    return [(kind, name) for kind, name in found if ids.is_id("sbx", name) or ids.is_id("snp", name)]


async def _of_machines(machines: Machines) -> list[_Kind]:
    host, owned = machines.host, partial(_resident, machines)
    kinds = [
        _Kind("process", await driver.known(), owned, partial(_destroy, driver)) for driver in machines.drivers.values()
    ]
    return [
        *kinds,
        _Kind("channel", host.channels.known(), owned, _plainly(host.channels.remove)),
        _Kind("cgroup", host.cgroups.known(), owned, host.cgroups.remove),
        _Kind("link", host.links.known(), owned, lambda body: host.links.delete(body, None)),
    ]


def _of_storage(machines: Machines) -> list[_Kind]:
    host, snapshots = machines.host, machines.host.snapshots
    images = {path.name.removesuffix(".tmp") for path in host.images.iterdir()}
    kinds = [
        _Kind(
            "image",
            {name for name in images if ids.is_id("sbx", name)},
            partial(_with_image, machines),
            host.drop_image,
        ),
        _Kind("snapshot", snapshots.unfinished(), snapshots.known, snapshots.drop),
    ]
    for store in host.stores:
        kinds += [
            _Kind("mount", store.attached(), partial(_resident, machines), store.detach),
            _Kind("disk", store.known(), partial(_bodies, machines), store.delete),
            _Kind("snapshot", store.known_saved(), snapshots.known, snapshots.drop),
        ]
    return kinds


async def _remove(machines: Machines, kind: _Kind, name: str, *, dry_run: bool) -> list[Stray]:
    entry = machines.of_body(name)
    lock = entry.machine if entry else name
    if machines.is_locked(lock):
        return []
    removed = False
    try:
        async with machines.locked(lock, REMOVE_S):
            if name in kind.owned():
                return []
            if not dry_run:
                await kind.remove(name)
                removed = True
    except (SpaceError, OSError):
        log.exception("stray-not-removed", kind=kind.name, name=name)
    return [_told(Stray(kind.name, name, removed))]


async def _links(machines: Machines, *, dry_run: bool) -> list[Stray]:
    """What there is of links of nobody: host ends whose machine's end is gone, which are called after a number and not
    after a machine, and addresses that are said to be somebody's.
    """
    links, strays = machines.host.links, list[Stray]()
    resident = _resident(machines)
    used = {e.link for e in machines.entries.values() if e.body in resident and e.link is not None}
    for name, index in sorted(links.interfaces().items()):
        if index not in used:
            if not dry_run:
                await links.delete_interface(name)
            strays.append(_told(Stray("link", name, not dry_run)))
    for name in links.others(used):
        if not dry_run:
            links.strike(name)
        strays.append(_told(Stray("link", name, not dry_run)))
    return strays


def _told(stray: Stray) -> Stray:
    log.warning("stray", kind=stray.kind, name=stray.name, removed=stray.removed)
    return stray


def _resident(machines: Machines) -> set[str]:
    """Bodies that may have processes, links, cgroups and channels."""
    return {
        entry.body
        for entry in machines.entries.values()
        if entry.phase not in AT_REST or machines.is_unreleased(entry.body)
    } | machines.damaged


def _bodies(machines: Machines) -> set[str]:
    return {entry.body for entry in machines.entries.values()} | machines.damaged


def _with_image(machines: Machines) -> set[str]:
    suspended = {entry.body for entry in machines.entries.values() if entry.phase not in _IMAGELESS}
    return suspended | machines.images_going | machines.damaged


async def _destroy(driver: Driver, body: str) -> None:
    await driver.destroy(body, None)


def _plainly(remove: Callable[[str], None]) -> Callable[[str], Awaitable[None]]:
    async def removing(name: str) -> None:
        remove(name)

    return removing

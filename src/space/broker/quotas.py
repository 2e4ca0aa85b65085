"""How the disks of a btrfs store are limited: the store asks what one uses, and does not know which way
the file system counts.

*Simple quotas* (Linux 6.7) charge each extent to the subvolume that wrote it, as long as the extent lives, and never
lose count. *Classic quota groups* count what each subvolume refers to; deleting one that others were made of makes the
kernel lose count, and with it every limit, until all is counted anew. The first are used on a file system of our own;
they are a feature that a file system keeps, so somebody else's stays as it is. See docs/decisions/0011.
"""

import asyncio
import errno
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from space.broker import subvolumes
from space.broker.files import sync
from space.drivers import programs
from space.errors import HostError, InvalidRequest

log = structlog.get_logger()

PROGRAM_S = 60.0
RESCAN_S = 600.0
RESCAN_AGAIN_S = 0.1
WATCH_S = 90.0
"""How long after a deletion the kernel may still find that it has lost count: it clears up every 30 s."""
WATCH_EVERY_S = 1.0
ROOM_MIN = 1 << 20
"""What a disk made of a full one may still take: with simple quotas even deleting writes a few blocks of its own."""
OVER_MAX = 4 * ROOM_MIN
"""How much more than its size a disk can hold because of that; what holds more needs a larger one."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """What a disk is made of: a template, or a snapshot that holds so many bytes beyond its template."""

    path: Path
    template_bytes: int
    held_bytes: int = 0
    in_use: bool = False
    """Whether a kernel in the snapshot's memory has it mounted."""


class Quotas:
    """The limits of the subvolumes below `directory`; `note` is a file that can outlast a crash of the host."""

    def __init__(self, directory: Path, note: Path) -> None:
        self._directory = directory
        self._note = note
        self._simple = False
        self._mending = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._watch_until = 0.0

    async def open(self, machines: Path, *, own: bool) -> None:
        """Let the kernel count. On a file system of our `own` it learns to count by owner if it can; the disks in
        `machines` keep the room that they had.
        """
        if own and await self._count_by_owner(machines):
            self._simple = True
        else:
            self._simple = subvolumes.counting(self._directory) == subvolumes.SIMPLE
            if subvolumes.counting(self._directory) is None:
                subvolumes.count(self._directory, subvolumes.CLASSIC)
        log.info("disk-quotas", simple=self._simple)
        await self.sweep()

    async def close(self) -> None:
        if self._watch:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None

    async def sweep(self) -> None:
        """Drop what is left of deleted subvolumes, and have the limits hold again if the kernel lost count."""
        await self.mend()
        await self._drop_stale_groups()

    async def mend(self) -> None:
        """Have the kernel count anew if it has lost count, because until then it enforces no limit."""
        async with self._mending:
            if subvolumes.counts_hold(self._directory):
                return
            log.error("disk-limits-off", store=str(self._directory), simple=self._simple)
            if self._simple:
                return
            try:
                async with asyncio.timeout(RESCAN_S):
                    await self._count_anew()
            except TimeoutError as error:
                raise HostError("The disk store does not enforce limits.", code="disk-store-damaged") from error
            log.info("disk-limits-on", store=str(self._directory))

    def deleted(self) -> None:
        """Watch whether the kernel loses count over a deletion, which it finds out by and by."""
        self._watch_until = time.monotonic() + WATCH_S
        if not self._simple and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._watch_counts())

    def begin(self, path: Path, origin: Origin, disk_mib: int) -> None:
        """Limit a new subvolume made of `origin`, so that it has `disk_mib` beyond the template at most."""
        if self._simple:
            _limit(path, origin.held_bytes, disk_mib)
        else:
            self.change(path, origin.template_bytes, disk_mib)

    def change(self, path: Path, template_bytes: int, disk_mib: int) -> None:
        """Let the subvolume have `disk_mib` from now on. Raise `InvalidRequest` where its beginning is not known."""
        if not self._simple:
            subvolumes.limit(path, template_bytes + disk_mib * _MIB)
            return
        group = subvolumes.group(path)
        if not group.max_exclusive:
            raise InvalidRequest(
                "A disk made by an earlier version keeps its size; one made of its snapshot may have another.",
                field="resources.disk_mib",
            )
        _limit(path, group.max_exclusive - group.max_referenced, disk_mib)

    def origin_bytes(self, path: Path, size: int) -> int:
        """Return what a disk made of the subvolume, whose files take `size` bytes, begins with: as the kernel counts
        where limits go by that.
        """
        return size if self._simple else subvolumes.group(path).referenced

    def used(self, path: Path, template_bytes: int, disk_mib: int) -> int:
        """Return what a disk that may have `disk_mib` has beyond its template, as of the last commit."""
        group = subvolumes.group(path)
        if not self._simple:
            return max(0, group.referenced - template_bytes)
        if group.max_exclusive:
            return group.max_exclusive - group.max_referenced + group.referenced
        # From before the switch: what is not left of its size, which cannot be changed.
        return max(0, disk_mib * _MIB - group.max_referenced + group.referenced)

    async def _count_anew(self) -> None:
        while not subvolumes.counts_hold(self._directory):
            # SAFETY: the kernel counts anew what is there, and holds all limits again when it has.
            await programs.check(["btrfs", "quota", "rescan", "-w", str(self._directory)], timeout_s=RESCAN_S)
            await asyncio.sleep(RESCAN_AGAIN_S)  # it does not wait for one that another program just began

    async def _watch_counts(self) -> None:
        while time.monotonic() < self._watch_until:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                await self.mend()
            except (HostError, OSError) as error:
                log.warning("disk-limits-not-mended", error=str(error))  # the next sweep tries again

    async def _count_by_owner(self, machines: Path) -> bool:
        """Switch the file system to simple quotas, if that has not been done; return whether it counts like that."""
        try:
            # Where quota groups are in use already this does nothing, but tells whether the kernel knows of it.
            subvolumes.count(self._directory, subvolumes.SIMPLE)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTTY, errno.EOPNOTSUPP}:
                raise
            return False
        if subvolumes.counting(self._directory) == subvolumes.CLASSIC:
            await self.mend()
            await asyncio.to_thread(subvolumes.sync, self._directory)
            self._note_rooms(machines)
            subvolumes.count(self._directory, subvolumes.NOT)
            subvolumes.count(self._directory, subvolumes.SIMPLE)
            log.info("disk-quotas-switched")
        self._restore_rooms(machines)
        return True

    def _note_rooms(self, machines: Path) -> None:
        """Limits go with the groups; they must not be lost should the host crash before they are set again."""
        rooms = {path.name: _room(path) for path in machines.iterdir()} if machines.is_dir() else {}
        temporary = self._note.with_suffix(".tmp")
        temporary.write_text(json.dumps(rooms))
        sync(temporary)
        temporary.rename(self._note)
        sync(self._note.parent)

    def _restore_rooms(self, machines: Path) -> None:
        """What was written before is charged to nobody now, so the limit of a disk is the room that it had left."""
        if not self._note.exists():
            return
        rooms: dict[str, int] = json.loads(self._note.read_text())
        for name, room in rooms.items():
            path = machines / name
            if subvolumes.is_subvolume(path) and not subvolumes.group(path).max_referenced:
                subvolumes.limit(path, max(room, ROOM_MIN))
        subvolumes.sync(self._directory)
        self._note.unlink()

    async def _drop_stale_groups(self) -> None:
        """The groups of deleted subvolumes stay: with simple quotas while what they wrote lives, before Linux 6.12 for
        ever.
        """
        groups = subvolumes.groups_directory(self._directory)
        unused = {path.name for path in groups.glob("0_*") if _read(path / "referenced") == "0"}
        if not unused:
            return
        # Asked after the groups, so that what was made meanwhile is not taken for deleted.
        output = await programs.check(["btrfs", "subvolume", "list", str(self._directory)], timeout_s=PROGRAM_S)
        living = {f"0_{line.split()[1]}" for line in output.decode().splitlines()} | {"0_5"}
        for name in unused - living:
            with suppress(OSError):  # the kernel knows of something that is left
                # SAFETY: a group that the kernel itself has listed and whose subvolume it does not.
                subvolumes.drop_group(self._directory, int(name.removeprefix("0_")))


def _limit(path: Path, held: int, disk_mib: int) -> None:
    """Take off what the origin holds, which is charged to those who wrote it, and remember it as the difference of the
    two limits. The second never binds.
    """
    room = max(disk_mib * _MIB - held, ROOM_MIN)
    subvolumes.limit(path, room, room + held)


def _room(path: Path) -> int:
    group = subvolumes.group(path)
    return max(0, group.max_referenced - group.referenced)


def _read(file: Path) -> str:
    with suppress(OSError):
        return file.read_text().strip()
    return ""

"""What the kernel is asked of btrfs, without starting ``btrfs``: each call takes a tenth of what the program does.

Numbers and layouts are those of linux/btrfs.h. All of it blocks, a snapshot and a deletion for as long as the file
system commits, so callers let threads wait.
"""

import ctypes
import errno
import fcntl
import os
import struct
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_FIRST_INODE = 256  # BTRFS_FIRST_FREE_OBJECTID: the root directory of every subvolume
_FS_INFO, _INO_LOOKUP = 0x8400941F, 0xD0009412
_SNAP_CREATE_V2, _SNAP_DESTROY = 0x50009417, 0x5000940F
_QGROUP_LIMIT, _QGROUP_CREATE, _QUOTA_CTL = 0x8030942B, 0x4010942A, 0xC0109428
_READ_ONLY = 1 << 1
_MAX_REFERENCED, _MAX_EXCLUSIVE = 1 << 0, 1 << 1
CLASSIC, SIMPLE, NOT = 1, 4, 2
"""How quotas are counted: BTRFS_QUOTA_CTL_ENABLE, _ENABLE_SIMPLE_QUOTA, _DISABLE."""

_ARGUMENTS = struct.Struct("=qQQ32s4040s")  # fd, transid, flags, unused, name
_DESTROY = struct.Struct("=q4088s")  # fd, name
_LIMIT = struct.Struct("=QQQQQQ")  # group, flags, max_rfer, max_excl, rsv_rfer, rsv_excl

_libc = ctypes.CDLL(None, use_errno=True)


def snapshot(source: Path, target: Path, *, read_only: bool = False) -> None:
    """Make subvolume `target`, which begins as `source`. What was written to the source is in it."""
    with _opened(source) as origin, _opened(target.parent) as parent:
        flags = _READ_ONLY if read_only else 0
        arguments = bytearray(_ARGUMENTS.pack(origin, 0, flags, b"", os.fsencode(target.name)))
        # SAFETY: callers pass paths under the store, made of digests and ids that matched their patterns.
        fcntl.ioctl(parent, _SNAP_CREATE_V2, arguments)


def delete(path: Path) -> None:
    """Delete the subvolume; its space is given back soon after. Not there: success."""
    with _opened(path.parent) as parent:
        try:
            # SAFETY: as above; only a subvolume can be deleted like this, never a plain directory.
            fcntl.ioctl(parent, _SNAP_DESTROY, bytearray(_DESTROY.pack(0, os.fsencode(path.name))))
        except FileNotFoundError:
            return


@dataclass(frozen=True, slots=True)
class Group:
    """What the kernel counts of a subvolume as of the last commit, and its limits; 0 is none."""

    referenced: int
    max_referenced: int
    max_exclusive: int


def limit(path: Path, referenced: int, exclusive: int | None = None) -> None:
    """Let the subvolume refer to so many bytes at most, and to so many that it shares with none."""
    flags = _MAX_REFERENCED | (_MAX_EXCLUSIVE if exclusive is not None else 0)
    number = identity(path)
    # Asked of the directory it lies in: one that is full has no room even for being given more.
    with _opened(path.parent) as parent:
        # SAFETY: the number is that of the subvolume at a path under the store, the others are our own.
        fcntl.ioctl(parent, _QGROUP_LIMIT, _LIMIT.pack(number, flags, referenced, exclusive or 0, 0, 0))


def group(path: Path) -> Group:
    """Return the quota group of the subvolume that `path` is in."""
    directory = groups_directory(path) / f"0_{identity(path)}"
    return Group(*(int((directory / name).read_text()) for name in ("referenced", "max_referenced", "max_exclusive")))


def drop_group(path: Path, number: int) -> None:
    """Drop what is left of a deleted subvolume's group. Raise `OSError` while the kernel still needs it."""
    with _opened(path) as anywhere:
        # SAFETY: as the caller says; a group without a subvolume limits nothing.
        fcntl.ioctl(anywhere, _QGROUP_CREATE, struct.pack("=QQ", 0, number))


def count(path: Path, how: int) -> None:
    """Let the file system count like that from now on, unless it counts in some way already. Raise `OSError` with
    `EINVAL` where the kernel cannot.
    """
    with _opened(path) as anywhere:
        # SAFETY: the kernel counts and forbids nothing by itself; with `NOT`, limits go, as the caller knows.
        fcntl.ioctl(anywhere, _QUOTA_CTL, bytearray(struct.pack("=QQ", how, 0)))


def counting(path: Path) -> int | None:
    """Return how the file system counts, None when it does not."""
    groups = groups_directory(path)
    if not groups.is_dir():
        return None
    try:
        return SIMPLE if (groups / "mode").read_text().strip() == "squota" else CLASSIC
    except FileNotFoundError:
        return CLASSIC  # a kernel that knows no other


def counts_hold(path: Path) -> bool:
    """Whether the file system knows what each subvolume refers to; while it does not, it enforces no limit."""
    try:
        return (groups_directory(path) / "inconsistent").read_text().strip() == "0"
    except OSError:
        return True  # a kernel that does not tell


def sync(path: Path) -> None:
    """Commit what the file system has in memory."""
    with _opened(path) as anywhere:
        if _libc.syncfs(anywhere):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def groups_directory(path: Path) -> Path:
    """Return where the kernel shows the quota groups of the file system that `path` lies on."""
    return Path("/sys/fs/btrfs", str(uuid.UUID(bytes=bytes(_ask(path, _FS_INFO, bytearray(1024))[16:32]))), "qgroups")


def identity(path: Path) -> int:
    """Return the number of the subvolume that `path` is in."""
    buffer = bytearray(4096)
    struct.pack_into("=QQ", buffer, 0, 0, _FIRST_INODE)
    return struct.unpack_from("=Q", _ask(path, _INO_LOOKUP, buffer))[0]


def is_subvolume(path: Path) -> bool:
    """Whether there is a subvolume with exactly this path."""
    try:
        return os.lstat(path).st_ino == _FIRST_INODE
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return False


def _ask(path: Path, request: int, buffer: bytearray) -> bytearray:
    with _opened(path) as anywhere:
        fcntl.ioctl(anywhere, request, buffer)
    return buffer


@contextmanager
def _opened(path: Path) -> Generator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

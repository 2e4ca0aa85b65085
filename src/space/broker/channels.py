"""The guest channel's two ends on the host: FIFOs ``<channels_dir>/<id>/{in,out}`` that the node opens by path.

The directories belong to root, so the node can open the FIFOs but not exchange them for something that root would
then open.
"""

import errno
import fcntl
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path

from space.drivers.base import Channel
from space.errors import HostError

PIPE_BYTES = 1 << 20
_NAMES = ("in", "out")
_ACL = "system.posix_acl_access"
_ACL_VERSION = 2
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY = 0xFFFFFFFF
_READ_WRITE = 6


class Channels:
    """All channels of one installation. `uid` and `gid` are the node's."""

    def __init__(self, directory: Path, uid: int, gid: int) -> None:
        self._directory = directory
        self._uid = uid
        self._gid = gid

    def open(self) -> None:
        self._directory.mkdir(mode=0o710, parents=True, exist_ok=True)
        os.chown(self._directory, 0 if os.geteuid() == 0 else -1, self._gid)
        self._directory.chmod(0o710)

    def create(self, machine_id: str) -> Channel:
        """Make both FIFOs afresh and return them open for the machine. The caller closes the descriptors."""
        self.remove(machine_id)
        directory = self._directory / machine_id
        directory.mkdir(mode=0o750)
        at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            opened = [_make(at, name, self._uid, self._gid) for name in _NAMES]
            # SAFETY: only now may anyone but root enter; both descriptors are open already and the names are never
            # opened by root again.
            os.fchown(at, -1, self._gid)
            os.fchmod(at, 0o750)
        finally:
            os.close(at)
        return Channel(stdin=opened[0], stdout=opened[1])

    def remove(self, machine_id: str) -> None:
        directory = self._directory / machine_id
        for name in _NAMES:
            (directory / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            directory.rmdir()

    def known(self) -> set[str]:
        return {path.name for path in self._directory.iterdir()} if self._directory.is_dir() else set()


def close(channel: Channel) -> None:
    """Close the caller's copies, so that the machine alone holds the channel and its end is seen as end of file."""
    os.close(channel.stdin)
    os.close(channel.stdout)


def _make(at: int, name: str, uid: int, gid: int) -> int:
    os.mkfifo(name, 0o600, dir_fd=at)
    # Opened for both directions: neither end ever blocks or sees end of file because the other side is not there yet.
    descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    # SAFETY: root works on the descriptor, which is checked to be the FIFO just made, not on a name.
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise HostError("The guest channel could not be made.")
    fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    _admit(descriptor, uid, gid)
    return descriptor


def _admit(descriptor: int, uid: int, gid: int) -> None:
    """Let the node open a FIFO that belongs to root, and nobody else: the guest sees its mode, and with mode 0666 any
    user of the guest could open it through the agent's descriptors.

    Owner and mode alone cannot say that: runsc gives its standard streams to the guest's root, which on the host is
    root, whoever owned them before.
    """
    os.fchown(descriptor, uid, gid)
    entries = ((_OWNER, _READ_WRITE, _NOBODY), (_USER, _READ_WRITE, uid), (_GROUP, 0, _NOBODY))
    entries += ((_MASK, _READ_WRITE, _NOBODY), (_OTHER, 0, _NOBODY))
    acl = struct.pack("<I", _ACL_VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        # SAFETY: root works on the descriptor; the list names the node's user alone.
        os.setxattr(descriptor, _ACL, acl)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        # Without such lists the directory still lets only root and the node in, and the rest is inside one guest.
        os.fchmod(descriptor, 0o666)

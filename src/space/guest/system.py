"""System calls that Python does not offer, through ctypes, and the one error that operations answer with.

Credentials here are those of the *calling thread*: the C library's own wrappers would change every thread of the agent.
"""

from __future__ import annotations

import ctypes
import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from space.protocol.messages import Failure

_libc = ctypes.CDLL(None, use_errno=True)
_X86 = {"setresuid": 117, "setresgid": 119, "setgroups": 116, "renameat2": 316}
_GENERIC = {"setresuid": 147, "setresgid": 149, "setgroups": 159, "renameat2": 276}
_NUMBERS = _X86 if os.uname().machine == "x86_64" else _GENERIC
_KEEP = -1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
AT_FDCWD = -100
RENAME_NOREPLACE = 1
IS_ROOT = os.getuid() == 0
"""Whether the agent may act for other users at all."""


class Refused(Exception):
    """An operation cannot be carried out: a stable ``code`` and the guest kernel's errno if it has one."""

    def __init__(self, code: str, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.failure: Failure = {"code": code, "message": message[:1000], "errno": number}


_CODES = {
    errno.ENOENT: "not-found",
    errno.EEXIST: "already-exists",
    errno.EACCES: "permission-denied",
    errno.EPERM: "permission-denied",
    errno.ENOTDIR: "not-a-directory",
    errno.EISDIR: "is-a-directory",
    errno.ENOTEMPTY: "not-empty",
    errno.ENOSPC: "disk-full",
    errno.EDQUOT: "disk-full",
    errno.EROFS: "read-only",
    errno.ELOOP: "too-many-links",
    errno.ENAMETOOLONG: "name-too-long",
    errno.ENOEXEC: "not-executable",
}


def refused(error: OSError, what: str = "") -> Refused:
    """Return an ``OSError`` as the answer it becomes."""
    number = error.errno or errno.EIO
    text = os.strerror(number)
    return Refused(_CODES.get(number, "os-error"), f"{what}: {text}" if what else text, number)


def syscall(name: str, *arguments: object) -> int:
    """Make a raw system call in this thread; raises ``OSError``."""
    result = _libc.syscall(_NUMBERS[name], *arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library that returns -1 and sets errno; raises ``OSError``."""
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def keep_freed_memory() -> None:
    """Have the C library reuse large buffers. By default it gives each back at once and takes it anew, and the page
    faults of that cost more than all else that is done to a buffer. Up to 8 MiB stay with the agent after a burst.
    """
    try:
        _libc.mallopt(_M_MMAP_THRESHOLD, 4 * 1024 * 1024)
        _libc.mallopt(_M_TRIM_THRESHOLD, 8 * 1024 * 1024)
        _libc.mallopt(_M_ARENA_MAX, 1)  # Buffers pass from thread to thread; one pool serves all.
    except AttributeError:
        pass  # Another C library, in a test.


class Identity:
    """Who something is done as: numbers, supplementary groups, and what the environment says about them."""

    __slots__ = ("gid", "groups", "home", "name", "shell", "uid")

    def __init__(self, uid: int, gid: int, groups: tuple[int, ...], name: str, home: str, shell: str) -> None:
        self.uid = uid
        self.gid = gid
        self.groups = groups
        self.name = name
        self.home = home
        self.shell = shell


class ActingAs:
    """While entered, this thread has the identity's rights and no others, and so has what it spawns.

    ``wholly`` sets the real user too, which a program needs that is to be started; without it the real user stays root,
    so that the user's processes cannot send signals to the thread. The saved user stays root, to come back; a program
    loses that when it is executed. Does nothing when the agent is not root (a test on an ordinary machine).
    """

    __slots__ = ("_identity", "_wholly")

    def __init__(self, identity: Identity, *, wholly: bool = False) -> None:
        self._identity = identity
        self._wholly = wholly

    def __enter__(self) -> None:
        if not IS_ROOT or not self._foreign:
            return
        identity = self._identity
        try:
            _set_groups(identity.groups)
            # SAFETY: raw calls change this thread alone; groups first, the user last, because it gives up the right.
            syscall("setresgid", identity.gid if self._wholly else _KEEP, identity.gid, 0)
            syscall("setresuid", identity.uid if self._wholly else _KEEP, identity.uid, 0)
        except BaseException:
            self._come_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if IS_ROOT and self._foreign:
            self._come_back()

    @property
    def _foreign(self) -> bool:
        """Root with root's groups is what the agent is already."""
        identity = self._identity
        return bool(identity.uid or identity.gid or identity.groups)

    @staticmethod
    def _come_back() -> None:
        # SAFETY: the saved user is root, so these cannot fail; the user comes first, because it gives the right back.
        syscall("setresuid", 0, 0, 0)
        syscall("setresgid", 0, 0, 0)
        _set_groups(())


def _set_groups(groups: tuple[int, ...]) -> None:
    numbers = (ctypes.c_uint32 * max(1, len(groups)))(*groups)
    syscall("setgroups", len(groups), numbers)

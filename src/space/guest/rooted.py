"""A tree of files and the paths in it, found as programs that live in it would find them, and never outside of it.

A path of an archive is followed part by part. A symbolic link on the way counts from the tree's own root, the last part
is never followed, and what another file system is mounted over is not a part of the tree.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PATH_BYTES_MAX = 4095
RUNTIME = b".space"
_LINKS_MAX = 40
_KEPT = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Unfit(Exception):
    """What an archive holds cannot be put into the tree."""

    def __init__(self, code: str, message: str, path: bytes = b"") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.path = path


class Elsewhere(Exception):
    """The path leads to another file system."""


class Place:
    """An open directory. ``path`` has no link in it; that of the root is empty, and others begin with a slash.

    ``group`` is the group of what this process makes there.
    """

    __slots__ = ("fd", "group", "path")

    def __init__(self, fd: int, path: bytes) -> None:
        info = os.fstat(fd)
        self.fd = fd
        self.path = path
        self.group = info.st_gid if info.st_mode & stat.S_ISGID else os.getegid()


class Tree:
    """The tree below ``top``. ``made`` is told of each directory that has to be made on the way: ``(parent, name)``."""

    def __init__(self, top: str, made: Callable[[bytes, bytes], object]) -> None:
        self._made = made
        self.root = Place(os.open(top, _DIRECTORY), b"")
        self.device = os.fstat(self.root.fd).st_dev
        self._known: dict[bytes, Place] = {}
        """Directories by the paths that led to them."""
        self._stale = False
        """Whether a link or a directory has been taken away since."""

    def enter(self, path: bytes, *, make: bool = True) -> Place:
        """Return the directory that ``path``, without empty parts, leads to; valid until the next call.

        Raises ``Unfit`` where none can be, and ``Elsewhere``.
        """
        if self._stale or len(self._known) >= _KEPT:
            for place in self._known.values():
                os.close(place.fd)
            self._known.clear()
            self._stale = False
        if not path:
            return self.root
        known = self._known.get(path)
        if known is not None:
            return known
        begin = path
        while begin and begin not in self._known:
            begin = begin.rpartition(b"/")[0]
        found = self._walk(self._known.get(begin, self.root), path[len(begin) :], make=make)
        self._known[path] = found
        return found

    def changed(self) -> None:
        """A directory that was there may have other rights now."""
        self._stale = True
        self.root = Place(self.root.fd, b"")

    def open(self, path: bytes) -> Place:
        """Open a directory by a path without links, as that of a place is."""
        fd = os.dup(self.root.fd)
        for name in path.split(b"/")[1:]:
            try:
                below = os.open(name, _DIRECTORY, dir_fd=fd)
            finally:
                os.close(fd)
            fd = below
        return Place(fd, path)

    def erase(self, place: Place, name: bytes) -> None:
        """Remove whatever has that name; of a directory all that is in it. Raises ``Elsewhere`` and leaves that."""
        info = os.lstat(name, dir_fd=place.fd)
        if info.st_dev != self.device or (not place.path and name == RUNTIME):
            raise Elsewhere
        self._stale = self._stale or not stat.S_ISREG(info.st_mode)
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=place.fd)
            return
        opened = [(place.fd, name, *_opened(place.fd, name))]
        while opened:
            parent, name, fd, inside = opened[-1]
            if not inside:
                os.close(fd)
                os.rmdir(name, dir_fd=parent)
                opened.pop()
                continue
            below = inside.pop()
            try:
                os.unlink(below, dir_fd=fd)
            except (IsADirectoryError, PermissionError):
                opened.append((fd, below, *_opened(fd, below)))

    def _walk(self, begin: Place, path: bytes, *, make: bool) -> Place:
        pending, links = path.split(b"/")[::-1], 0
        here = Place(os.dup(begin.fd), begin.path)
        try:
            while pending:
                name = pending.pop()
                if name in (b"", b"."):
                    continue
                if name == b"..":  # of a link
                    found: Place | bytes = self.open(here.path.rpartition(b"/")[0])
                else:
                    found = self._step(here, name, make=make)
                if isinstance(found, bytes):
                    links += 1
                    if links > _LINKS_MAX:
                        raise Unfit("unsafe-path", "Symbolic links lead in a circle.")
                    pending += found.split(b"/")[::-1]
                    if not found.startswith(b"/"):
                        continue
                    found = self.open(b"")
                os.close(here.fd)
                here = found
        except BaseException:
            os.close(here.fd)
            raise
        return here

    def _step(self, here: Place, name: bytes, *, make: bool) -> Place | bytes:
        """Return a directory in another, or what a symbolic link says."""
        if not here.path and name == RUNTIME:
            raise Unfit("unsafe-path", "What is below /.space is not a template's.")
        path = here.path + b"/" + name
        if len(path) > PATH_BYTES_MAX:
            raise Unfit("template-too-large", f"A path may have {PATH_BYTES_MAX} bytes at most.")
        try:
            fd = os.open(name, _DIRECTORY, dir_fd=here.fd)
        except FileNotFoundError:
            if not make:
                raise Unfit("unsafe-path", "It leads to where nothing is.") from None
            os.mkdir(name, 0o755, dir_fd=here.fd)
            self._made(here.path, name)
            fd = os.open(name, _DIRECTORY, dir_fd=here.fd)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            try:
                return os.readlink(name, dir_fd=here.fd)
            except OSError:
                raise Unfit("unsafe-path", "It leads through what is no directory.") from None
        if os.fstat(fd).st_dev != self.device:
            os.close(fd)
            raise Elsewhere
        return Place(fd, path)


def names(fd: int) -> list[bytes]:
    """Return what is in an open directory."""
    return [os.fsencode(name) for name in os.listdir(fd)]


def _opened(directory: int, name: bytes) -> tuple[int, list[bytes]]:
    fd = os.open(name, _DIRECTORY, dir_fd=directory)
    return fd, names(fd)

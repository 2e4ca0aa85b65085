"""``unpack-layer``: apply one layer of an image, a plain tar on standard input, to the tree below ``/``. As root.

    python3 -I -S agent.pyz unpack-layer [DIRECTORY]

Layers are as the OCI image specification says: ``.wh.NAME`` hides NAME of the layers below, ``.wh..wh..opq`` all that
they have in its directory, and neither what this layer has made, wherever in it they stand. Modes (set-uid, too),
numbers of owners, times, hard links and holes are kept; of extended attributes ``user.*`` and ``security.capability``
where the kernel takes them. Left out is what lies under other mounts (``/proc``, ``/dev``, …); refused is what the
errors say. A layer is what its maker likes: a link in it counts from the root of the tree, and what has the name of a
link takes its place.

Ends with status 0 and a line of JSON on standard output that counts what was done, or with 3 and one on standard error
that says why not: ``{"code", "message", "path"}``. Standard library only, and not imported by the agent.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys

from space.guest.rooted import PATH_BYTES_MAX, RUNTIME, Elsewhere, Place, Tree, Unfit, names
from space.guest.tape import Tape, members, parts_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tarfile
    from typing import Any

REFUSED = 3
ENTRIES_MAX = 2_000_000
_OWNER_MAX = 2**32 - 2
_ROOT = 0
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_XATTR = "SCHILY.xattr."
_FILE, _DIRECTORY = -1, -2
"""What this layer has made of a name: something that is no directory; a directory that has no time to be given."""


def main() -> None:
    os.umask(0)
    layer = Layer(0, sys.argv[2] if len(sys.argv) > 2 else "/")
    try:
        told = layer.unpack()
    except Unfit as error:
        told = {
            "code": error.code,
            "message": error.message,
            "path": error.path.decode("utf-8", "backslashreplace")[:PATH_BYTES_MAX],
        }
        sys.stderr.write(json.dumps(told) + "\n")
        sys.exit(REFUSED)
    sys.stdout.write(json.dumps(told) + "\n")


class Layer:
    """One layer from a descriptor, and what of it has been done."""

    def __init__(self, source: int, top: str) -> None:
        self._tape = Tape(source)
        self._tree = Tree(top, lambda parent, name: self._note(parent, name, _DIRECTORY))
        self._made: dict[bytes, dict[bytes, int]] = {b"": {}}
        """By directory what this layer has made in it: a directory's time, or one of the two above."""
        self._root_time: int | None = None
        self.entries = 0
        self.bytes = 0
        self.hidden = 0
        self.skipped = 0
        self.xattrs_left_out = 0

    def unpack(self) -> dict[str, int]:
        """Do all of it, and return the counts. Raises ``Unfit``."""
        for archive, member in members(self._tape):
            path = _bytes(member.name)
            self.entries += 1
            if self.entries > ENTRIES_MAX:
                raise Unfit("template-too-large", f"A layer may hold {ENTRIES_MAX} files at most.")
            try:
                self._apply(archive, member, path)
            except Elsewhere:
                self.skipped += 1
            except Unfit as error:
                raise Unfit(error.code, error.message, error.path or path) from None
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                code = "disk-full" if full else "layer-not-unpacked"
                raise Unfit(code, f"{error.strerror}.", path) from None
        self._tape.drain()
        self._set_times()
        counted = ("entries", "bytes", "hidden", "skipped", "xattrs_left_out")
        return {name: getattr(self, name) for name in counted}

    def _apply(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: bytes) -> None:
        parts = _parts(path)
        if member.ischr() or member.isblk():
            raise Unfit("device-in-template", "A template may not hold device nodes.")
        if not parts:
            self._apply_root(member)
            return
        name = parts[-1]
        if any(part.startswith(_WHITEOUT) for part in parts[:-1]):  # what another kind of file system keeps for itself
            raise Elsewhere
        place = self._tree.enter(b"/".join(parts[:-1]))
        if not place.path and name in (RUNTIME, _WHITEOUT + RUNTIME):
            if not member.isdir():
                raise Unfit("unsafe-path", "/.space is not a template's.")
            self.skipped += 1
        elif name.startswith(_WHITEOUT):
            self._hide(place, name)
        elif member.isdir():
            self._make_directory(member, place, name)
        elif member.islnk():
            self._make_link(member, place, name)
        else:
            self._make(archive, member, place, name)

    # --- hiding

    def _hide(self, place: Place, name: bytes) -> None:
        if name == _OPAQUE:
            self._hide_all(place.path)
            return
        name = name[len(_WHITEOUT) :]
        if name in (b"", b".", b".."):
            raise Unfit("not-an-archive", "A whiteout names nothing.")
        if name.startswith(_WHITEOUT):
            self.skipped += 1
        elif (made := self._made.get(place.path, {}).get(name)) is None:
            self._hide_one(place, name)
        elif made != _FILE:
            self._hide_all(place.path + b"/" + name)

    def _hide_all(self, path: bytes) -> None:
        """Hide what the layers below have in a directory, and in those of this layer that are in it."""
        pending = [path]
        while pending:
            place = self._tree.open(pending.pop())
            try:
                made = self._made.get(place.path, {})
                for name in names(place.fd):
                    kind = made.get(name)
                    if kind is None:
                        self._hide_one(place, name)
                    elif kind != _FILE:
                        pending.append(place.path + b"/" + name)
            finally:
                os.close(place.fd)

    def _hide_one(self, place: Place, name: bytes) -> None:
        try:
            self._tree.erase(place, name)
            self.hidden += 1
        except FileNotFoundError:
            pass
        except Elsewhere:
            self.skipped += 1

    # --- making

    def _apply_root(self, member: tarfile.TarInfo) -> None:
        if not member.isdir():
            raise Unfit("unsafe-path", "The root is a directory.")
        root = self._tree.root.fd
        os.fchown(root, *_owner(member))
        os.fchmod(root, member.mode & 0o7777)
        self._set_attributes(root, member)
        self._root_time = _time(member)
        self._tree.changed()

    def _make_directory(self, member: tarfile.TarInfo, place: Place, name: bytes) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=place.fd)
        except FileExistsError:
            found = os.lstat(name, dir_fd=place.fd)
            if not stat.S_ISDIR(found.st_mode):
                self._replace(place, name)
                os.mkdir(name, 0o700, dir_fd=place.fd)
            elif found.st_dev != self._tree.device:
                raise Elsewhere from None
            self._tree.changed()
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.fd)
        try:
            os.fchown(fd, *_owner(member))
            os.fchmod(fd, member.mode & 0o7777)
            self._set_attributes(fd, member)
        finally:
            os.close(fd)
        self._note(place.path, name, _time(member))

    def _make_link(self, member: tarfile.TarInfo, place: Place, name: bytes) -> None:
        parts = _parts(_bytes(member.linkname))
        if not parts:
            raise Unfit("unsafe-path", "A hard link leads to a directory.")
        try:
            source = self._tree.enter(b"/".join(parts[:-1]), make=False)
            if not source.path and parts[-1] == RUNTIME:
                raise Elsewhere
            found = os.lstat(parts[-1], dir_fd=source.fd)
        except (Elsewhere, FileNotFoundError):
            raise Unfit("unsafe-path", "A hard link leads to where nothing is.") from None
        if stat.S_ISDIR(found.st_mode):
            raise Unfit("unsafe-path", "A hard link leads to a directory.")
        if (source.path, parts[-1]) != (place.path, name):
            self._link(source.path, parts[-1], place.path, name)
        self._note(place.path, name, _FILE)

    def _link(self, source_path: bytes, source_name: bytes, path: bytes, name: bytes) -> None:
        place = self._tree.open(path)
        try:
            if _exists(place, name):
                self._replace(place, name)
            source = self._tree.open(source_path)
            try:
                os.link(source_name, name, src_dir_fd=source.fd, dst_dir_fd=place.fd, follow_symlinks=False)
            finally:
                os.close(source.fd)
        except FileNotFoundError:
            raise Unfit("unsafe-path", "A hard link takes the place of what it leads to.") from None
        finally:
            os.close(place.fd)

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, place: Place, name: bytes) -> None:
        if member.isreg():
            make = self._make_file
        elif member.issym():
            make = self._make_symlink
        elif member.isfifo():
            make = self._make_fifo
        else:
            raise Unfit("not-an-archive", f"An entry is of type {member.type!r}, which is no file's.")
        try:
            make(archive, member, place, name)
        except FileExistsError:
            self._replace(place, name)
            make(archive, member, place, name)
        self._note(place.path, name, _FILE)

    def _make_file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, place: Place, name: bytes) -> None:
        mode = member.mode & 0o7777
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, mode & 0o777, dir_fd=place.fd)
        try:
            self._fill(fd, archive, member)
            owner = _owner(member)
            if owner != (_ROOT, place.group):
                os.fchown(fd, *owner)
            self._set_attributes(fd, member)
            if mode & ~0o777:  # lost to whoever writes or gives away
                os.fchmod(fd, mode)
            time = _time(member)
            os.utime(fd, ns=(time, time))
        finally:
            os.close(fd)

    def _fill(self, fd: int, archive: Any, member: Any) -> None:
        extents = parts_of(archive, member)
        for offset, size in extents:
            if offset:
                os.lseek(fd, offset, os.SEEK_SET)
            for piece in self._tape.pieces(size):
                written = os.write(fd, piece)
                while written < len(piece):
                    written += os.write(fd, piece[written:])
            self.bytes += size
        if member.sparse is not None:
            os.ftruncate(fd, member.size)

    def _make_symlink(self, _archive: tarfile.TarFile, member: tarfile.TarInfo, place: Place, name: bytes) -> None:
        os.symlink(_bytes(member.linkname), name, dir_fd=place.fd)
        self._finish(member, place, name)

    def _make_fifo(self, _archive: tarfile.TarFile, member: tarfile.TarInfo, place: Place, name: bytes) -> None:
        os.mkfifo(name, member.mode & 0o777, dir_fd=place.fd)
        self._finish(member, place, name)

    def _finish(self, member: tarfile.TarInfo, place: Place, name: bytes) -> None:
        os.chown(name, *_owner(member), dir_fd=place.fd, follow_symlinks=False)
        self.xattrs_left_out += sum(key.startswith(_XATTR) for key in member.pax_headers)
        time = _time(member)
        os.utime(name, ns=(time, time), dir_fd=place.fd, follow_symlinks=False)

    def _set_attributes(self, fd: int, member: tarfile.TarInfo) -> None:
        for key, value in member.pax_headers.items():
            if not key.startswith(_XATTR):
                continue
            name = key[len(_XATTR) :]
            try:
                if not name.startswith("user.") and name != "security.capability":
                    raise ValueError(name)
                os.setxattr(fd, _bytes(name), _bytes(value))
            except (OSError, ValueError):
                self.xattrs_left_out += 1

    def _replace(self, place: Place, name: bytes) -> None:
        """Make room for something of another kind, or another file. Raises ``Elsewhere``."""
        self._tree.erase(place, name)
        self._made.get(place.path, {}).pop(name, None)
        pending = [place.path + b"/" + name]
        while pending:
            directory = pending.pop()
            made = self._made.pop(directory, {})
            pending += [directory + b"/" + name for name, kind in made.items() if kind != _FILE]

    def _note(self, directory: bytes, name: bytes, kind: int) -> None:
        """Remember what this layer has made, and that it has made something in each directory above."""
        here, missing = directory, list[bytes]()
        while here not in self._made:
            self._made[here] = {}
            missing.append(here)
            here = here.rpartition(b"/")[0]
        for path in missing:
            above, _, last = path.rpartition(b"/")
            self._made[above].setdefault(last, _DIRECTORY)
        self._made[directory][name] = kind

    def _set_times(self) -> None:
        """A directory's time changes with what is made in it, so this comes last."""
        root = self._tree.root.fd
        for directory, made in self._made.items():
            for name, time in made.items():
                if time >= 0:
                    path = (directory + b"/" + name)[1:]
                    os.utime(path, ns=(time, time), dir_fd=root, follow_symlinks=False)
        if self._root_time is not None:
            os.utime(root, ns=(self._root_time, self._root_time))


def _parts(path: bytes) -> list[bytes]:
    if b"\0" in path:
        raise Unfit("unsafe-path", "A path has a NUL in it.", path)
    if len(path) > PATH_BYTES_MAX:
        raise Unfit("template-too-large", f"A path may have {PATH_BYTES_MAX} bytes at most.", path)
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise Unfit("unsafe-path", "A path leads upwards.", path)
    return parts


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _owner(member: tarfile.TarInfo) -> tuple[int, int]:
    if not (0 <= member.uid <= _OWNER_MAX and 0 <= member.gid <= _OWNER_MAX):
        raise Unfit("not-an-archive", "The number of an owner is none.")
    return member.uid, member.gid


def _time(member: tarfile.TarInfo) -> int:
    """Return nanoseconds. A time that makes no sense is the beginning of all times."""
    seconds, _, fraction = member.pax_headers.get("mtime", str(member.mtime)).partition(".")
    try:
        nanoseconds = int(seconds) * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))
    except ValueError:
        return 0
    return min(max(nanoseconds, 0), (1 << 63) - 1)


def _exists(place: Place, name: bytes) -> bool:
    try:
        os.lstat(name, dir_fd=place.fd)
    except FileNotFoundError:
        return False
    return True

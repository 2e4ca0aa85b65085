"""A build's context: a tar of files from which a Dockerfile copies. Read in a child of the node (`reader.py`) alone.

The archive is first made plain and looked through once; nothing of it is ever unpacked here.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import posixpath
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from e2b_dockerfile_utils import PatternMatcher

from space.node.builds.layers import BROKEN, compression_of, decompressed_file
from space.node.builds.refusals import Refusal

ENTRIES_MAX = 200_000
PATH_CHARS_MAX = 4095
"""Longer ones are not unpacked either."""
HEADER_BYTES_MAX = 1024 * 1024
LINKS_MAX = 40
_BLOCK = 1024 * 1024
_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
FILE, DIRECTORY, LINK = "file", "directory", "link"


@dataclass(slots=True)
class Entry:
    """One path of a context. ``member`` is where its content is; ``target`` is a link's."""

    kind: str
    mode: int
    uid: int
    gid: int
    mtime: float
    member: tarfile.TarInfo | None = None
    target: str = ""


class BoundedMember(tarfile.TarInfo):
    """A member whose extended header, which the library reads whole, is bounded."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo | None:
        if self.type in _EXTENDED and self.size > HEADER_BYTES_MAX:
            raise tarfile.ReadError("a header is too large")
        return super()._proc_member(archive)  # type: ignore[misc]


class Context:
    """The files of a plain tar, by path relative to its root; the root itself is ``""``.

    With ``bytes_max`` they may have so many bytes together, each hard link its file's and holes as well: an archive of
    little else would keep whoever reads them for hours.
    """

    def __init__(self, path: Path, bytes_max: int | None = None) -> None:
        self._file = path.open("rb")
        self._left = bytes_max
        self.entries: dict[str, Entry] = {"": Entry(DIRECTORY, 0o755, 0, 0, 0)}
        self._children: dict[str, set[str]] = {"": set()}
        try:
            self._archive = tarfile.open(fileobj=self._file, mode="r:", tarinfo=BoundedMember)  # noqa: SIM115
            while (member := self._archive.next()) is not None:
                forget_members(self._archive)
                self._add(member)
        except (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError) as error:
            raise Refusal("archive-damaged", f"The archive cannot be read: {error}") from error

    def ignore(self, text: str) -> None:
        """Leave out what a .dockerignore excludes."""
        try:
            matcher = PatternMatcher(text.splitlines())
        except ValueError as error:
            raise Refusal("dockerfile-invalid", f".dockerignore: {error}") from error
        for path in [path for path in self.entries if matched(matcher, path)]:
            # A directory that is excluded stays as far as something in it does not.
            self.entries.pop(path)
        for path in list(self.entries):
            self._ensure_parents(path)

    def read(self, path: str, most: int) -> str | None:
        """Return a small text file; None when there is none."""
        entry = self.entries.get(self._followed(path) or "\0")
        if entry is None or entry.kind != FILE:
            return None
        data = b"".join(self._content(entry))[: most + 1] if self._size(entry) <= most else b"x" * (most + 1)
        if len(data) > most:
            raise Refusal("context-too-large", f"{path} is larger than {most} bytes.")
        return data.decode("utf-8", "replace")

    def find(self, pattern: str, *, follow: bool = True) -> list[str]:
        """Return the paths that a source of COPY names: one, or those that its wildcards match.

        Links are followed; without ``follow`` not one that is the source itself.
        """
        parts = [part for part in posixpath.normpath("/" + pattern).split("/") if part]
        found = [""]
        for part in parts:
            if any(mark in part for mark in "*?["):
                wanted = part.replace("[^", "[!")
                found = [
                    posixpath.join(base, name)
                    for base in (self._followed(path) for path in found)
                    if base is not None
                    for name in sorted(self._children.get(base, ()))
                    if fnmatch.fnmatchcase(name, wanted)
                ]
            else:
                found = [posixpath.join(base, part) for base in map(self._followed, found) if base is not None]
        followed = [path for path in (map(self._followed, found) if follow else found) if path is not None]
        return [path for path in followed if path in self.entries]

    def below(self, path: str) -> Iterator[str]:
        """Yield everything in a directory, parents before children, in the order of names."""
        waiting = [path]
        while waiting:
            here = waiting.pop()
            if here != path:
                yield here
            if self.entries[here].kind == DIRECTORY:
                names = sorted(self._children.get(here, ()), reverse=True)
                waiting += [p for p in (posixpath.join(here, name) for name in names) if p in self.entries]

    def digest(self, paths: Iterable[str], matcher: PatternMatcher | None = None) -> str:
        """Return the digest of files and all in them: names, kinds, modes, content; not times."""
        whole = hashlib.sha256()
        for path in paths:
            for one in (path, *self.below(path)):
                if matcher is not None and matched(matcher, one[len(path) :].lstrip("/")):
                    continue
                entry = self.entries[one]
                name = one[len(path) :] if one != path or entry.kind == DIRECTORY else posixpath.basename(one)
                whole.update(
                    f"{name}\0{entry.kind}\0{entry.mode:o}\0{entry.target}\0".encode("utf-8", "surrogateescape")
                )
                if entry.kind == FILE:
                    content = hashlib.sha256()
                    for piece in self._content(entry):
                        content.update(piece)
                    whole.update(content.digest())
        return f"sha256:{whole.hexdigest()}"

    def open(self, entry: Entry) -> IO[bytes]:
        """Return a file's content."""
        content = self._archive.extractfile(entry.member) if entry.member is not None else None
        return content or io.BytesIO()

    def _content(self, entry: Entry) -> Iterator[bytes]:
        with self.open(entry) as content:
            yield from iter(lambda: content.read(_BLOCK), b"")

    def _size(self, entry: Entry) -> int:
        return entry.member.size if entry.member is not None else 0

    def _add(self, member: tarfile.TarInfo) -> None:
        if ".." in member.name.split("/"):
            raise Refusal("archive-damaged", f"The archive has a path that leads out of it: {member.name[:200]!r}")
        if len(member.name) > PATH_CHARS_MAX:
            raise Refusal("archive-damaged", f"The archive has a path that is too long: {member.name[:200]!r}…")
        path = posixpath.normpath("/" + member.name).lstrip("/")
        entry = self._entry(member, path)
        if entry is None:
            return
        if len(self.entries) >= ENTRIES_MAX:
            raise Refusal("context-too-large", f"The archive has more than {ENTRIES_MAX} files.")
        if self._left is not None:
            self._left -= self._size(entry)
            if self._left < 0:
                raise Refusal(
                    "context-too-large", "The archive's files are too large together, links and holes counted."
                )
        if path:
            before = self.entries.get(path)
            if before is not None and before.kind == DIRECTORY and entry.kind != DIRECTORY:
                for below in list(self.below(path)):
                    del self.entries[below]
            self._ensure_parents(path)
        self.entries[path] = entry

    def _entry(self, member: tarfile.TarInfo, path: str) -> Entry | None:
        common = (stat.S_IMODE(member.mode), member.uid, member.gid, member.mtime)
        if member.isdir():
            return Entry(DIRECTORY, *common)
        if member.issym():
            return Entry(LINK, *common, target=member.linkname)
        if member.isreg() and path:
            return Entry(FILE, *common, member=member)
        if member.islnk():
            linked = self.entries.get(posixpath.normpath("/" + member.linkname).lstrip("/"))
            if linked is None or linked.kind != FILE:
                raise Refusal("archive-damaged", f"The archive links to what is not there: {member.linkname[:200]!r}")
            return linked
        if member.ischr() or member.isblk():
            raise Refusal("archive-damaged", f"The archive has a device: {member.name[:200]!r}")
        return None  # A FIFO: nothing that could be copied.

    def _ensure_parents(self, path: str) -> None:
        while path:
            parent, name = posixpath.split(path)
            known = self.entries.get(parent)
            if known is None or known.kind != DIRECTORY:
                self.entries[parent] = Entry(DIRECTORY, 0o755, 0, 0, 0)
            children = self._children.setdefault(parent, set())
            if known is not None and name in children:
                return
            children.add(name)
            path = parent

    def _followed(self, path: str) -> str | None:
        """Return where a path leads; links lead nowhere but within the context. None: nowhere."""
        parts, done = path.split("/") if path else [], ""
        for _ in range(LINKS_MAX):
            while parts:
                done = posixpath.normpath(posixpath.join("/", done, parts.pop(0))).lstrip("/")
                entry = self.entries.get(done)
                if entry is None:
                    return None
                if entry.kind == LINK:
                    base = "" if entry.target.startswith("/") else posixpath.dirname(done)
                    parts = [part for part in entry.target.split("/") if part] + parts
                    done = base
                    break
            else:
                return done
        return None


def forget_members(archive: Any) -> None:
    """The library would keep every member; nobody asks it for one."""
    archive.members.clear()


def matched(matcher: PatternMatcher, path: str) -> bool:
    """Whether a path is one that is to be left out; the top itself never is."""
    return bool(path) and _readable(path) and matcher.matches(path)


def make_plain(source: Path, target: Path, bytes_max: int) -> Path:
    """Return where an archive is plain: itself, or ``target`` where it has been compressed."""
    with source.open("rb") as file:
        if compression_of(file.read(8)) is None:
            return source
    written = 0
    try:
        with target.open("wb") as file:
            for piece in decompressed_file(source):
                written += len(piece)
                if written > bytes_max:
                    raise Refusal("context-too-large", f"The archive is larger than {bytes_max} bytes, decompressed.")
                file.write(piece)
    except BROKEN as error:
        raise Refusal("archive-damaged", f"The archive cannot be decompressed: {error}") from error
    return target


def _readable(path: str) -> bool:
    """Whether a name is text: what is not matches no pattern."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True

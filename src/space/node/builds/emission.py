"""The tar that brings files to their place in a builder. Made in a child of the node (`reader.py`) alone."""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from e2b_dockerfile_utils import PatternMatcher

from space.node.builds.contexts import DIRECTORY, FILE, LINK, BoundedMember, Context, Entry, forget_members, matched
from space.node.builds.layers import BROKEN, decompressed
from space.node.builds.refusals import Refusal

_TAR_HEAD_BYTES = 512
_READ_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Placing:
    """Where things come to be, relative to a directory that exists.

    ``missing`` are the directories on the way that do not, the last of them the target; ``inside`` the target, ``name``
    what a single file is called there. ``owner`` and ``mode`` are given to everything, ``owner_within`` to what is in
    an archive; None keeps what it has.
    """

    missing: tuple[str, ...]
    inside: str
    name: str | None
    owner: tuple[int, int] | None
    owner_within: tuple[int, int] | None
    mode: int | None

    @classmethod
    def of(cls, asked: dict[str, Any]) -> Placing:
        owner, within = asked["owner"], asked["owner_within"]
        return cls(
            tuple(asked["missing"]),
            asked["inside"],
            asked["name"],
            None if owner is None else tuple(owner),
            None if within is None else tuple(within),
            asked["mode"],
        )


class Emission:
    """Writes the tar to ``out``."""

    def __init__(self, out: IO[bytes], placing: Placing) -> None:
        self._placing = placing
        self._archive = tarfile.open(  # noqa: SIM115 - ``end`` closes it
            fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_READ_BYTES
        )
        self._made: set[str] = set()

    def begin(self, top: Entry | None) -> None:
        """Make the directories on the way; the target is as ``top``, the directory that is copied to it."""
        for path in self._placing.missing:
            as_top = top is not None and path == self._placing.missing[-1]
            self._write(path, top if as_top and top is not None else Entry(DIRECTORY, 0o755, 0, 0, 0), None)

    def add(self, context: Context, path: str, exclude: PatternMatcher | None) -> None:
        """Add a file, or what is in a directory."""
        entry = context.entries[path]
        if entry.kind != DIRECTORY:
            name = self._placing.name or posixpath.basename(path)
            self._put(context, posixpath.join(self._placing.inside, name), entry)
            return
        for below in context.below(path):
            relative = below[len(path) :].lstrip("/")
            if exclude is None or not matched(exclude, relative):
                self._put(context, posixpath.join(self._placing.inside, relative), context.entries[below])

    def add_text(self, name: str, text: str) -> None:
        """Add a file that stands in the Dockerfile."""
        data = text.encode("utf-8", "surrogateescape")
        path = posixpath.join(self._placing.inside, self._placing.name or name)
        self._write(path, Entry(FILE, 0o644, 0, 0, 0), io.BytesIO(data), len(data))

    def add_archive(self, context: Context, path: str) -> None:
        """Add what is in a tar that is in the context, compressed or not."""
        with context.open(context.entries[path]) as content:
            source: Any = Pieces(decompressed(content))
            try:
                with tarfile.open(fileobj=source, mode="r|", tarinfo=BoundedMember) as archive:
                    while (member := archive.next()) is not None:
                        forget_members(archive)
                        self._copy_member(archive, member)
            except (tarfile.TarError, *BROKEN) as error:
                raise Refusal("archive-damaged", f"{path}: the archive cannot be read: {error}") from error

    def end(self) -> None:
        self._archive.close()

    def _copy_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        if member.ischr() or member.isblk():
            raise Refusal("archive-damaged", f"The archive has a device: {member.name[:200]!r}")
        if ".." in member.name.split("/"):
            raise Refusal("archive-damaged", f"The archive has a path that leads out of it: {member.name[:200]!r}")
        member.name = posixpath.join(self._placing.inside, member.name.lstrip("/"))
        if member.islnk():
            member.linkname = posixpath.join(self._placing.inside, member.linkname.lstrip("/"))
        self._adjust(member, self._placing.owner_within)
        self._archive.addfile(member, archive.extractfile(member) if member.isreg() else None)
        forget_members(self._archive)

    def _put(self, context: Context, name: str, entry: Entry) -> None:
        if entry.kind == FILE and entry.member is not None:
            with context.open(entry) as content:
                self._write(name, entry, content, entry.member.size)
        else:
            self._write(name, entry, None)

    def _write(self, name: str, entry: Entry, content: IO[bytes] | None, size: int = 0) -> None:
        member = tarfile.TarInfo(name)
        member.type = {FILE: tarfile.REGTYPE, DIRECTORY: tarfile.DIRTYPE, LINK: tarfile.SYMTYPE}[entry.kind]
        member.mode, member.uid, member.gid = entry.mode, entry.uid, entry.gid
        member.mtime, member.size, member.linkname = entry.mtime, size, entry.target
        self._adjust(member, self._placing.owner)
        self._archive.addfile(member, content)
        forget_members(self._archive)

    def _adjust(self, member: tarfile.TarInfo, owner: tuple[int, int] | None) -> None:
        member.uname = member.gname = ""
        if owner is not None:
            member.uid, member.gid = owner
        if self._placing.mode is not None and not member.issym():
            member.mode = self._placing.mode


class Pieces:
    """Pieces of bytes as a file that can be read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (piece := next(self._pieces, b"")):
            self._rest += piece
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def is_tar(context: Context, path: str) -> bool:
    """Whether a file of the context is a tar, compressed or not."""
    with context.open(context.entries[path]) as content:
        try:
            head = Pieces(decompressed(content)).read(_TAR_HEAD_BYTES)
            tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except (tarfile.TarError, *BROKEN):
            return False
    return True

"""Build contexts: a directory as a tar, without what its .dockerignore leaves out; the same content, the same bytes."""

import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from e2b_dockerfile_utils import PatternMatcher

from space.errors import InvalidRequest
from space.sdk.archives import member

TIME = 946_684_800
"""When every file of a context was changed (2000-01-01): a checkout's own times are another each time."""
IGNORE_BYTES_MAX = 1024 * 1024


def pack(directory: Path, dockerfile: str | None = None) -> IO[bytes]:
    """Return a directory as a tar in a temporary file, positioned at its beginning, in the order of names.

    Files, directories and links with their permission bits, and no owners or times. What ``<dockerfile>.dockerignore``
    or else ``.dockerignore`` names is left out, but never the Dockerfile or that file itself.
    """
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} is not a directory.", code="no-context")
    if dockerfile is not None and not (directory / dockerfile).is_file():
        raise InvalidRequest(f"There is no file {dockerfile} in {directory}.", code="no-context")
    file = tempfile.TemporaryFile("w+b", prefix="space-context-")  # noqa: SIM115 (the caller closes it)
    try:
        for chunk in _packed(directory, dockerfile):
            file.write(chunk)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _packed(directory: Path, dockerfile: str | None) -> Iterator[bytes]:
    matcher, ignore_file = _ignored(directory, dockerfile)
    always = {name for name in (dockerfile, ignore_file) if name is not None}
    for name, path in _walk(directory, "", matcher, always):
        yield from member(name, path, TIME)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _ignored(directory: Path, dockerfile: str | None) -> tuple[PatternMatcher, str | None]:
    """Return what is left out, and the file that says so."""
    for name in (f"{dockerfile}.dockerignore", ".dockerignore"):
        try:
            with (directory / name).open("rb") as file:
                text = file.read(IGNORE_BYTES_MAX).decode("utf-8-sig", "surrogateescape")
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            return PatternMatcher(text.splitlines()), name
        except ValueError as error:
            raise InvalidRequest(f"{name}: {error}", code="no-context") from error
    return PatternMatcher([]), None


def _walk(directory: Path, under: str, matcher: PatternMatcher, always: set[str]) -> Iterator[tuple[str, Path]]:
    """Yield what is in a directory and below, each directory before what is in it, sorted by the bytes of names."""
    with os.scandir(directory) as found:
        entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        name = f"{under}{entry.name}"
        above = any(one.startswith(f"{name}/") for one in always)
        left_out = matcher.matches(name) and name not in always
        if entry.is_dir(follow_symlinks=False):
            if left_out and not above and not matcher.may_match_under(name):
                continue
            inside = list(_walk(Path(entry.path), f"{name}/", matcher, always))
            if not left_out or inside:
                yield name, Path(entry.path)
                yield from inside
        elif not left_out:
            yield name, Path(entry.path)

"""Paths of URLs as policies see them: one form for what means the same, none for what servers read differently."""

import functools
import re
from urllib.parse import unquote_to_bytes

PATH_CHARS_MAX = 8192
GLOB_CHARS_MAX = 512

_VISIBLE = re.compile(r"[!-~]+")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
# Encoded: control characters, slash, backslash, and a percent sign before two digits (for whoever decodes twice).
_TWO_MEANINGS = re.compile(r"%(?:[01][0-9A-F]|7F|2F|5C|25(?=[0-9A-Fa-f]{2}))")
_DOTS = re.compile(r"\.{1,2}(?:%3B.*)?")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def canonical_path(target: str) -> str | None:
    """Return the path of a request's target, without the query, with unreserved characters decoded once.

    None where two servers could read it differently: dot segments and empty ones, semicolons, backslashes, encoded
    slashes, control characters, escapes that are none or are escaped themselves, bytes that are not UTF-8, or more than
    8192 characters.
    """
    path = target.partition("?")[0]
    if path[:1] != "/" or len(path) > PATH_CHARS_MAX or _VISIBLE.fullmatch(path) is None:
        return None
    # What follows a semicolon is to some servers a parameter of the segment, to others a part of its name.
    if "//" in path or any(character in path for character in "\\#;"):
        return None
    if "%" in path:
        decoded = _decoded(path)
        if decoded is None:
            return None
        path = decoded
    if "/." in path and any(map(_DOTS.fullmatch, path.split("/"))):
        return None
    return path


def _decoded(path: str) -> str | None:
    if _BROKEN_ESCAPE.search(path):
        return None
    try:
        unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        return None
    path = _ESCAPE.sub(_once, path)
    return None if _TWO_MEANINGS.search(path) else path


def _once(match: re.Match[str]) -> str:
    character = chr(int(match[1], 16))
    return character if character in _UNRESERVED else match[0].upper()


def normalise_glob(text: str) -> str | None:
    """Return a pattern for paths in its one form; None when it could match nothing, or is too much to match.

    ``*`` stands for anything within a segment (as a segment of its own: for one that is not empty), and ``**``, which
    is a segment of its own and is there once at most, for any number of segments.
    """
    if len(text) > GLOB_CHARS_MAX or "?" in text:
        return None
    path = canonical_path(text)
    if path is None:
        return None
    segments = path.split("/")
    if sum("**" in segment for segment in segments) > (1 if "**" in segments else 0):
        return None
    return path


def glob_matches(glob: str, path: str) -> bool:
    """Whether a path in its one form is covered by such a pattern. Takes time in proportion to their lengths."""
    if "*" not in glob:
        return glob == path
    wanted, found = glob.split("/"), _segments(path)
    if "**" not in wanted:
        return len(wanted) == len(found) and all(map(_segment_matches, wanted, found))
    before = wanted.index("**")
    after = len(wanted) - before - 1
    if len(found) < before + after:
        return False
    return all(map(_segment_matches, wanted[:before], found)) and all(
        map(_segment_matches, wanted[before + 1 :], found[len(found) - after :])
    )


@functools.lru_cache(maxsize=4)
def _segments(path: str) -> tuple[str, ...]:
    """Return what a path consists of; it is held against one pattern after the other, and may have thousands."""
    return tuple(path.split("/"))


def _segment_matches(wanted: str, found: str) -> bool:
    if "*" not in wanted:
        return wanted == found
    if wanted == "*":
        return found != ""
    first, *middle, last = wanted.split("*")
    if len(found) < len(first) + len(last) or not (found.startswith(first) and found.endswith(last)):
        return False
    # The leftmost place of each piece leaves the most room for the rest: no other need be tried.
    at, end = len(first), len(found) - len(last)
    for piece in middle:
        at = found.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True

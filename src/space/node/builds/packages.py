"""Which packages a system's own lists name. Read in a child of the node (`reader.py`) alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PACKAGES_MAX = 20_000
TEXT_MAX = 200
_DIST_INFO = re.compile(r"(.+)-([^-]+)\.(?:dist-info|egg-info)")


def find_packages(asked: dict[str, Any]) -> list[dict[str, str]]:
    """Return ``{manager, name, version}`` of each package, sorted. ``asked`` has the files ``deb`` and ``apk``, each a
    path or null, and the names of directories in ``python``.
    """
    found: set[tuple[str, str, str]] = set()
    if asked["deb"] is not None:
        found.update(("deb", *one) for one in _stanzas(asked["deb"], "Package: ", "Version: ", "Status: "))
    if asked["apk"] is not None:
        found.update(("apk", *one) for one in _stanzas(asked["apk"], "P:", "V:", None))
    for name in asked["python"]:
        if (match := _DIST_INFO.fullmatch(name)) is not None:
            found.add(("python", match[1][:TEXT_MAX], match[2][:TEXT_MAX]))
    rows = sorted(found)[:PACKAGES_MAX]
    return [{"manager": manager, "name": name, "version": version} for manager, name, version in rows]


def _stanzas(path: str, name_mark: str, version_mark: str, status_mark: str | None) -> list[tuple[str, str]]:
    """Read paragraphs of lines; a package that is not installed (any more) does not count."""
    found: list[tuple[str, str]] = []
    text = Path(path).read_text("utf-8", "replace")
    for stanza in text.split("\n\n"):
        name = version = ""
        installed = True
        for line in stanza.split("\n"):
            if line.startswith(name_mark):
                name = line.removeprefix(name_mark).strip()
            elif line.startswith(version_mark):
                version = line.removeprefix(version_mark).strip()
            elif status_mark is not None and line.startswith(status_mark):
                installed = line.endswith(" installed")
        if name and installed:
            found.append((name[:TEXT_MAX], version[:TEXT_MAX]))
    return found

"""What E2B's clients are told of a file, from what the node tells. Pure."""

from collections.abc import Mapping
from typing import Any

NAMESPACE = "e2b"
"""Metadata of files are extended attributes ``user.e2b.…``."""
_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY"}
_BITS = "rwxrwxrwx"
_DIRECTORY_BYTES = 4096
"""What a directory takes at least on E2B's disks, as its clients expect. On ours an empty one takes nothing."""


def entry(told: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return an ``EntryInfo``. A link is told as what it leads to, with the place of that."""
    kind, mode = told["type"], int(told["mode"], 8)
    shown: dict[str, Any] = {
        "name": told["name"],
        "path": path,
        "size": str(max(told["size"], _DIRECTORY_BYTES) if kind == "directory" else told["size"]),
        "owner": told["user"] or str(told["uid"]),
        "group": told["group"] or str(told["gid"]),
        "metadata": told.get("metadata") or {},
    }
    if told["modified_at"] is not None:
        shown["modifiedTime"] = told["modified_at"]
    if kind == "symlink":
        end = told.get("leads_to")
        kind, mode = (end["type"], end["mode"]) if end is not None else ("", mode)
        shown["symlinkTarget"] = end["path"] if end is not None else told["target"]
    shown["type"] = _TYPES.get(kind, "FILE_TYPE_UNSPECIFIED")
    shown["mode"] = mode & 0o777
    shown["permissions"] = permissions(mode, directory=kind == "directory")
    return shown


def permissions(mode: int, *, directory: bool) -> str:
    """Return ``drwxr-xr-x`` and the like."""
    bits = "".join(letter if mode >> (8 - at) & 1 else "-" for at, letter in enumerate(_BITS))
    return ("d" if directory else "-") + bits


def in_order(paths: str) -> list[str]:
    """Return by what entries are sorted so that each directory is followed by what is in it, names in their order."""
    return paths.split("/")

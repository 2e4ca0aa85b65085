"""Carries out the steps of a stage in a builder that stands on the disk they begin with."""

from __future__ import annotations

import fnmatch
import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space.errors import HostError, RequestError, SandboxError, SpaceError
from space.model.command import Exit, ExitKind
from space.node.builds.builder import ROOT, Builder
from space.node.builds.reading import Reading

SCRIPT = "/dev/shm/space-build-step"  # noqa: S108 - in memory, in a machine of its own
ACCOUNTS_BYTES_MAX = 1024 * 1024
DEPTH_MAX = 256
LINKS_MAX = 40
GLOBBED_MAX = 10_000
_ID_MAX = 2**32 - 2


@dataclass(frozen=True, slots=True)
class Files:
    """Files to copy: ``tops`` are (tar, path in it), ``ignore`` the names of ignore files that count there."""

    tops: list[tuple[str, str]]
    directories: list[bool]
    ignore: list[str]
    keep_owner: bool


class Steps:
    """``log`` gets what programs write."""

    def __init__(self, builder: Builder, reading: Reading, log: Callable[[str, bytes], object]) -> None:
        self._builder = builder
        self._reading = reading
        self._log = log
        self._left = reading.bytes_max
        """How much may yet be read out of builders."""

    async def carry_out(self, step: dict[str, Any], files: Files | None) -> None:
        """Do one step; raise what keeps it from being done, with its line."""
        try:
            match step["kind"]:
                case "run":
                    await self._run(step)
                case "workdir":
                    await self._make_directory(step["path"], step["user"])
                case "copy" if files is not None:
                    await self._copy(step, files)
                case kind:
                    raise HostError(f"There is no step of kind {kind}.")
        except SpaceError as error:
            error.details.setdefault("step", step.get("text", ""))
            if "asked" in step:
                error.details.setdefault("asked", step["asked"])
            if step.get("line") is not None:
                error.details.setdefault("line", step["line"])
            raise

    async def extract(self, sources: list[str], place: Callable[[], Path]) -> list[tuple[str, str, bool]]:
        """Read files out of the builder: ``(tar, path in it, whether it is a directory)`` of each that is found."""
        found: list[tuple[str, str, bool]] = []
        for source in sources:
            paths = await self._matching(source)
            if not paths:
                raise RequestError(f"There is no {source[:200]!r} to copy.", code="copy-source-missing")
            for path in paths:
                target = place()
                seen = await self._builder.stat(path)
                self._left -= await self._builder.read_archive(path, target, self._left)
                name = "" if path == "/" else posixpath.basename(path)
                found.append((str(target), name, seen is not None and seen["type"] == "directory"))
        return found

    # --- run

    async def _run(self, step: dict[str, Any]) -> None:
        if await self._builder.stat(step["cwd"]) is None:
            await self._make_directory(step["cwd"], "")
        argv = step["argv"]
        if script := step.get("script"):
            await self._builder.write(SCRIPT, script.encode("utf-8", "surrogateescape"), 0o755)
            argv = [SCRIPT]
        user = step["user"] or ROOT
        async with self._builder.trusting():
            end = await self._builder.run(argv, self._log, env=step["env"], cwd=step["cwd"], user=user)
        if script:
            await self._builder.remove(SCRIPT)
        if (end.kind, end.code) != (ExitKind.EXITED, 0):
            raise _step_failed(end)

    # --- copy

    async def _copy(self, step: dict[str, Any], files: Files) -> None:
        target = step["to"]
        seen = await self._builder.stat(target)
        into = step["into"] or any(files.directories) or bool(step.get("archives"))
        into = into or (seen is not None and seen["type"] == "directory")
        directory = target if into else posixpath.dirname(target)
        anchor, missing = await self._anchor(directory)
        asked = {
            "step": {"exclude": step["exclude"], "files": step["files"], "archives": step.get("archives", [])},
            "tops": files.tops,
            "ignore": files.ignore,
            "placing": {
                "missing": missing,
                "inside": missing[-1] if missing else "",
                "name": None if into else posixpath.basename(target),
                "owner": await self._owner(step["owner"], keep=files.keep_owner),
                "owner_within": await self._owner(step["owner"], keep=True),
                "mode": step["mode"],
            },
        }
        await self._builder.write_archive(anchor, self._reading.emit(asked))

    async def _make_directory(self, path: str, user: str) -> None:
        anchor, missing = await self._anchor(path)
        if not missing:
            return
        placing = {
            "missing": missing,
            "inside": "",
            "name": None,
            "owner": await self._owner(user or None, keep=False),
            "owner_within": None,
            "mode": None,
        }
        empty = {"exclude": [], "files": [], "archives": []}
        asked = {"step": empty, "tops": [], "ignore": [], "placing": placing}
        await self._builder.write_archive(anchor, self._reading.emit(asked))

    async def _anchor(self, path: str) -> tuple[str, list[str]]:
        """Return the deepest directory on the way to a path that is there, and those below it that are not, from it."""
        names: list[str] = []
        for _ in range(DEPTH_MAX):
            seen = await self._builder.stat(path)
            if seen is not None:
                if seen["type"] != "directory":
                    raise RequestError(f"{path} is there and no directory.", code="copy-failed")
                return path, ["/".join(names[: count + 1]) for count in range(len(names))]
            path, name = posixpath.split(path)
            names.insert(0, name)
        raise RequestError("A path is too deep.", code="copy-failed")

    async def _owner(self, owner: str | None, *, keep: bool) -> tuple[int, int] | None:
        """Return the numbers of ``user[:group]``, as the builder's own files have them."""
        if owner is None:
            return None if keep else (0, 0)
        user, colon, group = owner.partition(":")
        uid, gid = _number(user), _number(group)
        if uid is None:
            entry = await self._account("/etc/passwd", user)
            if entry is None or len(entry) < 4 or (uid := _number(entry[2])) is None:
                raise RequestError(f"There is no user {user[:100]!r} in the image.", code="copy-failed")
            primary = _number(entry[3]) or 0
        else:
            primary = uid if not colon else 0
        if not colon:
            return uid, primary
        if gid is None:
            entry = await self._account("/etc/group", group)
            if entry is None or len(entry) < 3 or (gid := _number(entry[2])) is None:
                raise RequestError(f"There is no group {group[:100]!r} in the image.", code="copy-failed")
        return uid, gid

    async def _account(self, path: str, name: str) -> list[str] | None:
        data = await self._builder.read(path, ACCOUNTS_BYTES_MAX) or b""
        for line in data.decode("utf-8", "replace").split("\n"):
            if line.startswith(f"{name}:"):
                return line.split(":")
        return None

    # --- what is copied out of a builder

    async def _matching(self, pattern: str) -> list[str]:
        found = ["/"]
        for part in [part for part in posixpath.normpath("/" + pattern).split("/") if part]:
            if any(mark in part for mark in "*?["):
                wanted = part.replace("[^", "[!")
                found = [
                    posixpath.join(base, name)
                    for base in found
                    for name in await self._builder.names(base)
                    if fnmatch.fnmatchcase(name, wanted)
                ]
            else:
                found = [posixpath.join(base, part) for base in found]
            if len(found) > GLOBBED_MAX:
                raise RequestError(f"{pattern[:200]!r} matches too many files.", code="copy-failed")
        followed = [await self._followed(path) for path in found]
        return [path for path in followed if path is not None]

    async def _followed(self, path: str) -> str | None:
        """Return where a link leads in the end; None: nowhere."""
        for _ in range(LINKS_MAX):
            seen = await self._builder.stat(path, follow=False)
            if seen is None:
                return None
            if seen["type"] != "symlink" or not seen["target"]:
                return path
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), seen["target"]))
        return None


def _number(text: str) -> int | None:
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or int(text) > _ID_MAX:
        return None
    return int(text)


def _step_failed(end: Exit) -> SandboxError:
    how = {
        ExitKind.EXITED: f"ended with status {end.code}; its output is in the log",
        ExitKind.SIGNALED: f"was ended by signal {end.signal}",
        ExitKind.OOM_KILLED: "was ended because the builder's memory ran out: give it more (resources.memory_mib)",
        ExitKind.TIMED_OUT: "took too long",
    }.get(end.kind, "was lost")
    return SandboxError(
        f"A step of the build {how}.",
        code="step-failed",
        exit={"kind": end.kind, "code": end.code, "signal": end.signal},
    )

"""Templates on this host: importing a root file system, its digest, and the list of what there is.

A template is the directory ``disks/templates/<hex>`` and, written last, the record ``templates/<hex>.json``. The
digest says what is in it: every path with its type, mode, owner, size, contents, link target and extended attributes,
and the defaults. The same input gives the same digest on every host.
"""

# ruff: noqa: ASYNC240 - names in local directories are looked up in microseconds

import asyncio
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from space.broker.locks import exclusive
from space.broker.rootfs import Disks
from space.drivers import programs
from space.errors import HostError, InvalidRequest, NotFound, Unavailable

IMPORT_S = 1800.0
PREFIX = "sha256:"
_BLOCK = 1 << 20
# What a machine needs to find in its root: a mount point for the runtime, a /tmp that stays on disk (gVisor puts a
# tmpfs over an empty one), and name files that are files.
_DIRECTORIES = ((".space", 0o755), ("proc", 0o755), ("sys", 0o755), ("dev", 0o755), ("run", 0o755), ("tmp", 0o1777))
_FILES = (("etc/resolv.conf", ""), ("etc/hostname", "sandbox\n"), ("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"))


class Defaults(BaseModel):
    """What commands in a sandbox get unless they say otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: dict[str, str] = {}
    workdir: str = "/"
    user: str = "root"


class Template(BaseModel):
    """One template as the broker lists it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._/-]{0,127}$")]
    tag: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    defaults: Defaults
    bytes: int
    imported_at: float


class Templates:
    """The records in `directory`, and the disks they stand for."""

    def __init__(self, directory: Path, disks: Disks) -> None:
        self._directory = directory
        self._disks = disks

    async def open(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def sweep(self) -> None:
        """Remove what an import that was cut short left, unless one is at work now."""
        with suppress(Unavailable):
            async with self._importing(wait_s=0):
                for name in self._disks.unfinished_templates():
                    await self._disks.delete_template(name)

    def all(self) -> list[Template]:
        """Return the newest template of each name and tag; older ones can still be had by digest."""
        found = sorted(map(self._read, self._directory.glob("*.json")), key=lambda template: template.imported_at)
        return list({(template.name, template.tag): template for template in found}.values())

    def get(self, digest: str) -> Template:
        """Return one template; `digest` with its prefix. Raise `NotFound`."""
        path = self._directory / f"{digest.removeprefix(PREFIX)}.json"
        if not path.is_file():
            raise NotFound("There is no such template on this host.", template=digest)
        return self._read(path)

    def root(self, template: Template) -> Path:
        return self._disks.template(template.digest.removeprefix(PREFIX))

    async def add(self, source: Path, name: str, tag: str, defaults: Defaults) -> Template:
        """Import a tar or a directory as ``name:tag``. The same content again is found, not made twice; only its tag
        moves.
        """
        async with self._importing(wait_s=IMPORT_S):
            return await self._add(source, name, tag, defaults)

    async def _add(self, source: Path, name: str, tag: str, defaults: Defaults) -> Template:
        working = f".import-{secrets.token_hex(8)}"
        root = await self._disks.new_template(working)
        try:
            await _unpack(source, root)
            await asyncio.to_thread(complete, root)
            hexdigest = await asyncio.to_thread(digest_of, root, defaults)
            present = self._directory / f"{hexdigest}.json"
            if present.is_file():
                size = self._read(present).bytes
            else:
                size = await self._disks.seal_template(working, hexdigest)
        finally:
            await self._disks.delete_template(working)
        try:
            digest = PREFIX + hexdigest
            template = Template(
                name=name, tag=tag, digest=digest, defaults=defaults, bytes=size, imported_at=time.time()
            )
        except ValidationError as error:
            raise InvalidRequest("The template's name or tag is not valid.", field="name") from error
        self._publish(template)
        return template

    def _importing(self, wait_s: float) -> AbstractAsyncContextManager[None]:
        return exclusive(self._directory / ".lock", wait_s=wait_s, busy="A template is being imported.")

    def _publish(self, template: Template) -> None:
        hexdigest = template.digest.removeprefix(PREFIX)
        temporary = self._directory / f"{hexdigest}.tmp"
        with temporary.open("w") as file:
            file.write(template.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._directory / f"{hexdigest}.json")

    @staticmethod
    def _read(path: Path) -> Template:
        try:
            return Template.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise HostError("A template's record is damaged.", code="template-damaged") from error


async def _unpack(source: Path, root: Path) -> None:
    keep = ["--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls", "--same-permissions"]
    if source.is_dir():
        # SAFETY: an operator's own directory, named on the command line of a program that only root can run.
        words = ["cp", "-a", "--one-file-system", "--", f"{source}/.", str(root)]
    elif source.is_file():
        # SAFETY: as above; tar refuses absolute and parent paths and follows no link that the archive itself made.
        words = ["tar", "-x", *keep, "-f", str(source), "-C", str(root)]
    else:
        raise InvalidRequest("The template's source is neither a file nor a directory.", field="source")
    await programs.check(words, timeout_s=IMPORT_S)


def complete(root: Path) -> None:
    """Make what every machine needs in its root, without following any link that the template brings."""
    for name, mode in _DIRECTORIES:
        _real_directory(root, name, mode)
    _real_directory(root, "tmp/.X11-unix", 0o1777)
    _real_directory(root, "etc", 0o755)
    for name, text in _FILES:
        path = root / name
        if path.is_symlink():
            path.unlink()
        if not path.exists():
            path.write_text(text)
            path.chmod(0o644)


def _real_directory(root: Path, name: str, mode: int) -> None:
    path = root / name
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise InvalidRequest(f"/{name} of the template is not a directory.", field="source")
    if not path.exists():
        path.mkdir()
        path.chmod(mode)


def digest_of(root: Path, defaults: Defaults) -> str:
    """Return the hex digest of a tree and its defaults."""
    digest = hashlib.sha256()
    digest.update(_line({"defaults": defaults.model_dump()}))
    for path in _walk(os.fsencode(root)):
        digest.update(_line(_describe(path, os.fsencode(root))))
    return digest.hexdigest()


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _walk(root: bytes) -> Iterator[bytes]:
    """Yield everything in a tree, the tree itself first, each directory's entries in the order of bytes."""
    pending = [root]
    while pending:
        path = pending.pop()
        yield path
        if stat.S_ISDIR(os.lstat(path).st_mode):
            pending.extend(entry.path for entry in sorted(os.scandir(path), key=lambda entry: entry.name, reverse=True))


def _describe(path: bytes, root: bytes) -> dict[str, Any]:
    info = os.lstat(path)
    record: dict[str, Any] = {
        "path": os.fsdecode(path[len(root) :]),
        "type": stat.S_IFMT(info.st_mode),
        "mode": stat.S_IMODE(info.st_mode),
        "uid": info.st_uid,
        "gid": info.st_gid,
        "xattrs": {name: os.getxattr(path, name, follow_symlinks=False).hex() for name in _attributes(path)},
    }
    if stat.S_ISREG(info.st_mode):
        with Path(os.fsdecode(path)).open("rb", buffering=0) as file:
            record |= {"size": info.st_size, "sha256": hashlib.file_digest(cast("Any", file), "sha256").hexdigest()}
    elif stat.S_ISLNK(info.st_mode):
        record["target"] = os.fsdecode(os.readlink(path))  # noqa: PTH115 bytes
    elif stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
        record["device"] = info.st_rdev
    return record


def _attributes(path: bytes) -> list[str]:
    return sorted(name for name in os.listxattr(path, follow_symlinks=False) if not name.startswith("btrfs."))

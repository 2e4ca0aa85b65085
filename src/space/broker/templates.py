"""Templates on this host: what there is, and turning a tree into one more.

A template is the directory ``disks/templates/<hex>`` and, written last, the record ``templates/<hex>.json``. The
digest says what is in it: every path with its type, mode, owner, size, contents, link target and extended attributes,
and the defaults. The same input gives the same digest on every host. A template has a name only where it is the
installation's own, imported by root; whose the others are, others know.

Trees are made under a name that begins with a dot. Whatever has no record is nothing, and is swept.
"""

# ruff: noqa: ASYNC240 - names in local directories are looked up in microseconds

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from space.broker import trees
from space.broker.defaults import Defaults
from space.broker.files import sync
from space.broker.locks import exclusive
from space.broker.rootfs import Disks
from space.broker.sealing import Sealed, head, seal
from space.drivers import programs
from space.errors import HostError, InvalidRequest, NotFound, Unavailable

log = structlog.get_logger()

IMPORT_S = 1800.0
SEAL_S = 60.0
"""How long one waits for others to give their templates their names."""
AT_ONCE = 2
"""How many machines' disks are made templates of at one time."""
PREFIX = "sha256:"
SCRATCH = "scratch"
"""The template that holds nothing but what every machine needs."""


class Template(BaseModel):
    """One template as its record says. `name` and `tag` are the installation's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str | None, Field(pattern=r"^[a-z0-9][a-z0-9._/-]{0,127}$")] = None
    tag: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")] = None
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    defaults: Defaults
    bytes: int
    imported_at: float


class Templates:
    """The records in `directory`, and the disks they stand for."""

    def __init__(self, directory: Path, disks: Disks) -> None:
        self._directory = directory
        self._disks = disks
        self._working: set[str] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def open(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def make_scratch(self) -> None:
        """See to it that there is `SCRATCH`, as this version makes it. The store of disks is open.

        Where there is no room for it now, the next time has another try: all else works without.
        """
        try:
            await self._make_scratch()
        except (HostError, OSError):
            log.exception("scratch-not-made")

    async def _make_scratch(self) -> None:
        model = self._directory / ".scratch"
        shutil.rmtree(model, ignore_errors=True)
        model.mkdir(mode=0o755)
        trees.complete(os.fsencode(model))
        digest = trees.look(os.fsencode(model), head(Defaults())).digest
        shutil.rmtree(model)
        present = self._find(digest)
        if present is None or present.name != SCRATCH:
            async with self.working() as working:
                root = await self._disks.new_template(working)
                root.chmod(0o755)
                sealed = await seal(root, Defaults(), tidy=False, limit_s=SEAL_S)
                await self.keep(working, sealed, Defaults(), (SCRATCH, "latest"))

    async def sweep(self, *, dry_run: bool = False) -> dict[str, bool]:
        """Remove, or only name, what was begun and will not be finished; return for each name whether it is gone. What
        is at work waits for the next time.
        """
        with suppress(Unavailable):
            async with self._importing(wait_s=0), self._sealing(wait_s=0):
                found = sorted(self._disks.known_templates() - self.recorded() - self._working)
                if dry_run:
                    return dict.fromkeys(found, False)
                for left in self._directory.glob("*.tmp"):
                    left.unlink()
                return {name: await self._removed(name) for name in found}
        return {}

    def all(self) -> list[Template]:
        """Return every template whose record can be read, oldest first."""
        found: list[Template] = []
        for path in self._directory.glob("*.json"):
            try:
                found.append(self._read(path))
            except FileNotFoundError:
                continue
            except HostError:
                log.exception("template-damaged", record=path.name)
        return sorted(found, key=lambda template: template.imported_at)

    def listed(self) -> list[dict[str, Any]]:
        """Return what the verb `templates` answers. Of each name and tag, the newest template has it, with its
        defaults; of the others, which may be many, no more is told than that they are there.
        """
        found = self.all()
        newest = {(one.name, one.tag): one.digest for one in found}
        return [_told(one, named=bool(one.name) and newest[one.name, one.tag] == one.digest) for one in found]

    def get(self, digest: str) -> Template:
        """Return one template; `digest` with its prefix. Raise `NotFound`."""
        found = self._find(digest.removeprefix(PREFIX))
        if found is None:
            raise NotFound("There is no such template on this host.", template=digest)
        return found

    def root(self, template: Template) -> Path:
        return self._disks.template(template.digest.removeprefix(PREFIX))

    async def add(self, source: Path, name: str, tag: str, defaults: Defaults) -> Template:
        """Import a tar or a directory as ``name:tag``. The same content again is found, not made twice; only its tag
        moves.
        """
        async with self._importing(wait_s=IMPORT_S):
            working = f".import-{secrets.token_hex(8)}"
            root = await self._disks.new_template(working)
            try:
                await _unpack(source, root)
                sealed = await seal(root, defaults, tidy=False, limit_s=IMPORT_S)
                return await self.keep(working, sealed, defaults, (name, tag))
            finally:
                await self._disks.delete_template(working)

    @asynccontextmanager
    async def working(self) -> AsyncGenerator[str]:
        """Yield a name for a tree to be made under; nothing of it is left afterwards. Waits for a turn."""
        name = f".publish-{secrets.token_hex(8)}"
        async with self._turns:
            with self._at_work(name):
                try:
                    yield name
                finally:
                    await self._disks.delete_template(name)

    async def keep(
        self, working: str, sealed: Sealed, defaults: Defaults, name: tuple[str | None, str | None] = (None, None)
    ) -> Template:
        """Let a tree be a template, and have that name and tag. Where there is one like it already, it is that."""
        try:
            template = Template(
                name=name[0],
                tag=name[1],
                digest=PREFIX + sealed.digest,
                defaults=defaults,
                bytes=sealed.bytes,
                imported_at=time.time(),
            )
        except ValidationError as error:
            raise InvalidRequest("The template's name or tag is not valid.", field="name") from error
        async with self._sealing(wait_s=SEAL_S):
            present = self._find(sealed.digest)
            if present and template.name is None:
                return present
            if present:
                size = present.bytes
            else:
                size = await self._disks.seal_template(working, sealed.digest, sealed.bytes)
            return self._write(template.model_copy(update={"bytes": size}))

    async def drop(self, digest: str, check: Callable[[Template], None]) -> None:
        """Leave nothing of a template, unless `check` raises. Unknown: success."""
        hexdigest = digest.removeprefix(PREFIX)
        async with self._sealing(wait_s=SEAL_S):
            if present := self._find(hexdigest):
                check(present)
                # Nothing else happens between that and this, so nobody begins with it unseen.
                self._record(hexdigest).unlink()
                await asyncio.to_thread(sync, self._directory)
            await self._disks.delete_template(hexdigest)

    def _importing(self, wait_s: float) -> AbstractAsyncContextManager[None]:
        return exclusive(self._directory / ".lock", wait_s=wait_s, busy="A template is being imported.")

    def _sealing(self, wait_s: float) -> AbstractAsyncContextManager[None]:
        return exclusive(self._directory / ".seal", wait_s=wait_s, busy="Another template is being finished.")

    async def _removed(self, name: str) -> bool:
        try:
            await self._disks.delete_template(name)
        except (HostError, OSError):
            log.exception("template-not-removed", name=name)
            return False
        return True

    @contextmanager
    def _at_work(self, name: str) -> Generator[None]:
        self._working.add(name)
        try:
            yield
        finally:
            self._working.discard(name)

    def recorded(self) -> set[str]:
        """Return the digests of all that there are, without their prefix."""
        return {path.stem for path in self._directory.glob("*.json")}

    def _record(self, hexdigest: str) -> Path:
        return self._directory / f"{hexdigest}.json"

    def _find(self, hexdigest: str) -> Template | None:
        try:
            return self._read(self._record(hexdigest))
        except FileNotFoundError:
            return None

    def _write(self, template: Template) -> Template:
        path = self._record(template.digest.removeprefix(PREFIX))
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.write(template.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(self._directory)
        return template

    @staticmethod
    def _read(path: Path) -> Template:
        try:
            return Template.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise HostError("A template's record is damaged.", code="template-damaged") from error


def _told(template: Template, *, named: bool) -> dict[str, Any]:
    told: dict[str, Any] = {"digest": template.digest, "bytes": template.bytes}
    if named:
        told |= {"name": template.name, "tag": template.tag, "defaults": template.defaults.told()}
    return told


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

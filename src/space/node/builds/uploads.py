"""Files that clients bring for builds: appended to in order, resumable, bounded, gone after a day without a touch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterable
from pathlib import Path

from space.errors import Conflict, InvalidRequest, LimitExceeded, NotFound
from space.model.ids import is_id
from space.node.builds.room import check_room

UPLOADS_MAX = 1024
UNUSED_S = 24 * 3600.0
_BUFFER_BYTES = 1024 * 1024


class Uploads:
    """The files of a directory, each named by its id."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._writing: set[str] = set()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def size(self, upload: str) -> int:
        """Return how many bytes are there, or raise ``NotFound``."""
        try:
            return self._path(upload).stat().st_size
        except FileNotFoundError:
            raise NotFound(f"There is no upload {upload} on this node.", code="upload-not-found") from None

    async def append(self, upload: str, offset: int, chunks: AsyncIterable[bytes]) -> int:
        """Add to an upload, at its end alone; return its size. What has arrived stays when the rest does not."""
        if upload in self._writing:
            raise Conflict("Another request is adding to this upload.", code="upload-busy")
        self._writing.add(upload)
        try:
            return await self._append(upload, offset, chunks)
        finally:
            self._writing.discard(upload)

    def remove(self, upload: str) -> None:
        """Remove an upload. A build that reads it has it open, or has a name of its own for it."""
        self._path(upload).unlink(missing_ok=True)

    def lend(self, upload: str, place: Path) -> None:
        """Give an upload a second name, for a build that needs it to stay."""
        try:
            os.link(self._path(upload), place)
        except FileNotFoundError:
            raise NotFound(f"There is no upload {upload} on this node.", code="upload-not-found") from None
        os.utime(self._path(upload))

    def sweep(self) -> None:
        """Remove what nobody has touched for a day."""
        now = time.time()
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name not in self._writing and now - path.stat().st_mtime > UNUSED_S:
                    path.unlink()

    async def _append(self, upload: str, offset: int, chunks: AsyncIterable[bytes]) -> int:
        path = self._path(upload)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_nlink > 1:
                raise Conflict("A build is using this upload: it is complete.", code="upload-busy")
        self._check_count(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if offset != size:
                raise Conflict(f"The upload has {size} bytes: go on there.", code="wrong-offset", offset=size)
            buffer = bytearray()
            try:
                async for chunk in chunks:
                    buffer += chunk
                    if size + len(buffer) > self._bytes_max:
                        buffer.clear()
                        raise InvalidRequest(
                            f"An upload may have at most {self._bytes_max} bytes.",
                            code="upload-too-large",
                            limit_bytes=self._bytes_max,
                        )
                    if len(buffer) >= _BUFFER_BYTES:
                        size += await self._write(descriptor, buffer)
            finally:
                size += await self._write(descriptor, buffer)
            return size
        finally:
            os.close(descriptor)

    async def _write(self, descriptor: int, buffer: bytearray) -> int:
        data = bytes(buffer)
        buffer.clear()

        def work() -> None:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]

        check_room(self._directory, len(data))
        writing = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            await asyncio.shield(writing)
        finally:
            # The file is not closed under a thread that writes to it.
            await asyncio.wait([writing])
        return len(data)

    def _check_count(self, path: Path) -> None:
        if not path.exists() and sum(1 for _ in self._directory.iterdir()) >= UPLOADS_MAX:
            raise LimitExceeded(f"There are {UPLOADS_MAX} uploads on this node.", code="too-many-uploads")

    def _path(self, upload: str) -> Path:
        if not is_id("upl", upload):
            raise NotFound("There is no upload of that id.", code="upload-not-found")
        return self._directory / upload

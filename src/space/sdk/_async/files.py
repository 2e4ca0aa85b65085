"""Files of a sandbox. Content is streamed both ways, so its size is bounded by disks and not by memory."""

import os
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path
from typing import IO, Any

import httpx

from space.errors import SpaceError
from space.sdk._async.dataplane import AsyncDataPlane
from space.sdk._async.transport import lost
from space.sdk.archives import Packer, Unpacker
from space.sdk.backends.asyncio import in_thread
from space.sdk.requests import Request, present
from space.sdk.types import FileInfo

CHUNK_BYTES = 128 * 1024
"""More than this a socket does not take at once, and what is left over would be copied."""
NOT_FOUND = "file-not-found"


class AsyncFiles:
    """``sandbox.files``. Paths are the sandbox's; ``user`` says with whose permissions (default: the template's)."""

    def __init__(self, plane: AsyncDataPlane, sandbox_id: str) -> None:
        self._plane = plane
        self._path = f"/v1/sandboxes/{sandbox_id}/files"

    # Content

    async def read(self, path: str, *, user: str | None = None) -> bytes:
        """Return a file's bytes."""
        return b"".join([chunk async for chunk in self.read_stream(path, user=user)])

    async def read_text(self, path: str, *, user: str | None = None) -> str:
        """Return a file's text, which must be UTF-8."""
        return (await self.read(path, user=user)).decode()

    async def read_stream(
        self, path: str, *, start: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncIterator[bytes]:
        """Yield a file's bytes from ``start`` on, ``length`` of them or all."""
        headers: dict[str, str] = {"accept-encoding": "identity"}
        if start or length is not None:
            headers["range"] = f"bytes={start}-" + ("" if length is None else str(start + length - 1))
        request = Request(method="GET", path=self._path, params=present(path=path, user=user), headers=headers)
        async for chunk in self._stream(request):
            yield chunk

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        """Write a file whole, making it if need be. ``mode`` is its permission bits (``0o755``)."""
        content = data.encode() if isinstance(data, str) else data
        await self._plane.call(self._put(path, content, mode, user))

    async def write_stream(
        self, path: str, chunks: AsyncIterable[bytes], *, mode: int | None = None, user: str | None = None
    ) -> None:
        """Write a file from chunks. When it fails midway the file is not as it was."""
        await self._plane.call(self._put(path, chunks, mode, user))

    async def upload(
        self, local: str | os.PathLike[str], path: str, *, mode: int | None = None, user: str | None = None
    ) -> None:
        """Copy a local file or directory to ``path``, permission bits included."""
        source = Path(local)
        if await in_thread(source.is_dir):
            await self.write_archive(path, _packed(source), user=user)
            return
        with await in_thread(lambda: source.open("rb")) as file:
            bits = os.fstat(file.fileno()).st_mode & 0o777 if mode is None else mode
            await self.write_stream(path, _chunks(file), mode=bits, user=user)

    async def download(self, path: str, local: str | os.PathLike[str], *, user: str | None = None) -> list[str]:
        """Copy a file, or a directory with its content, of the sandbox to ``local``.

        A directory's content is untrusted: names that would lead out of ``local`` are refused, and links that would are
        not made; their names are returned.
        """
        target, info = Path(local), await self.stat(path, user=user)
        if info.type == "directory":
            await in_thread(lambda: target.mkdir(parents=True, exist_ok=True))
            unpacker = Unpacker(target, strip=1)
            try:
                async for chunk in self.archive(path, user=user):
                    await in_thread(lambda data=chunk: unpacker.feed(data))
            except BaseException:
                await in_thread(unpacker.abort)
                raise
            await in_thread(unpacker.finish)
            return unpacker.skipped
        with await in_thread(lambda: target.open("wb")) as file:
            async for chunk in self.read_stream(path, user=user):
                await in_thread(lambda data=chunk: file.write(data))
        await in_thread(lambda: target.chmod(info.mode & 0o777))
        return []

    # Directories

    async def stat(self, path: str, *, user: str | None = None) -> FileInfo:
        """Return what a path is; a link is itself, not what it points to."""
        request = Request(method="GET", path=f"{self._path}/stat", params=present(path=path, user=user))
        return FileInfo.parse(await self._plane.call(request))

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether there is something at the path."""
        try:
            await self.stat(path, user=user)
        except SpaceError as error:
            if error.code == NOT_FOUND:
                return False
            raise
        return True

    async def list(self, path: str, *, user: str | None = None) -> list[FileInfo]:
        """Return what is in a directory, sorted by name."""
        request = Request(method="GET", path=f"{self._path}/list", params=present(path=path, user=user))
        answer = await self._plane.call(request)
        return sorted((FileInfo.parse(item) for item in answer["entries"]), key=lambda info: info.name)

    async def mkdir(self, path: str, *, mode: int | None = None, user: str | None = None) -> None:
        """Make a directory and those above it; one that exists is fine."""
        await self._post("mkdir", present(path=path, mode=_octal(mode), user=user))

    async def move(self, path: str, to: str, *, user: str | None = None) -> None:
        """Rename or move; a file at ``to`` is replaced."""
        await self._post("move", present(source=path, destination=to, user=user))

    async def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Remove a file or an empty directory, with ``recursive`` a directory and all in it."""
        params = present(path=path, user=user, recursive="true" if recursive else None)
        await self._plane.call(Request(method="DELETE", path=self._path, params=params))

    # Archives

    async def archive(self, path: str, *, user: str | None = None) -> AsyncIterator[bytes]:
        """Yield a tar archive of a file or directory; the names in it begin with the last part of ``path``."""
        request = Request(method="GET", path=f"{self._path}/archive", params=present(path=path, user=user))
        async for chunk in self._stream(request):
            yield chunk

    async def write_archive(self, path: str, chunks: AsyncIterable[bytes], *, user: str | None = None) -> None:
        """Unpack a tar archive into a directory, making it if need be."""
        params = present(path=path, user=user)
        request = Request(method="PUT", path=f"{self._path}/archive", params=params, content=chunks)
        await self._plane.call(request)

    def _put(self, path: str, content: bytes | AsyncIterable[bytes], mode: int | None, user: str | None) -> Request:
        params = present(path=path, mode=_octal(mode), user=user)
        return Request(method="PUT", path=self._path, params=params, content=content)

    async def _post(self, verb: str, body: dict[str, Any]) -> None:
        await self._plane.call(Request(method="POST", path=f"{self._path}/{verb}", body=body))

    async def _stream(self, request: Request) -> AsyncIterator[bytes]:
        response = await self._plane.start(request)
        try:
            async for chunk in response.aiter_raw():
                yield chunk
        except httpx.TransportError as error:
            raise lost(request, error) from error
        finally:
            await response.aclose()


def _octal(mode: int | None) -> str | None:
    return None if mode is None else f"{mode:04o}"


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await in_thread(lambda: file.read(CHUNK_BYTES)):
        yield chunk


async def _packed(directory: Path) -> AsyncIterator[bytes]:
    packer = Packer(directory)
    while chunk := await in_thread(packer.next_chunk):
        yield chunk

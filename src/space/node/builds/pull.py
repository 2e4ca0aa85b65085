"""Images from a registry or an archive into the store of layers, by skopeo. No byte of a layer is looked at here.

What skopeo says on its standard error is reduced to one of our errors and shown to nobody: it may hold what a registry
chose to say.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space.errors import HostError, RequestError, SpaceError, Unavailable
from space.node.builds import children
from space.node.builds.children import Finished, Limits
from space.node.builds.manifests import MANIFEST_BYTES_MAX, ImageContent, choose_platform, content_of
from space.node.builds.references import ImageReference, check_trusted
from space.node.builds.refusals import innermost
from space.node.builds.refused_pulls import failure_of_host, failure_of_registry, too_large
from space.node.builds.room import check_room

MIB = 1024 * 1024
INSPECT_S = 120.0
FETCH_S = 3600.0
MEMORY_BYTES = 4 * 1024 * MIB
"""Address space: a Go program reserves much more than it takes."""
WATCH_S = 0.25
LAYOUT = "layout"
_NAME = "skopeo"
_GLOBAL = ("--insecure-policy", "--override-os", "linux", "--override-arch", "amd64")


@dataclass(frozen=True, slots=True)
class Access:
    """What a client gave for its registry. Lives in memory, and in a file while skopeo runs."""

    registry: str | None = None
    username: str | None = None
    password: str | None = None
    ca_pem: str | None = None

    def __repr__(self) -> str:
        return "Access(…)"


class Pull:
    """Brings images into directories of blobs. ``home`` is the build's own; ``bytes_max`` bounds an image."""

    def __init__(self, home: Path, bytes_max: int, trusted: tuple[str, ...] | None) -> None:
        self._home = home
        self._bytes_max = bytes_max
        self._trusted = trusted

    async def resolve(self, reference: ImageReference, access: Access) -> str:
        """Return the digest of the manifest for this kind of machine, asking the registry whatever is known here.

        So only whoever the registry lets in gets an image, though another project has brought it here already.
        """
        check_trusted(reference, self._trusted)
        finished = await self._ask(reference, access, "inspect", ["--raw", reference.source], INSPECT_S)
        raw = finished.output
        if len(raw) > MANIFEST_BYTES_MAX:
            raise RequestError("The image's manifest is too large.", code="image-not-supported")
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if reference.digest is not None and reference.digest != digest:
            raise RequestError("The registry sent another manifest than the digest names.", code="layer-damaged")
        return choose_platform(raw) or digest

    async def fetch(self, reference: ImageReference, digest: str, access: Access, blobs: Path) -> ImageContent:
        """Copy an image that was resolved. What ``blobs`` has already is not asked of the registry."""
        layout = self._home / LAYOUT
        words = [*_to(blobs), reference.at(digest), f"oci:{layout}"]
        async with self._bounded(blobs):
            await self._ask(reference, access, "copy", words, FETCH_S)
        return _content(layout, blobs)

    async def unpack(self, archive: Path, blobs: Path) -> ImageContent:
        """Copy the image in an archive, as `docker save` or an OCI tool has written it."""
        refusal: SpaceError | None = None
        for transport in ("oci-archive", "docker-archive"):
            layout = self._home / LAYOUT
            words = [_NAME, *_GLOBAL, "--tmpdir", str(self._home), "copy", *_to(blobs)]
            async with self._bounded(blobs):
                finished = await self._run([*words, f"{transport}:{archive}", f"oci:{layout}"], FETCH_S)
            if finished.status == 0:
                return _content(layout, blobs)
            shutil.rmtree(layout, ignore_errors=True)
            refusal = refusal or failure_of_host(finished)
        raise refusal or RequestError(
            "The upload is no image archive: one of one image, as docker save or an OCI tool writes it, is needed.",
            code="archive-damaged",
        )

    # --- private

    async def _ask(
        self, reference: ImageReference, access: Access, verb: str, words: list[str], timeout_s: float
    ) -> Finished:
        """Run skopeo against a registry. One on this very host may speak without TLS: that is tried second."""
        prefix = "" if verb == "inspect" else "src-"
        with self._secrets(reference, access) as options:
            argv = [_NAME, *_GLOBAL, "--tmpdir", str(self._home), verb, *(o.format(prefix=prefix) for o in options)]
            finished = await self._run([*argv, *words], timeout_s)
            if finished.status and "HTTP response to HTTPS client" in finished.complaint and reference.on_loopback:
                finished = await self._run([*argv, f"--{prefix}tls-verify=false", *words], timeout_s)
        if finished.status:
            raise failure_of_registry(finished, reference)
        return finished

    @contextlib.contextmanager
    def _secrets(self, reference: ImageReference, access: Access) -> Generator[list[str]]:
        """Write down what skopeo has to know of the client, for as long as the block lasts; yield its options."""
        secrets = self._home / "secrets"
        secrets.mkdir(mode=0o700)
        options = [f"--authfile={secrets / 'auth.json'}"]
        try:
            auths: dict[str, Any] = {}
            if access.username is not None and reference.host is not None and access.registry in {None, reference.host}:
                pair = f"{access.username}:{access.password or ''}".encode()
                auths[reference.host] = {"auth": base64.b64encode(pair).decode()}
            _write(secrets / "auth.json", json.dumps({"auths": auths}))
            if access.ca_pem is not None:
                (secrets / "certs").mkdir(mode=0o700)
                _write(secrets / "certs" / "ca.crt", access.ca_pem)
                options.append(f"--{{prefix}}cert-dir={secrets / 'certs'}")
            yield options
        finally:
            shutil.rmtree(secrets, ignore_errors=True)

    async def _run(self, argv: list[str], timeout_s: float) -> Finished:
        limits = Limits(file_bytes=self._bytes_max, memory_bytes=MEMORY_BYTES, cpu_s=int(timeout_s) + 1)
        try:
            finished = await children.run(
                argv, self._home, limits, timeout_s=timeout_s, output_bytes_max=MANIFEST_BYTES_MAX + 1
            )
        except TimeoutError as error:
            raise Unavailable("The registry did not send the image in time.", code="registry-unreachable") from error
        if finished.status == 127 or "failed to execute skopeo" in finished.complaint:
            raise HostError("skopeo is not installed on this host: run scripts/packages host.", code="no-skopeo")
        return finished

    @contextlib.asynccontextmanager
    async def _bounded(self, blobs: Path) -> AsyncGenerator[None]:
        """End the block as soon as what it brings is larger than an image may be, or than the host has room for."""
        before = await asyncio.to_thread(_size, blobs, self._home)
        done = asyncio.Event()

        async def watch() -> None:
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_S):
                        await done.wait()
                check_room(self._home)
                if await asyncio.to_thread(_size, blobs, self._home) - before > self._bytes_max:
                    raise too_large()

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(watch())
                try:
                    yield
                finally:
                    done.set()
        except BaseExceptionGroup as errors:
            raise innermost(errors) from None


def _to(blobs: Path) -> list[str]:
    return ["--quiet", "--dest-shared-blob-dir", str(blobs)]


def _content(layout: Path, blobs: Path) -> ImageContent:
    try:
        return content_of(layout, blobs)
    finally:
        shutil.rmtree(layout, ignore_errors=True)


def _size(*directories: Path) -> int:
    total = 0
    for top in directories:
        for place, _, names in os.walk(top):
            for name in names:
                with contextlib.suppress(OSError):
                    total += (Path(place) / name).lstat().st_size
    return total


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)

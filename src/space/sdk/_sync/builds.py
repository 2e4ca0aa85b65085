# Generated from ../_async/builds.py by scripts/sync-sdk; change that one.
"""Builds of templates: begin one, follow its log, wait for its end, cancel it."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Unpack

import httpx

from space.errors import Conflict, OutcomeUnknown, SpaceError, Unavailable
from space.sdk._sync.operations import pages
from space.sdk._sync.transport import Transport, lost
from space.sdk._sync.uploads import Progress, Uploads
from space.sdk.backends.threads import in_thread, sleep
from space.sdk.errors import from_wire
from space.sdk.requests import READ_TIMEOUT_S, Patience, Request, creating, present
from space.sdk.templates import Build, BuildOptions, BuildState, LogLine, build_body, context_of, source_of

POLL_S = 30.0
_STEP_FAILED = 502


class Builds:
    """``client.builds``. ``client.templates.build()`` begins one and waits for what it makes."""

    def __init__(self, transport: Transport, uploads: Uploads) -> None:
        self._transport = transport
        self._uploads = uploads

    def start(self, name: str, *, progress: Progress | None = None, **options: Unpack[BuildOptions]) -> Build:
        """Send what the build reads, begin it, and return it. ``name`` may be ``name:tag``; no tag means ``latest``.

        ``progress`` is told of what is sent: bytes, and of how many.
        """
        sent: dict[str, str] = {}
        try:
            self._send(options, sent, progress)
            body = build_body(name, options, sent)
            request = Request(method="POST", path="/v1/templates/builds", body=body, headers=creating())
            return Build.parse(self._transport.call(request))
        finally:
            # The build has them already, or there is none.
            for upload_id in sent.values():
                with suppress(SpaceError):
                    self._uploads.delete(upload_id)

    def get(self, build_id: str, *, wait_s: float | None = None) -> Build:
        """Return a build; with ``wait_s`` not before it has ended or so many seconds have passed."""
        params = {"wait_s": f"{wait_s:g}"} if wait_s else {}
        path = f"/v1/builds/{build_id}"
        request = Request(method="GET", path=path, params=params, read_s=READ_TIMEOUT_S + (wait_s or 0))
        return Build.parse(self._transport.call(request))

    def list(self, *, name: str | None = None, state: BuildState | None = None) -> Iterator[Build]:
        """Yield the project's builds that match all that is given, newest first."""
        for item in pages(self._transport, "/v1/builds", present(name=name, state=state)):
            yield Build.parse(item)

    def log(self, build: Build | str, *, start: int = 0, follow: bool = True) -> Iterator[LogLine]:
        """Yield the lines of a build's log, and with ``follow`` those to come, until it has ended.

        A lost connection is made again, and goes on where it was.
        """
        build_id = build.id if isinstance(build, Build) else build
        patience = Patience()
        while True:
            try:
                for line in self._lines(build_id, start, follow=follow):
                    if line["type"] == "end":
                        return
                    if line["type"] == "error":
                        raise from_wire(line["error"])
                    patience.worked()
                    start = line["n"] + 1
                    yield LogLine.parse(line)
                reason = "it broke off"
            except Unavailable as error:
                reason = error.message
            patience.failed(reason, "the log")
            sleep(patience.delay_s)

    def wait(self, build: Build | str, *, timeout_s: float | None = None) -> Build:
        """Wait until a build has succeeded, and return it.

        Raises what it failed with, and ``OutcomeUnknown`` when it still goes on after ``timeout_s`` seconds.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        current = build if isinstance(build, Build) else self.get(build)
        while not current.over:
            left_s = POLL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise OutcomeUnknown(f"Build {current.id} still goes on.", code="still-running", build_id=current.id)
            current = self.get(current.id, wait_s=max(0.1, min(POLL_S, left_s)))
        if current.state == "failed":
            raise failure(current)
        if current.state == "cancelled":
            raise Conflict(f"Build {current.id} was cancelled.", code="cancelled", build_id=current.id)
        return current

    def cancel(self, build: Build | str) -> Build:
        """Have a build end without a result. One that has ended stays as it is."""
        build_id = build.id if isinstance(build, Build) else build
        request = Request(method="POST", path=f"/v1/builds/{build_id}/cancel", harmless=True)
        return Build.parse(self._transport.call(request))

    def _send(self, options: BuildOptions, sent: dict[str, str], progress: Progress | None) -> None:
        """Send what the options name, and note the ids."""
        kind, directory = source_of(options), context_of(options)
        given: Any = options.get(kind)
        if kind == "dockerfile":
            dockerfile = options.get("file", "Dockerfile")
            sent[kind] = self._send_context(Path(given), dockerfile, progress)
        elif kind in {"archive", "rootfs"}:
            with in_thread(lambda: Path(given).open("rb")) as file:
                sent[kind] = self._uploads.send(file, progress)
        if directory is not None:
            sent["context"] = self._send_context(Path(directory), None, progress)

    def _send_context(self, directory: Path, dockerfile: str | None, progress: Progress | None) -> str:
        from space.sdk.build_contexts import pack

        file: IO[bytes] = in_thread(lambda: pack(directory, dockerfile))
        with file:
            return self._uploads.send(file, progress)

    def _lines(self, build_id: str, start: int, *, follow: bool) -> Iterator[dict[str, Any]]:
        params = {"from": str(start), "follow": "true" if follow else "false"}
        request = Request(method="GET", path=f"/v1/builds/{build_id}/log", params=params, read_s=None)
        response = self._transport.start(request)
        try:
            for line in response.iter_lines():
                if line:
                    yield json.loads(line)
        except httpx.TransportError as error:
            raise lost(request, error) from error
        finally:
            response.close()


def failure(build: Build) -> SpaceError:
    """Return the error that a failed build stands for."""
    described: dict[str, Any] = {"code": "failed", "message": f"Build {build.id} failed."}
    details: dict[str, Any] = {}
    if (error := build.failure) is not None:
        described = present(code=error.code, message=error.message, kind=error.kind)
        details = dict((build.raw.get("failure") or {}).get("details") or {})
    return from_wire({**described, "details": {**details, "build_id": build.id}}, _STEP_FAILED)

"""HTTP for files: passed on to the node, streamed both ways. Paths are the guest's to resolve, never looked at here."""

from fastapi import Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import control_of
from space.api.proxy import pass_on, pass_stream_on
from space.control.readiness import get_running


async def read(request: Request, sandbox_id: str) -> Response:
    """Read a file, or a range of it."""
    return await pass_on(request, await _path(request, sandbox_id, ""))


async def write(request: Request, sandbox_id: str) -> Response:
    """Write a file: the body as it is, of any size."""
    return await pass_stream_on(request, await _path(request, sandbox_id, ""))


async def remove(request: Request, sandbox_id: str) -> Response:
    """Remove a file or directory."""
    return await pass_on(request, await _path(request, sandbox_id, ""))


async def stat(request: Request, sandbox_id: str) -> Response:
    """What there is at a path."""
    return await pass_on(request, await _path(request, sandbox_id, "/stat"))


async def list_(request: Request, sandbox_id: str) -> Response:
    """What is in a directory."""
    return await pass_on(request, await _path(request, sandbox_id, "/list"))


async def mkdir(request: Request, sandbox_id: str) -> Response:
    """Make a directory and those above it."""
    return await pass_on(request, await _path(request, sandbox_id, "/mkdir"))


async def move(request: Request, sandbox_id: str) -> Response:
    """Move or rename."""
    return await pass_on(request, await _path(request, sandbox_id, "/move"))


async def archive_out(request: Request, sandbox_id: str) -> Response:
    """A directory as a tar stream."""
    return await pass_on(request, await _path(request, sandbox_id, "/archive"))


async def archive_in(request: Request, sandbox_id: str) -> Response:
    """Unpack a tar stream into a directory."""
    return await pass_stream_on(request, await _path(request, sandbox_id, "/archive"))


async def watch(request: Request, sandbox_id: str) -> Response:
    """Changes below a path, as server-sent events."""
    return await pass_on(request, await _path(request, sandbox_id, "/watch"))


async def _path(request: Request, sandbox_id: str, verb: str) -> str:
    sandbox = await get_running(control_of(request), caller(request).project_id, sandbox_id)
    return f"/v1/sandboxes/{sandbox.id}/files{verb}"

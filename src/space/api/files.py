"""HTTP for files: passed on to the node, streamed both ways. Paths are the guest's to resolve, never looked at here."""

from fastapi import Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import control_of
from space.api.proxy import pass_on, pass_stream_on
from space.control.readiness import get_running, rouser


async def read(request: Request, sandbox_id: str) -> Response:
    """Read a file, or a range of it."""
    return await _pass_on(request, sandbox_id, "")


async def write(request: Request, sandbox_id: str) -> Response:
    """Write a file: the body as it is, of any size."""
    return await _pass_stream_on(request, sandbox_id, "")


async def remove(request: Request, sandbox_id: str) -> Response:
    """Remove a file or directory."""
    return await _pass_on(request, sandbox_id, "")


async def stat(request: Request, sandbox_id: str) -> Response:
    """What there is at a path."""
    return await _pass_on(request, sandbox_id, "/stat")


async def list_(request: Request, sandbox_id: str) -> Response:
    """What is in a directory."""
    return await _pass_on(request, sandbox_id, "/list")


async def mkdir(request: Request, sandbox_id: str) -> Response:
    """Make a directory and those above it."""
    return await _pass_on(request, sandbox_id, "/mkdir")


async def move(request: Request, sandbox_id: str) -> Response:
    """Move or rename."""
    return await _pass_on(request, sandbox_id, "/move")


async def archive_out(request: Request, sandbox_id: str) -> Response:
    """A directory as a tar stream."""
    return await _pass_on(request, sandbox_id, "/archive")


async def archive_in(request: Request, sandbox_id: str) -> Response:
    """Unpack a tar stream into a directory."""
    return await _pass_stream_on(request, sandbox_id, "/archive")


async def watch(request: Request, sandbox_id: str) -> Response:
    """Changes below a path, as server-sent events."""
    return await _pass_on(request, sandbox_id, "/watch")


async def _pass_on(request: Request, sandbox_id: str, verb: str) -> Response:
    control = control_of(request)
    sandbox = await get_running(control, caller(request).project_id, sandbox_id)
    return await pass_on(request, f"/v1/sandboxes/{sandbox.id}/files{verb}", rouser(control, sandbox))


async def _pass_stream_on(request: Request, sandbox_id: str, verb: str) -> Response:
    sandbox = await get_running(control_of(request), caller(request).project_id, sandbox_id)
    return await pass_stream_on(request, f"/v1/sandboxes/{sandbox.id}/files{verb}")

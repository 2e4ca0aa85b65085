"""HTTP for ports of a sandbox: which are exposed, and addresses and tokens to reach them by."""

from fastapi import Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import control_of, reply
from space.api.port_schemas import PortBody, PortOpened, PortOut, PortPage, PortPath
from space.control import ports


async def expose(request: Request, sandbox_id: str, port: PortPath, body: PortBody | None = None) -> Response:
    """Expose a port and return its address, with a token for it. Asked again, what is named changes."""
    asked = body or PortBody()
    opened = await ports.expose(
        control_of(request),
        caller(request).project_id,
        sandbox_id,
        port,
        {"public": asked.public, "host": asked.host},
        asked.expires_in_s,
    )
    shown = PortOut.model_validate(opened.port).model_dump()
    return reply(
        PortOpened(
            **shown, token=opened.token.text, expires_at=opened.token.expires_at, browser_url=opened.browser_url
        ),
        201,
    )


async def page(request: Request, sandbox_id: str) -> Response:
    """List a sandbox's exposed ports, by number; there are never more than one page of them."""
    found = await ports.exposed(control_of(request), caller(request).project_id, sandbox_id)
    return reply(PortPage(items=[PortOut.model_validate(one) for one in found], next_cursor=None))


async def hide(request: Request, sandbox_id: str, port: PortPath) -> Response:
    """Expose a port no longer. All tokens for it are void when this is answered."""
    await ports.hide(control_of(request), caller(request).project_id, sandbox_id, port)
    return Response(status_code=204)

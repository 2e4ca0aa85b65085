"""Whether this process lives and can work, its figures, and what the API looks like."""

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from sqlalchemy import Connection, text

from space.api.answers import control_of
from space.api.figures import Figures
from space.errors import SpaceError
from space.store import counts as counts_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def alive(request: Request) -> Response:  # noqa: ARG001
    """Whether the process answers."""
    return PlainTextResponse("ok\n")


async def ready(request: Request) -> Response:
    """Whether the store, the node and the gateway answer: 200, or 503 with what does not."""
    control = control_of(request)

    def ask(connection: Connection) -> None:
        connection.execute(text("select 1"))

    parts: dict[str, str] = {}
    for name, asking in (
        ("store", control.store.read(ask)),
        ("node", control.node.templates()),
        ("gateway", control.gateway.metrics()),
    ):
        try:
            await asking
        except SpaceError as error:
            parts[name] = str(error.code)
        else:
            parts[name] = "ok"
    good = all(answer == "ok" for answer in parts.values())
    return JSONResponse({"ready": good, "parts": parts}, 200 if good else 503)


async def metrics(request: Request) -> Response:
    """Figures of the whole installation for Prometheus. They count what all projects do: it takes an admin's key."""
    figures: Figures = request.app.state.figures
    control = control_of(request)
    counts = await control.store.read(counts_of.everything)
    try:
        of_node = await control.node.metrics()
    except SpaceError:
        of_node = b""
    try:
        of_gateway = await control.gateway.metrics()
    except SpaceError:
        of_gateway = b""
    now = {
        "space_seats_free": control.leases.free,
        "space_event_streams": request.app.state.streams.total(),
        "space_strays_found": control.found,
        "space_node_up": int(bool(of_node)),
        "space_gateway_up": int(bool(of_gateway)),
    }
    figures.tell({**counts, **now})
    return Response(generate_latest(figures.registry) + of_node + of_gateway, media_type=CONTENT_TYPE)


async def openapi(request: Request) -> Response:
    """This API as an OpenAPI 3.1 document."""
    return JSONResponse(request.app.openapi())


async def docs(request: Request) -> Response:
    """This API for people."""
    return HTMLResponse(request.app.state.docs_page())

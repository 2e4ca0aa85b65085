"""Whether this process lives and can work, its figures, and what the API looks like."""

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy import Connection, text

from space.api.answers import control_of
from space.api.figures import Figures
from space.errors import SpaceError
from space.store import sandboxes


async def alive(request: Request) -> Response:  # noqa: ARG001
    """Whether the process answers."""
    return PlainTextResponse("ok\n")


async def ready(request: Request) -> Response:
    """Whether the store and the node answer: 200, or 503 with what does not."""
    control = control_of(request)

    def ask(connection: Connection) -> None:
        connection.execute(text("select 1"))

    parts: dict[str, str] = {}
    for name, asking in (("store", control.store.read(ask)), ("node", control.node.templates())):
        try:
            await asking
        except SpaceError as error:
            parts[name] = str(error.code)
        else:
            parts[name] = "ok"
    good = all(answer == "ok" for answer in parts.values())
    return JSONResponse({"ready": good, "parts": parts}, 200 if good else 503)


async def metrics(request: Request) -> Response:
    """Figures for Prometheus. They count what all projects do, so it takes an admin's key."""
    figures: Figures = request.app.state.figures
    figures.set_sandboxes(await control_of(request).store.read(sandboxes.count_by_state))
    return Response(generate_latest(figures.registry), media_type=CONTENT_TYPE_LATEST)


async def openapi(request: Request) -> Response:
    """This API as an OpenAPI 3.1 document."""
    return JSONResponse(request.app.openapi())


async def docs(request: Request) -> Response:
    """This API for people."""
    return HTMLResponse(request.app.state.docs_page())

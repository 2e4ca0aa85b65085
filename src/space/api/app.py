"""The HTTP application: table of routes, shape of errors, and what surrounds every request."""

import functools
from collections import Counter
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from space.api import docs, errors, routes
from space.api.figures import Figures
from space.api.observe import Observe
from space.control.control import Control

MIB = 1024 * 1024
ABOUT = (
    "Isolated Linux machines for AI agents. Ids are opaque; times are RFC 3339 UTC; units are in the names. "
    "Errors have one shape, with a stable `error.code`."
)


def build_app(control: Control, figures: Figures | None = None) -> FastAPI:
    """Return the app over ``control``; it starts nothing by itself (see ``space.api.server``)."""
    figures = figures or Figures()
    app = _bare()
    app.state.control = control
    app.state.figures = figures
    app.state.streams = Counter[str]()
    errors.install(app)
    routes.install(app, control.settings.body_mib_max * MIB)
    app.openapi = functools.cache(lambda: _document(app))
    app.state.docs_page = functools.cache(lambda: docs.render(app.openapi()))
    app.add_middleware(Observe, figures=figures)
    return app


def document() -> dict[str, Any]:
    """Return the OpenAPI document, without a control plane behind it."""
    app = _bare()
    routes.install(app, MIB)
    return _document(app)


def _bare() -> FastAPI:
    return FastAPI(
        title="SPACE",
        version="1",
        description=ABOUT,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = made.setdefault("components", {})
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    components["schemas"] |= routes.schemas()
    return made

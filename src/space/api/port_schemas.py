"""What requests and answers about ports look like."""

from datetime import datetime
from typing import Annotated

from fastapi import Path
from pydantic import Field, StringConstraints

from space.api.bodies import Body
from space.api.schemas import Out
from space.control.ports import TOKEN_S, TOKEN_S_MAX

PortPath = Annotated[int, Path(ge=1, le=65535)]


class PortBody(Body):
    """How a port is exposed. What is left out stays as it is; at first a port is not public."""

    public: bool | None = None
    """Whether everybody may ask it, without a token."""
    host: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.:_${}-]{1,255}$")] | None = None
    """What its server sees as `Host`, `${PORT}` standing for the port; otherwise what the client sent."""
    expires_in_s: Annotated[int, Field(ge=1, le=TOKEN_S_MAX)] = TOKEN_S
    """How long the token is good; a day otherwise."""


class PortOut(Out):
    """An exposed port. `url` is its own host; `api_url` leads there by a path of the data plane, for programs."""

    port: int
    public: bool
    host: str | None
    url: str
    api_url: str


class PortOpened(PortOut):
    """Also a token for it, and with `browser_url` an address that browsers get in by."""

    token: str
    expires_at: datetime
    browser_url: str


class PortPage(Out):
    items: list[PortOut]
    next_cursor: str | None

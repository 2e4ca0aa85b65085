"""Who may make a request: decided before anything of its body is read, from the route table alone."""

import asyncio
from enum import StrEnum

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from space import tracing
from space.control.control import Control
from space.errors import Forbidden, InvalidRequest, RequestError, Unauthenticated
from space.listening import Bodies, Held
from space.model.ids import is_id
from space.model.project import Key, Role

BODY_TIMEOUT_S = 60.0


class Access(StrEnum):
    """Who may call a path."""

    PUBLIC = "public"
    MEMBER = "member"
    """Any key of any project; what it reaches is its own project's."""
    ADMIN = "admin"
    """An admin's key."""


class Guard:
    """Stands before one route: authenticates, and bounds the body."""

    def __init__(self, app: ASGIApp, access: Access, body_bytes_max: int | None, bodies: Bodies) -> None:
        """``body_bytes_max`` None means that the handler streams the body and bounds it by other means."""
        self._app = app
        self._access = access
        self._body_bytes_max = body_bytes_max
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._access is not Access.PUBLIC:
            control: Control = scope["app"].state.control
            key = await control.keyring.authenticate(bearer(scope))
            if self._access is Access.ADMIN and key.role is not Role.ADMIN:
                raise Forbidden("This needs an admin's key.")
            scope["state"]["caller"] = key
            sandbox_id = scope["path_params"].get("sandbox_id", "")
            # Only what can be an id: a log is no place for what callers make up.
            if is_id("sbx", sandbox_id):
                tracing.note(sandbox=sandbox_id)
        if self._body_bytes_max is None:
            await self._app(scope, receive, send)
            return
        with self._bodies.one() as held:
            await self._app(scope, self._bounded(scope, receive, self._body_bytes_max, held), send)

    @staticmethod
    def _bounded(scope: Scope, receive: Receive, most: int, held: Held) -> Receive:
        """Refuse a body that says it is too large, and stop reading one that turns out to be, or does not come."""
        length = header(scope, b"content-length")
        if length is not None and (not length.isdecimal() or int(length) > most):
            raise too_large(most)
        seen, whole = 0, False
        ends = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

        async def bounded() -> Message:
            nonlocal seen, whole
            try:
                # Behind the body there is nothing to wait for but the client's going.
                async with asyncio.timeout_at(None if whole else ends):
                    message = await receive()
            except TimeoutError as error:
                raise RequestError("The body did not arrive in time.", code="body-timeout", field="body") from error
            whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            seen += size
            if seen > most:
                raise too_large(most)
            held.grow(size)
            return message

        # The body is JSON, whatever `curl -d` says it is.
        names = (b"content-type",)
        kept = [(name, value) for name, value in scope["headers"] if name not in names]
        scope["headers"] = [*kept, (b"content-type", b"application/json")]
        return bounded


def caller(request: Request) -> Key:
    """Return whose request it is; the guard has put it there."""
    return request.scope["state"]["caller"]


def bearer(scope: Scope) -> str:
    """Return the key of a request's Authorization header, or raise ``Unauthenticated``."""
    scheme, _, secret = (header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() != "bearer" or not secret:
        raise Unauthenticated("Send an API key: `Authorization: Bearer sk_…`.")
    return secret.strip()


def header(scope: Scope, name: bytes) -> str | None:
    """Return a request header's value, the first one if it came several times."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def too_large(most: int) -> InvalidRequest:
    return InvalidRequest(f"The body may have at most {most} bytes.", code="body-too-large", limit_bytes=most)

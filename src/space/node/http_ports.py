"""Routes of ports: requests for servers in a sandbox, raw connections to them, and what the api says of either."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

from starlette.types import Message, Send

from space import error_wire
from space.errors import InvalidRequest, NotFound, OutcomeUnknown, SpaceError, Unavailable
from space.node.call import Call
from space.node.ndjson import error_message
from space.node.parse import invalid
from space.node.ports import admission
from space.node.ports.admission import Admission
from space.node.ports.ports import PORT_MAX, Exposure
from space.node.ports.proxy import Target, serve
from space.node.ports.tunnel import Tunnel

SUBPROTOCOL = "space.tcp.v1"
CHUNK_BYTES = 128 * 1024
STALL_S = 3600.0
FAREWELL_S = 30.0
CLOSE_NORMAL, CLOSE_ERROR = 1000, 1011
_OPEN, _END = json.dumps({"type": "open"}), json.dumps({"type": "eof"})
_HOST = re.compile(r"(\$\{PORT\}|[A-Za-z0-9.:_-]){1,255}")


# --- requests


async def pass_on(call: Call) -> None:
    """Pass a request on to the server on a port, and its answer back; ``authorise_port`` has let it in."""
    sandbox, port = call.params["sandbox"], parse_port(call.params["port"])
    admitted: Admission = call.scope["space.admission"]
    on_own_host = own_host(call)
    if admitted.by_query is not None and call.scope["type"] == "http" and _may_redirect(call):
        await _keep_in_cookie(call, admitted)
        return
    exposure = call.node.ports.find(sandbox, port)
    target = Target(
        dial=lambda: call.node.ports.dial(sandbox, port),
        port=port,
        path=_path(call, admitted.query, on_own_host=on_own_host),
        host=(exposure.host if exposure is not None else None) or (None if on_own_host else "localhost:${PORT}"),
        cookies=on_own_host,
        drop=admitted.drop,
        drop_cookies=frozenset({admission.COOKIE}),
    )
    status = await serve(call.scope, call.receive, _noting(call), target)
    call.status = status


def authorise_port(call: Call) -> None:
    """Let a request to a port in, or raise why not. What it was let in by is left in ``scope["space.admission"]``."""
    sandbox, port = call.params["sandbox"], parse_port(call.params["port"])
    ports = call.node.ports
    exposure = ports.find(sandbox, port)
    call.scope["space.admission"] = admission.admit(
        call.scope,
        # Without a host of its own, what everybody may ask would be asked in the name of a host that others use.
        public=call.local or (own_host(call) and exposure is not None and exposure.public),
        check=call.node.tokens.verify,
        opens=lambda grant: ports.admits(grant, sandbox, port, exposure),
        own_host=own_host(call),
    )


def own_host(call: Call) -> bool:
    """Whether the request came to the port's own host, and not by a path of the data plane."""
    return call.scope.get("space.preview") is True


def parse_port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= PORT_MAX):
        raise NotFound(f"There is no such port: it is a number from 1 to {PORT_MAX}.", code="no-such-port")
    return int(text)


def _path(call: Call, query: bytes, *, on_own_host: bool) -> bytes:
    path: bytes = call.scope["raw_path"]
    if not on_own_host:
        prefix = f"/v1/sandboxes/{call.params['sandbox']}/ports/{call.params['port']}".encode()
        if not path.startswith(prefix + b"/"):
            raise InvalidRequest("The path must not be escaped up to the port.", field="path")
        path = path[len(prefix) :]
    return path + (b"?" + query if query else b"")


def _may_redirect(call: Call) -> bool:
    return call.scope["method"] == "GET" and admission.is_navigation(call.scope["headers"])


async def _keep_in_cookie(call: Call, admitted: Admission) -> None:
    """Send a browser on to the same address without the token, which it has in a cookie from now on."""
    token, expires_at = admitted.by_query or ("", 0)
    secure = call.node.settings.preview_scheme == "https"
    fresh = admission.cookie(token, int(expires_at - time.time()), secure=secure)
    await call.begin(
        302,
        {
            "location": admission.location(call.scope, admitted.query).decode("latin-1"),
            "set-cookie": fresh.decode(),
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
            "content-length": "0",
        },
    )
    await call.send({"type": "http.response.body", "body": b""})


def _noting(call: Call) -> Send:
    """Send, and let the call know that an answer has begun."""

    async def send(message: Message) -> None:
        if message["type"].endswith("response.start"):
            call.status = message["status"]
        await call.send(message)

    return send


# --- raw connections


async def tunnel(call: Call) -> None:
    """Relay one connection: binary frames are bytes, texts say the rest.

    ``{"type": "open"}`` from here: it is there; ``{"type": "eof"}`` from either side: that is all; ``error`` from here,
    as on an attached command: it could not be made, or broke off.
    """
    if SUBPROTOCOL not in call.scope["subprotocols"]:
        raise InvalidRequest(f"The subprotocol {SUBPROTOCOL} must be offered.", code="subprotocol-needed")
    port = parse_port(call.params["port"])
    await call.receive()
    await call.send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL, "headers": []})
    call.status = 101
    try:
        connected = await call.node.ports.dial(call.params["sandbox"], port)
        try:
            await call.send({"type": "websocket.send", "text": _OPEN})
            problem: BaseException | None = await _relay(call, connected)
        finally:
            await connected.close()
    except SpaceError as error:
        problem = error
    if isinstance(problem, _ClosedByClient):
        return
    if problem is not None:
        told = problem if isinstance(problem, SpaceError) else OutcomeUnknown("The connection broke off.")
        await call.send({"type": "websocket.send", "text": json.dumps(error_message(told))})
    await call.send({"type": "websocket.close", "code": CLOSE_NORMAL if problem is None else CLOSE_ERROR})


class _ClosedByClient(Exception):
    """There is nobody to say anything to."""


async def _relay(call: Call, connected: Tunnel) -> BaseException | None:
    """Pass bytes on both ways until both sides have sent all; return what ended it before that."""
    client_ended = asyncio.Event()
    inward = asyncio.ensure_future(_inward(call, connected, client_ended))
    outward = asyncio.ensure_future(_outward(call, connected))
    ended = asyncio.ensure_future(client_ended.wait())
    tasks = (inward, outward, ended)
    try:
        await asyncio.wait((inward, outward), return_when=asyncio.FIRST_COMPLETED)
        if not inward.done() and outward.exception() is None:
            await asyncio.wait((inward, ended), timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
        return next((problem for task in tasks if task.done() and (problem := task.exception())), None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _inward(call: Call, connected: Tunnel, ended: asyncio.Event) -> None:
    """Send what the client sends, and say when that is all. Raises ``_ClosedByClient`` in the end."""
    while True:
        message = await call.receive()
        if message["type"] == "websocket.disconnect":
            raise _ClosedByClient
        if data := message.get("bytes"):
            async with asyncio.timeout(STALL_S):
                await connected.write(data)
        elif message.get("text") == _END:
            await connected.end()
            ended.set()
        elif message.get("text") is not None:
            raise InvalidRequest('The only text is `{"type": "eof"}`.', field="frame")


async def _outward(call: Call, connected: Tunnel) -> None:
    while data := await connected.read():
        for at in range(0, len(data), CHUNK_BYTES):
            await call.send({"type": "websocket.send", "bytes": data[at : at + CHUNK_BYTES]})
    await call.send({"type": "websocket.send", "text": _END})


# --- for the api


async def list_exposed(call: Call) -> None:
    await call.answer({"ports": [_shown(one) for one in call.node.ports.exposed(call.params["sandbox"])]})


async def expose(call: Call) -> None:
    """Expose a port; what the body does not say stays as it is."""
    body = await call.json()
    public, host = body.get("public"), body.get("host")
    if public is not None and type(public) is not bool:
        raise invalid("public", "must be true or false")
    if host is not None and not (isinstance(host, str) and _HOST.fullmatch(host)):
        raise invalid("host", "must be a host name, perhaps with a port")
    port = parse_port(call.params["port"])
    await call.answer(_shown(call.node.ports.expose(call.params["sandbox"], port, public=public, host=host)))


async def hide(call: Call) -> None:
    call.node.ports.hide(call.params["sandbox"], parse_port(call.params["port"]))
    await call.answer({})


async def answer_wanted(call: Call) -> None:
    """Take from the api whether a sandbox that requests wait for runs now, or why it does not."""
    error: Any = (await call.json()).get("error")
    call.node.ports.wakings.answer(
        call.params["sandbox"], None if error is None else error_wire.parse(error, Unavailable)
    )
    await call.answer({})


def _shown(one: Exposure) -> dict[str, Any]:
    return {"port": one.port, "public": one.public, "host": one.host, "key": one.key}

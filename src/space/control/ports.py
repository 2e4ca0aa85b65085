"""Ports of sandboxes: which are exposed, addresses and tokens for them, and connections for who serves them here."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from space import error_wire
from space.control import sandboxes
from space.control.control import Control
from space.control.nodes import Node
from space.control.readiness import wake_up
from space.control.tokens import Token
from space.errors import SandboxError, SpaceError, Unavailable
from space.model.sandbox import Sandbox
from space.store import sandboxes as rows

CALL_S = 10
DIAL_S = 120.0
"""Until a connection is there. The node answers before: it waits 90 s for a sandbox to wake, and 10 s for its guest."""
TUNNEL = "space.tcp.v1"
CHUNK_BYTES = 128 * 1024
TOKEN_S = 24 * 3600
TOKEN_S_MAX = 30 * 24 * 3600
_END = json.dumps({"type": "eof"})


@dataclass(frozen=True, slots=True)
class Port:
    """One exposed port: ``url`` is its own host, ``api_url`` the same by a path of the data plane, for programs."""

    port: int
    public: bool
    host: str | None
    url: str
    api_url: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A port with a token that opens it; ``browser_url`` is an address that browsers get in by."""

    port: Port
    token: Token
    browser_url: str


async def expose(
    control: Control, project_id: str, sandbox_id: str, port: int, wanted: Mapping[str, Any], expires_in_s: int
) -> Opened:
    """Expose a port, to everybody with ``public`` in ``wanted``, else to holders of the token that is returned.

    Asked again, it changes what ``wanted`` says, and tokens from before stay good.
    """
    sandbox = await sandboxes.get(control, project_id, sandbox_id)
    body = {name: value for name, value in wanted.items() if value is not None}
    shown = await control.node.call("PUT", f"/machines/{sandbox.id}/ports/{port}", CALL_S, body)
    found = _port(control, sandbox, shown)
    token = control.signer.for_port(sandbox.id, port, str(shown.get("key")), control.now(), expires_in_s)
    browser_url = found.url if found.public else f"{found.url}?space_token={token.text}"
    return Opened(found, token, browser_url)


async def exposed(control: Control, project_id: str, sandbox_id: str) -> list[Port]:
    """Return the exposed ports of a sandbox, by number."""
    sandbox = await sandboxes.get(control, project_id, sandbox_id)
    answer = await control.node.call("GET", f"/machines/{sandbox.id}/ports", CALL_S)
    return [_port(control, sandbox, shown) for shown in answer.get("ports", [])]


async def hide(control: Control, project_id: str, sandbox_id: str, port: int) -> None:
    """Expose a port no longer: all tokens for it are void once this is answered."""
    sandbox = await sandboxes.get(control, project_id, sandbox_id)
    await control.node.call("DELETE", f"/machines/{sandbox.id}/ports/{port}", CALL_S)


# --- for requests that wait at the node for a sandbox to wake


class Wanted:
    """Sandboxes that requests wait for, each being woken once, and the node told how that went."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def take(self, sandbox_id: str) -> None:
        """Wake a sandbox if it is to be woken on requests."""
        if sandbox_id not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._wake(sandbox_id))
            self._tasks[sandbox_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(sandbox_id, None))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _wake(self, sandbox_id: str) -> None:
        error: SpaceError | None = None
        try:
            found = await self._control.store.read(lambda connection: rows.get(connection, sandbox_id))
            if found is None:
                raise sandboxes.not_found()
            await wake_up(self._control, found)
        except SpaceError as problem:
            error = problem
        body = {"error": None if error is None else error_wire.render(error)}
        with contextlib.suppress(SpaceError):  # A node that cannot be told asks again.
            await self._control.node.call("PUT", f"/machines/{sandbox_id}/wanted", CALL_S, body)


# --- connections


async def dial(node: Node, sandbox_id: str, port: int) -> "NodeTunnel":
    """Connect to a port of a sandbox through its node, as ``node.ports.tunnel.Dial`` says; it is woken by the node.

    Who may, the caller has decided. Raises ``Unavailable`` when the node does not answer within ``DIAL_S``.
    """
    held = contextlib.AsyncExitStack()
    path = f"/v1/sandboxes/{sandbox_id}/tunnels/{port}"
    try:
        async with asyncio.timeout(DIAL_S):
            socket = await held.enter_async_context(node.socket(path, TUNNEL))
            tunnel = NodeTunnel(held, socket)
            await tunnel.opened()
    except BaseException as error:
        await held.aclose()
        if isinstance(error, TimeoutError):
            raise node.unreachable() from error
        raise
    return tunnel


class NodeTunnel:
    """A connection into a sandbox, through a WebSocket of its node; see ``node.ports.tunnel.Tunnel``."""

    def __init__(self, held: contextlib.AsyncExitStack, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._held = held
        self._socket = socket
        self._ended = False

    async def opened(self) -> None:
        """Return once the connection is there; raise why it could not be made."""
        while (message := await self._message()) is not None:
            if not isinstance(message, bytes) and message.get("type") == "open":
                return
        raise SandboxError("The node closed the connection.", code="connection-reset")

    async def read(self) -> bytes:
        while not self._ended:
            message = await self._message()
            if isinstance(message, bytes):
                if message:
                    return message
            elif message is None:
                raise SandboxError("The connection broke off.", code="connection-reset")
            elif message.get("type") == "eof":
                self._ended = True
        return b""

    async def write(self, data: bytes) -> None:
        try:
            for at in range(0, len(data), CHUNK_BYTES):
                await self._socket.send_bytes(data[at : at + CHUNK_BYTES])
        except (ConnectionError, aiohttp.ClientError) as error:
            raise SandboxError("The connection broke off.", code="connection-reset") from error

    async def end(self) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            await self._socket.send_str(_END)

    async def close(self) -> None:
        await self._held.aclose()

    async def _message(self) -> bytes | dict[str, Any] | None:
        """Return the next bytes, or what a text says; None at the end. Raises an error that the node tells."""
        message = await self._socket.receive()
        if message.type == aiohttp.WSMsgType.BINARY:
            return message.data
        if message.type != aiohttp.WSMsgType.TEXT:
            return None
        told: Any = json.loads(message.data)
        if told.get("type") == "error":
            raise error_wire.parse(told.get("error"), Unavailable)
        return told


def _port(control: Control, sandbox: Sandbox, shown: Mapping[str, Any]) -> Port:
    number = int(shown["port"])
    settings = control.settings
    return Port(
        port=number,
        public=shown.get("public") is True,
        host=shown.get("host"),
        url=settings.preview_url(sandbox.id, number),
        api_url=f"{settings.data_plane_url.rstrip('/')}/v1/sandboxes/{sandbox.id}/ports/{number}/",
    )

"""One request to a server in a sandbox: HTTP/1.1 streamed both ways, or an upgrade after which bytes are relayed.

This is the one function through which requests get into sandboxes, for preview hosts, for paths of the data plane, and
for other surfaces that speak of ports. How to use it from any ASGI application, in any process::

    async def app(scope, receive, send):
        target = Target(dial=..., port=8000)
        try:
            await serve(scope, receive, send, target)
        except SpaceError as error:
            ...  # nothing was answered yet: say it in your own words
        except BrokenOff:
            raise  # the answer had begun and cannot be completed: let the server close the connection

Who may ask, and whether the sandbox is to be woken first, is the caller's: ``dial`` returns a ``Tunnel`` (tunnel.py)
and may do what is needed for one. In the node that is ``Ports.dial`` (ports.py), in the api ``control.ports.dial``.
An upgrade needs a server that gives away its connection (``upgrades.upgradable``): its scope is a ``websocket``.

Every request has a connection of its own, so that no answer can ever be another request's, and none is stale.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from space.node.ports.exchange import exchange
from space.node.ports.target import Target
from space.node.ports.tls import secured
from space.node.ports.upgrades import pass_upgrade

__all__ = ["Target", "serve"]


async def serve(scope: Scope, receive: Receive, send: Send, target: Target) -> int:
    """Answer one request with what the server in the sandbox answers, and return the status.

    Raises ``SpaceError`` as long as nothing was answered: what ``dial`` raises; ``GuestError`` (``bad-answer``) for
    what is no HTTP; ``OutcomeUnknown`` (``port-timeout``) when no answer comes; ``RequestError`` for a request that
    can be read in two ways. Then ``BrokenOff``, or ``ClientGone`` when the client is.
    """
    tunnel = await target.dial()
    try:
        if target.tls:
            tunnel = await secured(tunnel)
        if scope["type"] == "websocket":
            return await pass_upgrade(scope, send, target, tunnel)
        return await exchange(scope, receive, send, target, tunnel)
    finally:
        await tunnel.close()

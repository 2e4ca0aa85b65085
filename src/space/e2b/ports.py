"""Ports of a sandbox: HTTP and WebSocket into its servers, by the proxy of the node, over connections of the node.

Who may ask is E2B's to say: everybody, or with ``allowPublicTraffic`` false whoever has the sandbox's traffic token.
"""

from typing import Any

from starlette.types import Message, Send

from space.control import interpreter
from space.control.ports import NodeTunnel, dial
from space.e2b import errors
from space.e2b.call import Call, ClientGone, CutOff
from space.e2b.routing import target_of
from space.errors import Forbidden, GuestError, SpaceError
from space.model.sandbox import Sandbox
from space.node import endings
from space.node.ports.proxy import Target, serve

TRAFFIC_TOKEN = "e2b-traffic-access-token"  # noqa: S105 - a header's name
NOT_FOR_SERVERS = frozenset({b"e2b-sandbox-id", b"e2b-sandbox-port", TRAFFIC_TOKEN.encode()})
NOT_FOR_CONTEXTS = frozenset({"/contexts", "/health"})
"""Paths of the code interpreter that ask for no context that should be there."""
ENVD_TOKEN = frozenset({b"x-access-token"})


async def pass_on(call: Call, sandbox: Sandbox, port: int) -> None:
    """Pass a request on to a server in the sandbox, and its answer back."""
    config = network_of(sandbox)
    if config.get("allowPublicTraffic") is False:
        _check_token(call, sandbox)
    by_name = _by_name(call)
    target = Target(
        dial=lambda: _dial(call, sandbox, port),
        port=port,
        host=config.get("maskRequestHost") or (None if by_name else "localhost:${PORT}"),
        tls=port in (config.get("httpsPorts") or ()),
        cookies=by_name,
        # The code interpreter's server is ours and may see whose request it is.
        drop=NOT_FOR_SERVERS | (frozenset() if port == interpreter.PORT else ENVD_TOKEN),
    )
    try:
        await serve(call.scope, call.receive, _noting(call), target)
    except endings.BrokenOff as error:
        raise CutOff from error
    except endings.ClientGone as error:
        raise ClientGone from error
    except SpaceError as error:
        raise _told(error, sandbox, port) from error


async def _dial(call: Call, sandbox: Sandbox, port: int) -> NodeTunnel:
    if port != interpreter.PORT:
        return await dial(call.control.node, sandbox.id, port)
    for_contexts = call.path not in NOT_FOR_CONTEXTS
    return await interpreter.dial_interpreter(call.control.node, sandbox.id, for_contexts=for_contexts)


def network_of(sandbox: Sandbox) -> dict[str, Any]:
    """Return what was said of a sandbox's network when it was made."""
    return (sandbox.details.get("extras") or {}).get("network") or {}


def is_for_port(headers: dict[str, str], path: str) -> bool:
    """Whether an upgrade is for a server in a sandbox: nothing else here has any."""
    return target_of(headers, path, {}) is not None


def _check_token(call: Call, sandbox: Sandbox) -> None:
    given = call.headers.get(TRAFFIC_TOKEN)
    if given is None or not call.parts.tokens.is_traffic(sandbox.id, given):
        raise Forbidden("The sandbox is not public: a valid e2b-traffic-access-token is needed")


def _by_name(call: Call) -> bool:
    """Whether the port has a host of its own, and is not one of many that are told apart by headers."""
    return target_of({"host": call.headers.get("host", "")}, call.path, {}) is not None


def _told(error: SpaceError, sandbox: Sandbox, port: int) -> SpaceError:
    if error.code in {"port-closed", "no-interpreter"}:
        return errors.port_closed(sandbox.id, port)
    if error.code in {"wrong-state", "sandbox-not-found", "waking-failed"}:
        return errors.gone(sandbox.id)
    if isinstance(error, GuestError):
        return GuestError(error.message, code="bad-answer", sandboxId=sandbox.id, port=port)
    return error


def _noting(call: Call) -> Send:
    """Send as it is, and let the call know that an answer has begun."""

    async def send(message: Message) -> None:
        if message["type"].endswith("response.start"):
            call.status = message["status"]
        await call.send_raw(message)

    return send

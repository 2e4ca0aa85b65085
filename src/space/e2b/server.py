"""Serves E2B's clients on a port of its own, in the process of the api."""

import asyncio
import os
import socket
import struct

import structlog
from starlette.types import Scope

from space.control.control import Control
from space.e2b.app import App
from space.e2b.call import RESET, Parts
from space.e2b.keys import load_tokens
from space.e2b.ports import is_for_port
from space.e2b.watchers import Watchers
from space.listening import Bodies, BoundedProtocol, Server, check_address, configured
from space.node.ports.upgrades import upgradable

log = structlog.get_logger(__name__)

CONNECTIONS_MAX = 2000
KEEP_ALIVE_S = 640
"""The clients keep idle connections for 300 s and do not ask again when one has just been closed."""
SHUTDOWN_S = 2
_LINGER = struct.pack("ii", 1, 0)


class _Protocol(BoundedProtocol):
    """HTTP/1.1 whose requests can have their connection reset."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[RESET] = self._reset  # type: ignore[literal-required]

    def _reset(self) -> None:
        """Close with RST, not FIN: a client tells that its sandbox has ended by that."""
        with socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno())) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
        self.transport.abort()


def _is_for_port(scope: Scope) -> bool:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return is_for_port(headers, scope["path"])


async def serve(control: Control) -> None:
    """Serve until cancelled. Raises ``HostError`` when it cannot be served as the settings say."""
    settings = control.settings
    if settings.e2b_port == 0:
        return
    tls = settings.e2b_tls_certificate is not None
    check_address("e2b", settings.e2b_host, allow_plaintext=settings.allow_plaintext or tls)
    tokens = load_tokens(settings.api_dir / "e2b.key")
    async with asyncio.TaskGroup() as group:
        watchers = Watchers(control, group)
        server = Server(
            configured(
                App(Parts(control, tokens, watchers, Bodies())),
                host=settings.e2b_host,
                port=settings.e2b_port,
                http=upgradable(_is_for_port, _Protocol),
                ws="websockets-sansio",
                limit_concurrency=CONNECTIONS_MAX,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_S,
                ssl_certfile=settings.e2b_tls_certificate,
                ssl_keyfile=settings.e2b_tls_key,
            )
        )
        group.create_task(watchers.sweep())
        log.info("serving-e2b", host=settings.e2b_host, port=settings.e2b_port, tls=tls)
        await server.serve()

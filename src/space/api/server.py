"""The api process: store, node client, runner, reaper and HTTP server, in one event loop."""

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from space.api.app import build_app
from space.api.figures import Figures
from space.control import projects
from space.control.builder import Builder
from space.control.control import Control
from space.control.deliveries import Deliverer
from space.control.nodes import Node
from space.control.reaper import Reaper
from space.control.runner import Runner
from space.control.tokens import load_signer
from space.errors import HostError
from space.listening import BoundedProtocol, check_address, configured
from space.settings import Settings
from space.store.database import Database

log = structlog.get_logger(__name__)

CONNECTIONS_MAX = 2000
KEEP_ALIVE_S = 75
SHUTDOWN_S = 5


async def serve(settings: Settings, *beside: Callable[[Control], Coroutine[Any, Any, None]]) -> None:
    """Serve until SIGTERM or SIGINT, and with it what is named ``beside``, over the same control plane.

    Raises ``HostError`` when it cannot be served as the settings say.
    """
    check_address("api", settings.api_host, allow_plaintext=settings.allow_plaintext)
    # Values of secrets are in this process's memory: no file is to have a copy of that.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    figures = Figures()
    async with open_control(settings) as control:
        control.store.took = figures.store_took
        server = uvicorn.Server(
            configured(
                build_app(control, figures),
                host=settings.api_host,
                port=settings.api_port,
                http=BoundedProtocol,
                ws="none",
                limit_concurrency=CONNECTIONS_MAX,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        log.info("serving", host=settings.api_host, port=settings.api_port)
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(Runner(control, figures.operation_ended).run()),
                group.create_task(Builder(control, figures.build_ended).run()),
                group.create_task(Reaper(control).run()),
                group.create_task(Deliverer(control, figures.delivery_took).run()),
                *(group.create_task(other(control)) for other in beside),
            ]
            await server.serve()
            for task in background:
                task.cancel()


async def bootstrap(settings: Settings, key_file: Path | None = None) -> str | None:
    """Make the default project and its admin key, once; return the key, or None when that was done before.

    With ``key_file`` the key is written there (mode 0600) before it is in force. When the project exists but the file
    does not, the operator has no key in hand: the file gets a further admin key.
    """

    def keep(secret: str) -> None:
        if key_file is None:
            return
        try:
            descriptor = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(descriptor, 0o600)
                file.write(f"{secret}\n")
        except OSError as error:
            message = f"The key cannot be written to {key_file}: {error.strerror}."
            raise HostError(message, code="key-file") from error

    async with open_control(settings) as control:
        missing = key_file is not None and not await asyncio.to_thread(key_file.exists)
        made = await projects.bootstrap(control, keep)
        if made is None and missing:
            made = await projects.replace_admin_key(control, keep)
        return made


@contextlib.asynccontextmanager
async def open_control(settings: Settings) -> AsyncGenerator[Control]:
    """Open the store (brought to this version's schema), the signing key and the way to the node."""
    # Nothing that this process makes is anybody else's to read.
    os.umask(0o077)
    settings.api_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = Database(settings.store)
    node = Node(settings.node_socket)
    control = Control(settings, store, node, load_signer(settings.api_dir / "token.key"))
    try:
        await store.migrate()
        yield control
    finally:
        control.outbound.close()
        control.token_servers.close()
        await control.gateway.close()
        await node.close()
        await store.close()

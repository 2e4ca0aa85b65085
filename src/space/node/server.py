"""Serves the node: everything on the Unix socket for the api, the data plane on a TCP port for holders of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
import pwd
import resource
import signal
import socket
from pathlib import Path
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from space.errors import HostError
from space.listening import Server, check_address, configured, trusting
from space.node.http import build_app, gives_away
from space.node.node import Node
from space.node.ports.upgrades import upgradable
from space.settings import Settings

log = structlog.get_logger(__name__)

KEEP_ALIVE_S = 320
CONNECTIONS_MAX = 4096
WEBSOCKET_MESSAGE_BYTES_MAX = 512 * 1024
SHUTDOWN_S = 3
BACKLOG = 1024


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Machines, and the commands in them, go on without the node."""
    check_address("node", settings.node_host, allow_plaintext=settings.allow_plaintext)
    _raise_file_limit()
    # Requests carry tokens in their queries: what uvicorn would log of them is not wanted.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    loop = asyncio.get_running_loop()
    async with Node(settings) as node:
        unix, tcp = _bind_unix(settings), _bind_tcp(settings)
        local = _server(build_app(node, local=True), trusting(_trusted(settings)), None)
        public = _server(build_app(node), upgradable(gives_away(node)), CONNECTIONS_MAX)
        servers = (local, public)

        def stop() -> None:
            for server in servers:
                server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(local.serve(sockets=[unix]))
                group.create_task(public.serve(sockets=[tcp]))
                log.info("node-serves", socket=str(settings.node_socket), host=settings.node_host)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def _server(app: Any, protocol: type[HttpToolsProtocol], connections_max: int | None) -> Server:
    config = configured(
        app,
        http=protocol,
        ws="websockets-sansio",
        ws_max_size=WEBSOCKET_MESSAGE_BYTES_MAX,
        ws_per_message_deflate=False,
        ws_ping_interval=20,
        ws_ping_timeout=60,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        limit_concurrency=connections_max,
        backlog=BACKLOG,
    )
    return Server(config)


def _bind_unix(settings: Settings) -> socket.socket:
    """Listen on the Unix socket, replacing a dead node's; only the api's group and root may connect."""
    path = settings.node_socket
    path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    sock.bind(str(draft))
    _open_to_api(draft, settings.api_user)
    sock.listen(BACKLOG)
    draft.rename(path)
    sock.settimeout(0)
    return sock


def _open_to_api(path: Path, api_user: str) -> None:
    """Let the api's group connect. An installation without that user (a developer's own) keeps the socket to itself."""
    try:
        group = grp.getgrgid(pwd.getpwnam(api_user).pw_gid).gr_gid
    except KeyError:
        path.chmod(0o600)
        return
    if path.stat().st_gid != group:
        try:
            os.chown(path, -1, group)
        except PermissionError as error:
            raise HostError(
                f"The node's socket cannot be given to the group of {api_user}: the node's user must be in that group.",
                code="socket-group",
            ) from error
    path.chmod(0o660)


def _trusted(settings: Settings) -> frozenset[int]:
    trusted = {0, os.geteuid()}
    with contextlib.suppress(KeyError):
        trusted.add(pwd.getpwnam(settings.api_user).pw_uid)
    return frozenset(trusted)


def _bind_tcp(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.node_host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.node_host, settings.node_port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise HostError(
            f"The node cannot listen on {settings.node_host}:{settings.node_port}: {error.strerror}.",
            code="port-in-use",
        ) from error
    sock.settimeout(0)
    return sock


def _raise_file_limit() -> None:
    """Take as many open files as the host allows: two per running command, two per machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

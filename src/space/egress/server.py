"""Serves the gateway: sandboxes' connections and questions on two ports, and the api on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pwd
import resource
import signal
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import structlog

from space.egress import dns
from space.egress.attachments import Attachments
from space.egress.audit import Audit
from space.egress.certificates import Authority, upstream_context
from space.egress.gateway import Gateway
from space.egress.http_api import build_app
from space.egress.links import Links
from space.egress.metrics import Metrics
from space.egress.pipeline import Pipeline
from space.egress.resolve import Resolver
from space.egress.tunnels import Tunnels
from space.errors import HostError
from space.listening import Server, configured, trusting
from space.settings import Settings

log = structlog.get_logger(__name__)

BACKLOG = 1024
SHUTDOWN_S = 2
FORGET_S = 60.0
_PR_SET_DUMPABLE = 4


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. While nobody serves, nothing leaves a sandbox."""
    _keep_memory_private()
    _raise_file_limit()
    links = Links(settings.links_dir)
    audit = Audit(settings.audit_dir)
    metrics = Metrics()
    tunnels = Tunnels()
    attachments = Attachments(tunnels.review)
    resolver = Resolver(settings.egress_resolvers, settings.egress_private_hosts)
    authority = Authority.load(settings.gateway_dir / "ca.key", settings.gateway_dir / "ca.crt")
    pipeline = Pipeline(links, attachments, audit, tunnels, metrics)
    gateway = Gateway(pipeline, resolver, authority, lambda: upstream_context(settings.egress_ca_file))
    names = dns.Names(links, attachments, audit, metrics, resolver)
    metrics.show("space_egress_sandboxes", "Sandboxes whose policy is known.", lambda: len(attachments))
    metrics.show("space_egress_tunnels", "Connections that are passed on unread.", lambda: len(tunnels))
    metrics.show("space_egress_records_lost", "Audit records that could not be written.", lambda: audit.lost)
    api = _api_server(build_app(attachments, audit, metrics), settings)
    unix = _bind_unix(settings)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with contextlib.AsyncExitStack() as stack:
        asked = await stack.enter_async_context(_questions(settings, names))
        listeners = [_listen(family, settings.gateway_port) for family in families()]
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(audit.run()),
                tasks.create_task(gateway.run(listeners)),
                tasks.create_task(_forget(names, links)),
                tasks.create_task(api.serve(sockets=[unix])),
            ]
            log.info("gateway-serves", port=settings.gateway_port, dns_port=settings.gateway_dns_port, asked=asked)
            await stopped.wait()
            api.should_exit = True
            for task in running[1:3]:
                task.cancel()
            await asyncio.wait(running[1:])
            running[0].cancel()


def families() -> list[socket.AddressFamily]:
    """Return the address families of this host."""
    found = [socket.AF_INET]
    if Path("/proc/net/if_inet6").exists():
        found.append(socket.AF_INET6)
    return found


@contextlib.asynccontextmanager
async def _questions(settings: Settings, names: dns.Names) -> AsyncGenerator[int]:
    """Answer questions over UDP and TCP while the block lasts."""
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        for family in families():
            sock = _bound(family, socket.SOCK_DGRAM, settings.gateway_dns_port)
            _, datagrams = await loop.create_datagram_endpoint(lambda: dns.Datagrams(names), sock=sock)
            stack.push_async_callback(datagrams.close)
            listener = _listen(family, settings.gateway_dns_port)
            server = await asyncio.start_server(
                lambda reader, writer: dns.serve_stream(names, reader, writer), sock=listener, backlog=BACKLOG
            )
            stack.callback(server.close)
        yield len(families())


async def _forget(names: dns.Names, links: Links) -> None:
    while True:
        await asyncio.sleep(FORGET_S)
        names.forget(links.sandboxes())


def _bound(family: socket.AddressFamily, kind: socket.SocketKind, port: int) -> socket.socket:
    """Bind on every address: a link's end is one of its own. The rules of the links let nobody else there."""
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))  # noqa: S104 - as said above
    except OSError as error:
        sock.close()
        raise HostError(f"The gateway cannot use port {port}: {error.strerror}.", code="port-in-use") from error
    sock.setblocking(False)  # noqa: FBT003 - of socket
    return sock


def _listen(family: socket.AddressFamily, port: int) -> socket.socket:
    sock = _bound(family, socket.SOCK_STREAM, port)
    sock.listen(BACKLOG)
    return sock


def _bind_unix(settings: Settings) -> socket.socket:
    """Listen on the Unix socket, replacing a dead gateway's. Its directory lets the api's group in, and nobody else."""
    path = settings.gateway_socket
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.bind(str(draft))
    draft.chmod(0o660)
    sock.listen(BACKLOG)
    draft.rename(path)
    sock.setblocking(False)  # noqa: FBT003 - of socket
    return sock


def _api_server(app: object, settings: Settings) -> Server:
    trusted = {0, os.geteuid()}
    with contextlib.suppress(KeyError):
        trusted.add(pwd.getpwnam(settings.api_user).pw_uid)
    config = configured(
        app,
        http=trusting(frozenset(trusted)),
        ws="none",
        date_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return Server(config)


def _keep_memory_private() -> None:
    """Secrets are in this process's memory: it leaves no core, and no process of the same user may look into it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise HostError("The gateway's memory cannot be kept from being dumped.", code="dumpable")


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
